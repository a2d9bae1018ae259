"""A request of the C interface belongs to one call of llama_init_from_model, which may fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import pytest
from each import each
from engine import SUBKV, C

from subkv.native import library as _lib


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Any:
    opened = engine.Model(tiny_model("llama"))
    yield opened
    opened.free()


@pytest.fixture
def layout(model: engine.Model, tmp_path: Path) -> Any:
    n_layer = C.llama_model_n_layer(model.handle)
    shapes = [(il, 2, 32, 32) for il in range(n_layer)]
    bands = [[(32, 8)], [(32, 8)]]
    loaded = engine.signed_permutations(shapes, *bands, arch="llama", block_count=n_layer, path=tmp_path / "l.gguf")
    yield loaded
    SUBKV.subkv_layout_free(loaded)


def create(model: engine.Model | None, **params: Any) -> Any:
    """A context, or None; like a program that forgets to cancel."""
    wanted = C.llama_context_default_params()
    for name, value in ({"n_ctx": 256, "n_threads": 1} | params).items():
        setattr(wanted, name, value)
    return C.llama_init_from_model(model.handle if model else None, wanted)


def is_coded(context: Any) -> bool:
    return bool(SUBKV.subkv_get_stats(context, _lib.Stats()))


FAILURES = {
    "no model": {"model": None},
    "no batch": {"n_batch": 0, "n_ubatch": 0},
    "no fitting type": {"type_k": 8},
    "too long": {"n_ctx": 1 << 31},
}


@each("name", FAILURES)
def test_an_attach_ends_with_a_call_that_fails(name: str, model: engine.Model, layout: Any) -> None:
    failure: dict[str, Any] = dict(FAILURES[name])
    assert SUBKV.subkv_attach(layout, None), engine.last_error()
    assert not create(failure.pop("model", model), **failure)
    context = create(model)
    assert context and not is_coded(context)
    C.llama_free(context)


def test_an_attach_ends_with_a_call_that_succeeds(model: engine.Model, layout: Any) -> None:
    for expected in (True, False, False):
        if expected:
            assert SUBKV.subkv_attach(layout, None), engine.last_error()
        context = create(model)
        assert context and is_coded(context) == expected
        C.llama_free(context)


def test_an_observer_ends_with_its_call(model: engine.Model) -> None:
    """It must outlive its context, but not later ones."""
    observer = SUBKV.subkv_observer_new(0)
    assert SUBKV.subkv_observe(observer)
    assert not create(model, n_batch=0, n_ubatch=0)
    SUBKV.subkv_observer_free(observer)
    with engine.session(model) as s:
        s.decode([20, 21, 22])


def test_ordinary_caches_end_with_their_call(
    model: engine.Model, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBKV", str(tmp_path / "l.gguf"))
    for expected in (False, True):
        if not expected:
            SUBKV.subkv_attach_ordinary()
        context = create(model)
        assert context and is_coded(context) == expected
        C.llama_free(context)
