"""Layers that read another layer's rows: these are stored once, and one exact window serves all queries."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import SUBKV, observe_values, observed, session
from test_variants import shape_of

from subkv.native.gguf import Gguf
from subkv.plan.shared import owner, readers

WINDOW = (4, 16, 8)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Iterator[engine.Model]:
    """Layers 1 and 3 have rows that can be coded; 5 and 7 read those of 3."""
    m = engine.Model(tiny_model("gemma4"))
    yield m
    m.free()


@pytest.fixture(scope="module")
def layout(model: engine.Model, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Coarse codes: rows in the wrong place, or the wrong window, are no rounding."""
    return engine.signed_permutations(
        shape_of(model),
        [(32, 8), (32, 4)],
        [(64, 6)],
        arch="gemma4",
        block_count=8,
        path=tmp_path_factory.mktemp("shared") / "layout.gguf",
    )


@pytest.fixture(scope="module")
def tokens(model: engine.Model) -> list[int]:
    return model.random_tokens(150, seed=11)


def test_owners_match_llama_cpp(tiny_model: Callable[..., Path]) -> None:
    """An observer reports exactly the layers that store rows."""
    for arch, n_layer in (("gemma4", 8), ("gemma3n", 25), ("gemma2", 4)):
        m = engine.Model(tiny_model(arch))
        own = [il for il, *_ in shape_of(m)]
        m.free()
        with Gguf(tiny_model(arch)) as base:
            assert all(owner(base, il) == il for il in own)
            followers = {il: owner(base, il) for il in range(n_layer) if owner(base, il) != il}
            assert (
                followers
                == {
                    "gemma4": {4: 2, 5: 3, 6: 2, 7: 3},
                    "gemma3n": {**dict.fromkeys((20, 21, 22, 23), 18), 24: 19},
                    "gemma2": {},
                }[arch]
            )
            for il in own:
                assert readers(base, il) == [il, *(later for later, of in followers.items() if of == il)]


def test_rows_are_stored_once(model: engine.Model, layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        stats = s.stats()
        row = (32 + 16 + 1) + (48 + 1)  # codes and scale of K and V
        assert stats.n_layer_coded == 2
        assert stats.bytes_per_token == 2 * row
        assert stats.bytes_codes == 2 * row * 256
        assert stats.bytes_window == 2 * (64 + 64) * 2 * sum(WINDOW)


def test_splits_and_threads_change_nothing(model: engine.Model, layout: Any, tokens: list[int]) -> None:
    """A ubatch longer than the window overwrites rows of it that the last reader still needs."""
    with session(model, layout, window=WINDOW, n_ubatch=2) as s:
        expected = s.decode(tokens)
    for options in ({"n_ubatch": 150, "threads": 3}, {"n_ubatch": 37, "threads": 1}):
        with session(model, layout, window=WINDOW, **options) as s:
            assert engine.agree(expected, s.decode(tokens)), options


@pytest.mark.parametrize("adapt", [None, "v"])
def test_removed_copied_and_restored(model: engine.Model, layout: Any, tokens: list[int], adapt: str | None) -> None:
    window = (4, 48, 8) if adapt else WINDOW
    options: Any = {"window": window, "n_seq_max": 2, "n_ctx": 512, "adapt": adapt}
    with session(model, layout, **options) as s:
        expected = s.decode(tokens)[100:]
    with session(model, layout, **options) as s:
        s.decode(tokens[:106])
        assert s.rm(0, 100)
        saved = s.state(0)
        s.cp(0, 1)
        assert engine.agree(expected, s.decode(tokens[100:], 100, 1))
        assert engine.agree(expected, s.decode(tokens[100:], 100, 0))
    with session(model, layout, **options) as s:
        assert s.set_state(saved, 1) == len(saved)
        restored = s.decode(tokens[100:], 100, 1)
    # sliding layers stay ordinary, and a restored state has their cells in another order
    with session(model) as s:
        s.decode(tokens[:100])
        saved = s.state(0)
        ordinary = s.decode(tokens[100:], 100)
    with session(model) as s:
        assert s.set_state(saved, 0)
        noise = 4 * engine.distance(ordinary, s.decode(tokens[100:], 100))
    assert engine.agree(expected, restored, flips=(noise, noise))


def test_queries_of_all_readers_count(model: engine.Model, tokens: list[int]) -> None:
    """Moments are means over the queries of three layers; samples belong to the layer that stores the rows."""
    everywhere = np.arange(60, dtype=np.int32)
    pointer = everywhere.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    obs = SUBKV.subkv_observer_new(0)
    SUBKV.subkv_observer_mode(obs, 1, None, 0, None, 0)
    with session(model, observer=obs) as s:
        s.decode(tokens[:60])
        assert SUBKV.subkv_observer_mode(obs, 2, pointer, 60, pointer, 60)
        s.clear()
        s.decode(tokens[:60])
    for il, n in ((1, 1), (3, 3)):
        shape = observed(obs, il)
        assert (shape.n_head, shape.n_tokens, shape.n_query) == (4, 60, 60)
        q2 = n * observe_values(obs, il, "q2", (1, 64, 64))[0]
        own = observe_values(obs, il, "qs", (60, 4, 64)).reshape(-1, 64)
        others = q2 - own.T @ own / len(own)
        assert np.linalg.eigvalsh(others).min() > -1e-5 * np.trace(q2)
        assert (np.trace(others) > 0.5 * np.trace(q2)) == (n > 1)
    SUBKV.subkv_observer_free(obs)
