"""Functions that read a context's rows: the rows that attention reads, as the codec of a head decodes them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from each import each
from engine import SUBKV, last_error, observe_values, observed, session
from test_variants import exact_layout

from research.float32.adaptive import native_params
from subkv.format import adapt

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 24, 8)  # n_sink as in the layouts
N = 150
EAGER = "kv,block=16,length=32,warm=32,max_chunks=3,gain=100,reuse=0,merge=1"

Rows = np.ndarray[Any, np.dtype[np.float32]]


def watched(
    model: engine.Model, layout: Any, tokens: list[int], *, window: Any = WINDOW, **options: Any
) -> tuple[Any, engine.Session]:
    """A session that has read N tokens, and its observer with all their rows."""
    obs = SUBKV.subkv_observer_new(0)
    every = np.arange(N, dtype=np.int32).ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    assert SUBKV.subkv_observer_mode(obs, 2, every, N, every, N)
    s = engine.Session(model, layout, window=window, observer=obs, **options)
    s.decode(tokens[:N])
    return obs, s


def read(s: engine.Session, il: int, head: int, value: bool, d: int) -> tuple[Rows, Any]:
    x, chunk = np.full((N, d), np.nan, np.float32), np.empty(N, np.int32)
    n = SUBKV.subkv_read_rows(s.ctx, il, head, value, 0, 0, N, x.ctypes.data, chunk.ctypes.data)
    assert n == np.count_nonzero(chunk >= 0), last_error()
    return x, chunk


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_rows_of_exact_codes_are_the_keys_and_values(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any], mean: float
) -> None:
    obs, s = watched(model, make_layout(mean=mean), tokens)
    shape = observed(obs, 1)
    assert (shape.coded, shape.plain) == (1, 1)
    for what, value in (("ks", False), ("vs", True)):
        rows = observe_values(obs, 1, what, (N, shape.n_head_kv, shape.d_k))
        for head in range(shape.n_head_kv):
            decoded, chunk = read(s, 1, head, value, shape.d_k)
            assert (chunk == 0).all()
            np.testing.assert_allclose(decoded, rows[:, head], atol=1e-3 * np.abs(rows).max())
    s.close()
    SUBKV.subkv_observer_free(obs)


@each(
    ("option", "n_recent", "end"),
    [("", 24, 128), (",window=48", 24, 128), (",lookahead=16,window=32", 40, 112), (",lookahead=5", 40, 112)],
)
@pytest.mark.parametrize("value", [False, True])
def test_rows_of_adaptive_bases_are_those_of_the_coder_alone(
    model: engine.Model,
    tokens: list[int],
    make_layout: Callable[..., Any],
    value: bool,
    option: str,
    n_recent: int,
    end: int,
) -> None:
    layout, text = make_layout(BANDS, BANDS, mean=0.5), EAGER + option
    obs, s = watched(model, layout, tokens, window=(4, n_recent, 8), adapt=text)
    shape = observed(obs, 0)
    rows = observe_values(obs, 0, "vs" if value else "ks", (N, shape.n_head_kv, shape.d_k))
    halves = np.ascontiguousarray(rows[:, 0].astype(np.float16).astype(np.float32))  # rows in the exact window
    decoded, chunk = read(s, 0, 0, value, shape.d_k)
    expected, chunk_of = np.empty_like(halves), np.empty(N, np.int32)
    params = native_params(adapt.parse(text)[1])
    assert SUBKV.subkv_adapt_replay(
        layout, params, 0, 0, value, halves.ctypes.data, N, expected.ctypes.data, chunk_of.ctypes.data, None, None
    )
    coded = chunk >= 0
    assert np.array_equal(np.flatnonzero(coded), np.arange(4, end))  # whole blocks that the window has let go
    assert np.array_equal(chunk[coded], chunk_of[coded]) and len(set(chunk[coded])) >= 3
    np.testing.assert_array_equal(decoded[coded], expected[coded])
    assert not decoded[~coded].any()
    s.close()
    SUBKV.subkv_observer_free(obs)


def test_output_of_attention(model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]) -> None:
    """Exact codes: the result equals softmax over the exact rows."""
    obs, s = watched(model, make_layout(), tokens)
    shape = observed(obs, 0)
    q = observe_values(obs, 0, "qs", (N, shape.n_head, shape.d_k))
    k = observe_values(obs, 0, "ks", (N, shape.n_head_kv, shape.d_k))
    v = observe_values(obs, 0, "vs", (N, shape.n_head_kv, shape.d_v))
    o = observe_values(obs, 0, "os", (N, shape.n_head, shape.d_v))
    for head in range(shape.n_head):
        of = head * shape.n_head_kv // shape.n_head
        logits = np.where(np.tri(N) > 0, shape.scale * q[:, head] @ k[:, of].T, -np.inf)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        expected = weights @ v[:, of] / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(o[:, head], expected, atol=5e-3 * np.abs(v).max())
    s.close()
    SUBKV.subkv_observer_free(obs)


def test_an_ordinary_cache_has_no_outputs(model: engine.Model, tokens: list[int]) -> None:
    obs, s = watched(model, None, tokens)
    shape = observed(obs, 0)
    assert shape.coded == 0 and shape.n_query == N
    assert SUBKV.subkv_observer_get(obs, 0, b"os", None, 0) == 0
    assert SUBKV.subkv_observer_get(obs, 0, b"o2", None, 0) == -1
    s.close()
    SUBKV.subkv_observer_free(obs)


def test_soft_capping_is_reported(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = engine.Model(tiny_model("gemma2"))
    tokens = [10 + i * 7 % (model.n_vocab - 20) for i in range(N)]
    obs, s = watched(model, exact_layout(model, "gemma2", tmp_path / "layout.gguf"), tokens)
    found = [observed(obs, il) for il in range(SUBKV.subkv_observer_n_layer(obs))]
    assert [(f.coded, f.plain) for f in found if f.n_head] == [(1, 0)] * 2
    s.close()
    SUBKV.subkv_observer_free(obs)
    model.free()


def test_bad_requests(model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]) -> None:
    layout = make_layout(BANDS, BANDS)
    x, chunk = np.empty((N, 32), np.float32), np.empty(N, np.int32)
    at = x.ctypes.data, chunk.ctypes.data
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:10])
        for il, head, seq in ((9, 0, 0), (-1, 0, 0), (0, 9, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)):
            assert SUBKV.subkv_read_rows(s.ctx, il, head, False, seq, 0, N, *at) == -1
            assert f"layer {il}, head {head}, sequence {seq} found" in last_error()
        for first, n in ((-1, N), (0, -1), (2**31 - 2, N)):
            assert SUBKV.subkv_read_rows(s.ctx, 0, 0, False, 0, first, n, *at) == -1
            assert "positions from 0 on" in last_error()
        assert SUBKV.subkv_read_rows(s.ctx, 0, 0, False, 0, 0, N, *at) == 10
        assert SUBKV.subkv_get_sketch_rows(s.ctx, 0, 0, False, 0, x.ctypes.data, x.size) == -1
        assert "with adaptive bases" in last_error()
    with session(model, layout, window=WINDOW, adapt="v,block=16,kind=fd") as s:
        s.decode(tokens[:100])
        assert SUBKV.subkv_get_sketch_rows(s.ctx, 0, 0, True, 0, x.ctypes.data, 8) == -1
        assert "room for 4096 values" in last_error()
        s_rows = np.empty((128, 32), np.float32)
        assert SUBKV.subkv_get_sketch_rows(s.ctx, 0, 0, True, 0, s_rows.ctypes.data, s_rows.size) == 76
    with session(model) as s:
        assert SUBKV.subkv_read_rows(s.ctx, 0, 0, False, 0, 0, N, *at) == -1
    assert SUBKV.subkv_layout_project(layout, 0, 9, False, *at, 1) == -1
    assert "head_kv" in last_error()
