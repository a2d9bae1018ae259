"""States contain rows (FORMAT.md §3) independent of the cells' layout, and restore only the cells of their sequence."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import SUBKV, C, agree, last_error, observe_values, observed, session
from forge import FINGERPRINT, HEAD, MAGIC, body, forged, window_at, with_body
from machine import partial_state, set_partial_state

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "format"))
import codec_numpy

K_BANDS = [(8, 8), (8, 5), (16, 3)]
V_BANDS = [(8, 6), (16, 4), (8, 2)]
WINDOW = (4, 16, 8)
ADAPT = "kv,block=8,length=16,warm=16,max_chunks=3,gain=100,reuse=0,merge=1"
N = 150
I8 = 24  # GGML_TYPE_I8

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(scope="module", params=[16, 10])
def layout(make_layout: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return make_layout(K_BANDS, V_BANDS, recent_bits=request.param)


def rows_in(state: bytes, n_cells: int, widths: list[int]) -> list[Bytes]:
    """Rows [n_cells, width] of every tensor, in the state's order: type, bytes of a row, rows."""
    at = state.index(struct.pack("<iQ", I8, widths[0]))
    found = []
    for width in widths:
        assert struct.unpack_from("<iQ", state, at) == (I8, width)
        at += 12
        found.append(np.frombuffer(state, np.uint8, n_cells * width, at).reshape(n_cells, width))
        at += n_cells * width
    return found


def test_a_state_holds_the_rows_of_the_format(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """Byte for byte: the bases move elements without rounding, and codes follow from coefficients alone.

    A GPU codes the halves that its window holds.
    """
    obs = SUBKV.subkv_observer_new(0)
    every = np.arange(N, dtype=np.int32).ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    assert SUBKV.subkv_observer_mode(obs, 2, every, N, every, N)
    with session(model, layout, window=WINDOW, observer=obs) as s:
        s.decode(tokens[:N])
        state = s.state(0)
    n_layer = SUBKV.subkv_observer_n_layer(obs)
    shape = observed(obs, 0)
    d, n_head_kv = shape.d_k, shape.n_head_kv
    expected = []
    for value, bands in ((False, K_BANDS), (True, V_BANDS)):
        ratios = [2.0 ** (8 - bits) for _, bits in bands]
        for il in range(n_layer):
            x = observe_values(obs, il, "vs" if value else "ks", (N, n_head_kv, d)).astype(np.float32)
            if C.llama_supports_gpu_offload():
                x = x.astype(np.float16).astype(np.float32)
            rows = []
            for head in range(n_head_kv):
                basis = np.empty((d, d), np.float32)
                at = basis.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                assert SUBKV.subkv_layout_basis(layout, il, head, value, False, at, basis.size) == basis.size
                rows.append(codec_numpy.encode(x[:, head] @ basis.T, bands, ratios))
            expected.append(np.concatenate(rows, axis=1))
    found = rows_in(state, N, [e.shape[1] for e in expected])
    for tensor, (original, stored) in enumerate(zip(expected, found, strict=True)):
        np.testing.assert_array_equal(stored, original, err_msg=f"tensor {tensor}")
    SUBKV.subkv_observer_free(obs)


@pytest.mark.parametrize("adapt", [None, ADAPT])
def test_a_restored_state_is_the_state(model: engine.Model, tokens: list[int], layout: Any, adapt: str | None) -> None:
    with session(model, layout, window=WINDOW, adapt=adapt, offload_kqv=adapt is None) as s:
        s.decode(tokens[:N])
        whole, one = s.state(), s.state(0)
        s.clear()
        s.decode(tokens[50:120])
        assert s.set_state(whole) == len(whole)
        assert s.state() == whole
        s.clear()
        assert s.set_state(one, 0) == len(one)
        assert s.state(0) == one


@pytest.mark.parametrize("how", ["clear", "remove"])
@pytest.mark.parametrize("unified", [True, False])
def test_rows_of_a_removed_text_are_in_no_later_state(
    model: engine.Model, tokens: list[int], layout: Any, how: str, unified: bool
) -> None:
    """A state must not contain exact rows of an earlier text; the other sequence keeps its rows."""
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=unified, n_ctx=512) as s:
        fresh = s.state(0)
        s.decode(tokens[:30], seq=1)
        s.decode(tokens[:3])
        short, other = s.state(0), s.state(1)
        assert s.rm(0, -1)
        s.decode(tokens[3:90])
        if how == "clear":
            s.clear()
            s.decode(tokens[:30], seq=1)
        else:
            assert s.rm(0, 0)
        assert s.state(0) == fresh
        s.decode(tokens[:3])
        assert s.state(0) == short
        assert s.state(1) == other


def interleaved(s: engine.Session, tokens: list[int], n: int) -> None:
    """Two sequences with alternating cells, three of the first, two of the second."""
    at = [0, 0]
    while min(at) < n:
        for seq, count in ((0, 3), (1, 2)):
            s.decode(tokens[seq * 40 + at[seq] :][:count], at[seq], seq)
            at[seq] += count


@pytest.mark.parametrize("seq", [None, 0])
def test_a_head_matches_its_state(model: engine.Model, tokens: list[int], layout: Any, seq: int | None) -> None:
    """Changes every bit; bits of earlier shifts do not matter to a reader of cells."""
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:20])
        state = s.state(seq)
        at = state.index(b"subkvst")
        for byte in range(at, at + HEAD - 8):
            damaged = bytearray(state)
            damaged[byte] ^= 1 << byte % 8
            assert s.set_state(bytes(damaged), seq) == 0
        assert s.state(seq) == state


@pytest.mark.parametrize("seq", [None, 0])
def test_a_wrong_head_with_a_valid_checksum_is_refused(
    model: engine.Model, tokens: list[int], layout: Any, seq: int | None
) -> None:
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:20])
        state = s.state(seq)
        fingerprint = state.index(MAGIC) + len(MAGIC)
        window = fingerprint + FINGERPRINT  # n_sink, n_recent, n_rollback, number of sequences, bases, kinds
        places = {
            fingerprint: "layout fingerprint",
            window - 1: "layout fingerprint",
            window: "exact window n_sink",
            window + 4: "exact window n_sink",
            window + 8: "exact window n_sink",
            window + 16: "a state of other bases found",
            window + 20: "a state of other bases found",
            window + 24: "exact rows held as here",
        }
        for at, sentence in places.items():
            changed = bytearray(state)
            changed[at] ^= 1
            assert s.set_state(with_body(bytes(changed), body(state)), seq) == 0
            assert sentence in last_error()
        assert s.set_state(with_body(state, body(state)), seq) == len(state)


def test_a_partial_state_from_before_a_shift_is_refused(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """It contains no cells, and the cells were shifted before and after it was saved."""
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:40])
        C.llama_memory_seq_add(s.memory, 0, 10, -1, 5)
        s.state()  # carries the shift out
        partial = partial_state(s)
        assert set_partial_state(s, partial) == len(partial)
        C.llama_memory_seq_add(s.memory, 0, 10, -1, 3)
        s.state()
        assert set_partial_state(s, partial) == 0
        assert "before or after a shift" in last_error()


def test_a_failed_restore_leaves_the_neighbours_in_a_tile(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """Cells were read when the window turns out to be another text's."""
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        interleaved(s, tokens, 40)
        other, state = s.state(0), s.state(1)
        held = window_at(state, sum(WINDOW))
        assert s.set_state(forged(state, {held + 4 * (WINDOW[0] + 1): 5 + sum(WINDOW[1:])}), 1) == 0
        assert "exact window" in last_error()
        assert C.llama_memory_seq_pos_max(s.memory, 1) == -1
        assert s.state(0) == other
        # it has separate cells again, in the gaps
        assert s.set_state(state, 1) == len(state)
        assert s.state(1) == state
        assert s.state(0) == other


def test_a_state_is_restored_in_other_cells(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:110])
        s.clear()
        s.decode(tokens[:90])
        state = s.state(0)
    with session(model, layout, window=WINDOW, n_seq_max=3, unified=True, n_ctx=512) as s:
        interleaved(s, tokens, 60)
        assert s.rm(0, -1)
        other = s.state(1)
        assert s.set_state(state, 2) == len(state)
        assert s.state(1) == other
        assert agree(expected[90:], s.decode(tokens[90:110], 90, 2))


def test_a_state_on_the_device(model: engine.Model, tokens: list[int], layout: Any) -> None:
    flags = C.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:110])
        s.clear()
        s.decode(tokens[:90])
        plain = s.state(0)
        buf = (ctypes.c_uint8 * C.llama_state_seq_get_size_ext(s.ctx, 0, flags))()
        assert C.llama_state_seq_get_data_ext(s.ctx, buf, len(buf), 0, flags) == len(buf)
        s.clear()
        s.decode(tokens[20:70])
        assert C.llama_state_seq_set_data_ext(s.ctx, buf, len(buf), 0, flags) == len(buf), last_error()
        assert s.state(0) == plain
        assert agree(expected[90:], s.decode(tokens[90:110], 90))


def test_a_state_file(model: engine.Model, tokens: list[int], layout: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "state").encode()
    kept = (C.llama_token * 1)(7)
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:90])
        state = s.state(0)
        assert C.llama_state_seq_save_file(s.ctx, path, 0, kept, 1) > len(state)
        s.clear()
        read, n = (C.llama_token * 1)(), ctypes.c_size_t()
        assert C.llama_state_seq_load_file(s.ctx, path, 0, read, 1, ctypes.byref(n)) > len(state)
        assert (n.value, read[0]) == (1, 7)
        assert s.state(0) == state
