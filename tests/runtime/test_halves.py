"""Models with a sliding half next to the coded one: a state has both halves or neither, and both share positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
from each import each
from engine import C, distance, last_error, session
from forge import body_value, forged, window_at
from machine import partial_state, set_partial_state
from test_shift import add, discard
from test_variants import exact_layout

WINDOW = (4, 16, 8)
NEXT = 10**9  # placeholder for the position of the second cell


class Gemma:
    """A tiny model in which every other layer has a sliding window, and exact codes of the other layers."""

    def __init__(self, path: Path, layout: Path) -> None:
        self.model = engine.Model(path)
        self.layout = exact_layout(self.model, "gemma2", layout)
        self.tokens = [10 + i * 7 % (self.model.n_vocab - 20) for i in range(440)]

    def session(self, **options: Any) -> Any:
        return session(self.model, self.layout, window=WINDOW, **options)


@pytest.fixture(scope="module")
def gemma(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gemma]:
    made = Gemma(tiny_model("gemma2"), tmp_path_factory.mktemp("gemma") / "layout.gguf")
    yield made
    made.model.free()


def test_a_tail_is_refused_if_its_window_is_lost(gemma: Gemma) -> None:
    """Another sequence's token takes the cell of the sliding half that has just left the window."""
    tokens = gemma.tokens
    with gemma.session() as s:
        expected = s.decode(tokens[:20])
    for lost in (False, True):
        with gemma.session(n_seq_max=2, unified=True, n_ctx=512) as s:
            s.decode(tokens[:16])
            if lost:
                add(s, 1, 0, -1, 1)  # nothing moves, but llama.cpp looks for cells from the first one on
            s.decode(tokens[100:101], 0, 1)
            before = s.state(0)
            assert s.rm(0, 15) != lost
            if lost:
                assert "sliding windows" in last_error() and s.state(0) == before
            found = s.decode(tokens[15 + lost : 20], 15 + lost)
            assert distance(expected[15 + lost :], found) < 0.02


def test_a_part_is_not_copied_if_its_window_is_lost(gemma: Gemma) -> None:
    tokens = gemma.tokens
    with gemma.session() as s:
        expected = s.decode(tokens[:20])
    for lost in (False, True):
        with gemma.session(n_seq_max=3, unified=True, n_ctx=512) as s:
            s.decode(tokens[:16])
            if lost:
                add(s, 1, 0, -1, 1)  # as above
            s.decode(tokens[100:101], 0, 1)
            s.cp(0, 2, 0, 15)
            assert last_error().startswith("seq_cp: with positions from 0 on" if lost else "")
            assert ("sliding windows" in last_error()) == lost
            assert C.llama_memory_seq_pos_max(s.memory, 2) == (-1 if lost else 14)
            if lost:
                s.cp(0, 2)  # all of it
                assert not last_error()
            found = s.decode(tokens[15 + lost : 20], 15 + lost, 2)
            assert distance(expected[15 + lost :], found) < 0.02


@each("n, p0, p1", [(120, 0, 60), (120, 40, 60), (120, 60, 118), (120, 60, -1), (400, 0, 60), (400, 390, 395)])
def test_any_part_is_removed_while_its_window_is_held(gemma: Gemma, n: int, p0: int, p1: int) -> None:
    """The codes are exact: the same logits as with llama.cpp's own cache, which has the same cells."""
    found = []
    for layout in (None, gemma.layout):
        with session(gemma.model, layout, window=WINDOW if layout else (-1, -1, -1), n_ctx=512) as s:
            s.decode(gemma.tokens[:n])
            assert s.rm(0, p0, p1)
            end = C.llama_memory_seq_pos_max(s.memory, 0) + 1
            assert end == (p0 if p1 < 0 else n)
            found.append(s.decode(gemma.tokens[end : end + 20], end))
    assert distance(*found) < 0.02


def test_a_refused_edit_changes_neither_half(gemma: Gemma) -> None:
    """Tokens of another sequence have taken the first cells of the sliding half."""
    tokens = gemma.tokens
    with gemma.session() as s:
        expected = s.decode(tokens[:140], pieces=[60, 60, 20])[120:]
    with gemma.session(n_seq_max=3, unified=True, n_ctx=512) as s:
        s.decode(tokens[:120], pieces=[60, 60])
        add(s, 1, 0, -1, 1)  # as above
        s.decode(tokens[200:260], 0, 1)
        before = s.state(0)
        assert not s.rm(0, 50)
        assert last_error().startswith("seq_rm: after removing positions from 50 on")
        s.cp(0, 2, 0, 50)
        assert last_error().startswith("seq_cp: with positions from 0 on")
        add(s, 0, 10, -1, -5)
        assert "two tokens at position" in last_error()
        s.assert_refused()
        assert s.state(0) == before
        assert C.llama_memory_seq_pos_max(s.memory, 2) == -1
        assert distance(expected, s.decode(tokens[120:140], 120)) < 0.02


def test_two_tokens_at_one_position_of_the_sliding_half_are_refused(gemma: Gemma) -> None:
    """After a checkpoint a sequence has separate sliding cells and shares coded cells; a copy would have both, and
    attend to
    both.
    """
    tokens = gemma.tokens
    with gemma.session() as s:
        expected = s.decode(tokens[:22])
    with gemma.session(n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:20])
        s.cp(0, 1)
        s.decode(tokens[20:21], 20, 1)
        kept = partial_state(s)
        s.cp(1, 0)  # one cell for both
        assert not last_error() and s.rm(0, 20)
        assert set_partial_state(s, kept) == len(kept)
        s.cp(1, 0)
        assert last_error().startswith("seq_cp: one token per position expected in the layers of sliding windows")
        s.assert_refused()
        found = s.decode(tokens[20:22], 20)
        assert distance(expected[20:], found) < 0.02
        assert s.rm(0, -1)
        s.cp(1, 0)
        assert not last_error()
        assert distance(expected[21:], s.decode(tokens[21:22], 21)) < 0.02


def test_a_later_part_of_a_batch_takes_nothing_from_an_earlier_one(gemma: Gemma) -> None:
    """Cells that slide away when the first part is there, and that its tokens attend to."""
    tokens = gemma.tokens
    with gemma.session() as s:
        expected = s.decode(tokens[:49])
    with gemma.session(n_seq_max=3, unified=True, n_ctx=512, n_ubatch=24) as s:
        s.decode_batch([(tokens[i], i, seq) for i in range(24) for seq in (0, 1)])  # their cells take turns
        s.decode(tokens[24:34], 24, 0)
        add(s, 2, 0, -1, 1)  # nothing moves, but llama.cpp looks for cells from the first one on
        assert distance(expected[24:], s.decode(tokens[24:49], 24, 1)) < 0.02


@pytest.mark.parametrize("partial", [False, True])
def test_a_damaged_state_touches_neither_half(gemma: Gemma, partial: bool) -> None:
    """Any byte of either half, or its end."""
    take, give = (partial_state, set_partial_state) if partial else (engine.Session.state, engine.Session.set_state)
    with gemma.session() as s:
        s.decode(gemma.tokens[:60])
        state = take(s, 0)
        s.decode(gemma.tokens[100:130], 60)
        before = s.state(0)
        for at in range(8, len(state), len(state) // 97):
            damaged = bytearray(state)
            damaged[at] ^= 16
            assert give(s, bytes(damaged), 0) == 0
            assert give(s, state[:at], 0) == 0
            assert s.state(0) == before
        assert give(s, state, 0) == len(state)


@each("partial", [False, True])
@each("flash_attn", [0, 1])
@each("values", [{0: 2}, {4: 10**6}, {8: -1}, {8: -2}, {8: 2**30}, {8: NEXT}, {12: 0}, {12: 2}])
def test_forged_cells_of_the_sliding_half_are_refused_before_anything_is_touched(
    gemma: Gemma, partial: bool, flash_attn: int, values: dict[int, int]
) -> None:
    """Streams, cells, the first one's position (out of range, or the next one's), and its sequences."""
    take, give = (partial_state, set_partial_state) if partial else (engine.Session.state, engine.Session.set_state)
    with gemma.session(n_seq_max=2, unified=True, flash_attn=flash_attn) as s:
        s.decode(gemma.tokens[:60])
        state = take(s, 0)
        s.decode(gemma.tokens[100:130], 60)
        before = s.state(0)
        values = {at: body_value(state, 20, half=1) if value == NEXT else value for at, value in values.items()}
        assert give(s, forged(state, values, half=1), 0) == 0
        assert s.state(0) == before
        assert give(s, forged(state, {}, half=1), 0) == len(state)


def test_a_window_of_another_text_empties_both_halves(gemma: Gemma) -> None:
    """Cells were read when it turns out."""
    with gemma.session() as s:
        fresh = s.state(0)
        expected = s.decode(gemma.tokens[:40])
        s.clear()
        s.decode(gemma.tokens[:60])
        state = s.state(0)
        held = window_at(state, sum(WINDOW))
        bad = forged(state, {held + 4 * (WINDOW[0] + 1): 5 + sum(WINDOW[1:])})
        assert s.set_state(bad, 0) == 0
        assert C.llama_memory_seq_pos_max(s.memory, 0) == -1
        assert s.state(0) == fresh
        assert distance(expected, s.decode(gemma.tokens[:40])) < 0.02


def test_a_state_that_finds_no_room_empties_both_halves(gemma: Gemma) -> None:
    with gemma.session(n_seq_max=2, unified=True, n_ctx=256) as s:
        fresh = s.state(0)
        s.decode(gemma.tokens[:120])
        state = s.state(0)
        assert s.rm(0, -1)
        s.decode(gemma.tokens[:160], 0, 1)
        s.decode(gemma.tokens[:20], 0, 0)
        other = s.state(1)
        assert s.set_state(state, 0) == 0
        assert C.llama_memory_seq_pos_max(s.memory, 0) == -1
        assert s.state(0) == fresh
        assert s.state(1) == other


def test_a_partial_state_from_before_a_shift(gemma: Gemma) -> None:
    """Its rows have old positions; a whole state restores these positions, and the partial state fits again."""
    tokens = gemma.tokens
    with gemma.session(n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:100])
        kept, whole = partial_state(s), s.state(0)
        discard(s)
        s.decode(tokens[100:110], 36)
        before, late = s.state(0), partial_state(s)
        assert set_partial_state(s, kept) == 0
        assert "shift" in last_error()
        assert s.state(0) == before
        assert set_partial_state(s, late) == len(late)
        s.cp(0, 1)
        assert s.set_state(whole, 0) == len(whole)
        assert set_partial_state(s, late) == 0
        assert set_partial_state(s, kept) == len(kept)
        assert s.state(0) == whole
        assert s.rm(0, -1)
        s.decode(tokens[:100])  # nothing has moved in it
        assert set_partial_state(s, kept) == len(kept)
        assert s.rm(0, -1)
        s.cp(1, 0)
        assert set_partial_state(s, kept) == 0
        assert set_partial_state(s, late) == len(late)


def test_a_partial_state_restores_a_state_after_a_shift(gemma: Gemma) -> None:
    """Taken and restored at the same positions."""
    tokens = gemma.tokens
    with gemma.session() as s:
        s.decode(tokens[:120])
        discard(s)
        kept = partial_state(s)
        expected = s.decode(tokens[120:140], 56)
        assert set_partial_state(s, kept) == len(kept)
        assert s.rm(0, 56)
        assert distance(expected, s.decode(tokens[120:140], 56)) < 0.02
        add(s, 0, 40, -1, 3)
        assert not last_error()
        assert set_partial_state(s, kept) == 0
