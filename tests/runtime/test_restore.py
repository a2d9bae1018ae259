"""Restoring a state: the data it replaces, and states refused because of their cells, exact rows or positions."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from each import each
from engine import C, agree, last_error, session, two_states
from forge import HEAD, forged, window_at
from test_variants import exact_layout

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 16, 8)
ADAPT = "kv,block=8,length=16,warm=16,max_chunks=3,gain=100,reuse=0,merge=1"
SEPARATE = {"window": WINDOW, "n_seq_max": 3, "n_ctx": 768}
SHARED = SEPARATE | {"unified": True}
CELLS = 12  # of a body: streams, cells, then pos, n_seq_id and seq_id of the first cell
LAST = 2**30 - 1  # the largest position


@pytest.fixture(scope="module")
def layout(make_layout: Callable[..., Any]) -> Any:
    return make_layout(BANDS, BANDS)


def adaptive_at(model: engine.Model, state: bytes) -> int:
    """Where in the body the adaptive bases of the first head are, behind the exact window."""
    n_slots = sum(WINDOW)
    n_rows = C.llama_model_n_layer(model.handle) * n_slots * C.llama_model_n_head_kv(model.handle)
    return window_at(state, n_slots) + 4 * n_slots + n_rows * 2 * (32 + 32)


def pos_max(s: engine.Session, seq: int = 0) -> int:
    return int(C.llama_memory_seq_pos_max(s.memory, seq))


@pytest.mark.parametrize("adapt", [None, ADAPT])
def test_a_state_of_nothing_leaves_nothing(
    model: engine.Model, tokens: list[int], layout: Any, adapt: str | None
) -> None:
    with session(model, layout, window=WINDOW, adapt=adapt, offload_kqv=adapt is None) as s:
        fresh = s.state(0)
        expected = s.decode(tokens[:90])
        assert s.rm(0, 0)
        nothing = s.state(0)
        assert nothing == fresh
        s.decode(tokens[100:170])
        assert s.set_state(nothing, 0) == len(nothing)
        assert pos_max(s) == -1
        assert s.state(0) == fresh
        assert agree(expected, s.decode(tokens[:90]))


def test_a_state_of_nothing_empties_sliding_layers_too(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = engine.Model(tiny_model("gemma2"))
    tokens = [10 + i * 7 % (model.n_vocab - 20) for i in range(60)]
    with session(model, exact_layout(model, "gemma2", tmp_path / "layout.gguf"), window=WINDOW) as s:
        nothing = s.state(0)
        s.decode(tokens)
        assert s.set_state(nothing, 0) == len(nothing)
        assert s.state(0) == nothing
    model.free()


def test_the_others_leave_with_their_exact_rows(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, **SHARED) as s:
        fresh = s.state(1)
        s.decode(tokens[:60])
        kept = s.state(0)
        s.decode(tokens[60:150], seq=1)
        C.llama_memory_seq_keep(s.memory, 0)
        assert s.state(0) == kept
        assert s.state(1) == fresh


def test_sequences_of_other_streams_stay(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """llama.cpp's seq_keep removes only from the sequence's stream."""
    with session(model, layout, **SEPARATE) as s:
        s.decode(tokens[:60])
        s.decode(tokens[60:150], seq=1)
        before = s.state(0), s.state(1)
        C.llama_memory_seq_keep(s.memory, 0)
        assert (s.state(0), s.state(1)) == before


def test_a_copy_is_in_a_state_at_once(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """llama.cpp copies streams when the next batch is decoded."""
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:110])
    with session(model, layout, **SEPARATE) as s:
        s.decode(tokens[:90])
        s.cp(0, 1)
        state = s.state(1)
        assert s.rm(0, -1)
        assert s.set_state(state, 2) == len(state)
        assert agree(expected[90:], s.decode(tokens[90:110], 90, 2))
        assert agree(expected[90:], s.decode(tokens[90:110], 90, 1))


def test_a_copy_is_independent_of_later_restores(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:110])
    with session(model, layout, **SEPARATE) as s:
        s.decode(tokens[100:190], seq=2)
        other = s.state(2)
        s.decode(tokens[:90])
        s.cp(0, 1)
        assert s.set_state(other, 0) == len(other)
        assert agree(expected[90:], s.decode(tokens[90:110], 90, 1))


def test_two_tokens_of_a_sequence_are_never_at_one_position(
    model: engine.Model, tokens: list[int], layout: Any
) -> None:
    with session(model, layout, **SHARED) as s:
        s.decode(tokens[:60])
        s.decode(tokens[60:150], seq=1)
        before = s.state(0), s.state(1)
        s.cp(0, 1, 30, 40)
        assert last_error().startswith("seq_cp: one token per position") and "position 30" in last_error()
        s.assert_refused(1)
        assert (s.state(0), s.state(1)) == before
        s.cp(0, 2)
        once = s.state(2)
        s.cp(0, 2)  # the same tokens
        assert s.state(2) == once


def test_no_byte_of_a_state_may_change(model: engine.Model, tokens: list[int], layout: Any) -> None:
    rng = random.Random(3)
    with session(model, layout, window=WINDOW) as s:
        state, other = two_states(s, tokens)
        for _ in range(100):
            damaged = bytearray(state)
            damaged[rng.randrange(8, len(state))] ^= 1 << rng.randrange(8)
            assert s.set_state(bytes(damaged), 0) == 0
            assert s.state(0) == other


@each(
    ("at", "value"),
    [
        (0, 2),  # streams
        (4, 10**9),  # cells
        (8, -1),  # position of the first cell
        (8, -(2**31)),
        (8, LAST + 1),
        (8, 1),  # that of the next
        (CELLS, 0),  # its sequences
        (CELLS, 2**30),
    ],
)
def test_forged_cells_are_refused_before_anything_is_touched(
    model: engine.Model, tokens: list[int], layout: Any, at: int, value: int
) -> None:
    with session(model, layout, window=WINDOW) as s:
        state, other = two_states(s, tokens)
        del engine.LOG[:]
        assert s.set_state(forged(state, {at: value}), 0) == 0
        assert "expected" in engine.LOG[-1] and "found" in engine.LOG[-1]
        assert s.state(0) == other
        assert s.set_state(forged(state, {}), 0) == len(state)


def test_exact_rows_belong_to_cells(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """Exact rows of another text: 30 tokens, but a row of position 40."""
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:30])
        state = s.state(0)
        held = window_at(state, sum(WINDOW))
        slot = WINDOW[0] + 40 % sum(WINDOW[1:])
        assert s.set_state(forged(state, {held + 4 * slot: 40}), 0) == 0
        assert "sequence 0" in last_error() and "position 40" in last_error()
        assert pos_max(s) == -1
        assert s.state(0) != state


@pytest.mark.parametrize(("units", "expected"), [(1, "whole blocks"), (0, "at most 60 coded positions")])
def test_adaptive_bases_belong_to_cells(
    model: engine.Model, tokens: list[int], layout: Any, units: int, expected: str
) -> None:
    """The coded range, of one head or of all, does not match the cells."""
    n_units = 2 * C.llama_model_n_layer(model.handle) * C.llama_model_n_head_kv(model.handle)
    with session(model, layout, window=WINDOW, adapt=ADAPT, offload_kqv=False) as s:
        s.decode(tokens[:60])
        state = s.state(0)
        at, changed = adaptive_at(model, state), {}
        for _ in range(units or n_units):
            changed[at] = 8000
            at += 12 + struct.unpack_from("<Q", state, HEAD + 8 + at + 4)[0]
        assert s.set_state(forged(state, changed), 0) == 0
        assert expected in last_error()
        assert pos_max(s) == -1


@pytest.mark.parametrize("size", [0, 1, 2**30 - 1])
def test_sizes_of_adaptive_bases_ask_for_no_memory(
    model: engine.Model, tokens: list[int], layout: Any, size: int
) -> None:
    """The size of the first head's: none, too small, or a GiB of a state of kilobytes."""
    with session(model, layout, window=WINDOW, adapt=ADAPT, offload_kqv=False) as s:
        s.decode(tokens[:60])
        state = s.state(0)
        bad = forged(state, {adaptive_at(model, state) + 4: size})
        risen = engine.peak()
        assert s.set_state(bad, 0) == 0
        assert risen() < 2**28
        assert pos_max(s) == -1
        assert s.set_state(state, 0) == len(state)


def test_positions_have_an_end(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:20], LAST - 19)
        assert s.try_decode(tokens[20:21], LAST + 1) != 0
        assert f"positions below {LAST + 1} expected" in last_error()
        assert s.rm(0, LAST - 5)
        s.decode(tokens[14:20], LAST - 5)
        assert s.try_decode(tokens[:1], 2**31 - 1, 0) != 0


def test_a_far_position_asks_for_no_memory(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """Blocks before the first position are skipped at once: 10^9 of them would be 16 GB."""
    with session(model, layout, window=WINDOW, adapt=ADAPT, offload_kqv=False) as s:
        assert np.isfinite(s.decode(tokens[:60], LAST - 100)).all()
        assert s.stats().n_chunks > 0
