"""Fixtures: the tiny llama, text for it and layouts, which tests of the runtime and of research share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest

FULL16 = [(32, 16)]


@pytest.fixture(scope="session")
def model(tiny_model: Callable[..., Path]) -> Iterator[engine.Model]:
    """The tiny llama: F32 weights, grouped-query attention, heads of 32."""
    m = engine.Model(tiny_model("llama"))
    yield m
    m.free()


@pytest.fixture(scope="session")
def tokens(model: engine.Model) -> list[int]:
    """200 tokens of no meaning."""
    return model.random_tokens(200, seed=7)


@pytest.fixture(scope="session")
def make_layout(tmp_path_factory: pytest.TempPathFactory, model: engine.Model) -> Callable[..., Any]:
    """make_layout(bands_k, bands_v, n_sink=, …): bases for the tiny llama, see engine.signed_permutations."""
    folder = tmp_path_factory.mktemp("layouts")
    made: dict[Any, Any] = {}

    def make(bands_k: engine.Bands = FULL16, bands_v: engine.Bands = FULL16, **options: Any) -> Any:
        key = (tuple(bands_k), tuple(bands_v), *sorted(options.items()))
        if key not in made:
            n_layer = engine.C.llama_model_n_layer(model.handle)
            n_head_kv = engine.C.llama_model_n_head_kv(model.handle)
            made[key] = engine.signed_permutations(
                [(il, n_head_kv, 32, 32) for il in range(n_layer)],
                bands_k,
                bands_v,
                arch="llama",
                block_count=n_layer,
                path=folder / f"{len(made)}.gguf",
                **options,
            )
        return made[key]

    return make
