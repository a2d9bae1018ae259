"""Positions that move (llama_memory_seq_add): keys are decoded, rotated and coded again, exact rows stay exact."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import engine
import numpy as np
import pytest
from each import each
from engine import C, agree, distance, last_error, session

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 16, 8)
KEEP, N_DISCARD, LENGTH = 8, 64, 150  # tokens at the start that stay, that are discarded after them, in all


def add(s: Any, seq: int, p0: int, p1: int, by: int) -> None:
    C.llama_memory_seq_add(C.llama_get_memory(s.ctx), seq, p0, p1, by)


def discard(s: Any, n_removed: int = N_DISCARD, seq: int = 0) -> None:
    """Removes and shifts like llama-server with a full context."""
    assert s.rm(seq, KEEP, KEEP + n_removed)
    add(s, seq, KEEP + n_removed, -1, -n_removed)


def shifted(model: engine.Model, tokens: list[int], layout: Any, **options: Any) -> np.ndarray:
    """Logits of 30 tokens after a shift."""
    with session(model, layout, **options) as s:
        s.decode(tokens[:LENGTH])
        discard(s)
        return s.decode(tokens[LENGTH : LENGTH + 30], LENGTH - N_DISCARD)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("window", [WINDOW, (0, 0, 0), (4, 0, 0)])
def test_exact_codes_shift_as_the_f16_cache_does(
    tiny_model: Callable[..., Any], tmp_path: Any, arch: str, window: tuple[int, int, int]
) -> None:
    """gemma2: a sliding half shifts next to the coded one. Rows are rounded to half once more, as with f16."""
    from test_variants import exact_layout

    model = engine.Model(tiny_model(arch))
    tokens = np.random.default_rng(3).integers(10, model.n_vocab, LENGTH + 30).tolist()
    expected = shifted(model, tokens, None)
    again = shifted(model, tokens, None, flash_attn=0)
    with session(model) as s:
        s.decode(tokens[:LENGTH])
        unshifted = s.decode(tokens[LENGTH : LENGTH + 30], LENGTH)
    found = shifted(model, tokens, exact_layout(model, arch, tmp_path / "layout.gguf"), window=window)
    floor = max(distance(expected, again), 2e-3)
    assert distance(expected, unshifted) > 20 * floor, "the shift changes nothing: the test proves nothing"
    assert distance(expected, found) < 2 * floor
    model.free()


def test_neighbours_move_by_different_distances(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]
) -> None:
    """Two ranges of a tile, before any token sees them: as on an f16 cache."""
    runs = []
    for layout, options in ((None, {}), (None, {"flash_attn": 0}), (make_layout(), {"window": WINDOW})):
        with session(model, layout, **options) as s:
            s.decode(tokens[:60])
            assert s.rm(0, 10, 16) and s.rm(0, 30, 34)
            add(s, 0, 16, 30, -6)
            add(s, 0, 34, -1, -10)
            runs.append(s.decode(tokens[60:80], 50))
    floor = max(distance(runs[0], runs[1]), 2e-3)
    assert distance(runs[0], runs[2]) < 2 * floor


MOVES = {
    "a tail shorter than the window": [("rm", 40, 110), ("add", 110, -1, -70)],
    "everything but the first token": [("rm", 1, 60), ("add", 60, -1, -59)],
    "everything": [("rm", 0, 60), ("add", 60, -1, -60)],
    "a part within the window": [("rm", 108, 112), ("add", 112, 116, -4), ("rm", 112, -1)],
    "a part before the window": [("rm", 20, 30), ("add", 30, 60, -10), ("rm", 50, -1)],
    "sinks behind others": [("add", 0, 2, 1000)],
    "a gap in the window": [("add", 110, -1, 7)],
    "a gap, closed again": [("add", 110, -1, 40), ("add", 150, -1, -40)],
    "two parts": [("rm", 10, 50), ("add", 50, 70, -40), ("rm", 30, 110), ("add", 110, 116, -80), ("rm", 36, -1)],
    "below zero": [("add", 0, -1, -30)],
}


@pytest.mark.parametrize("window", [WINDOW, (4, 16, 0), (0, 16, 8), (0, 0, 0)])
@each("name", list(MOVES))
def test_any_part_can_move_as_in_the_f16_cache(
    model: engine.Model, tokens: list[int], make_layout: Any, name: str, window: tuple[int, int, int]
) -> None:
    """Exact codes: a cell that is read twice, or not at all, or with a row of another position, would show."""
    runs = []
    for layout, options in ((None, {}), (None, {"flash_attn": 0}), (make_layout(), {"window": window})):
        with session(model, layout, n_ctx=512, **options) as s:
            s.decode(tokens[:120])
            for call, *arguments in MOVES[name]:
                s.rm(0, *arguments) if call == "rm" else add(s, 0, *arguments)
                assert call == "rm" or not layout or not last_error()
            end = C.llama_memory_seq_pos_max(s.memory, 0) + 1
            runs.append(s.decode(tokens[120:150], end, pieces=[1, 1, 20, 8]))
    floor = max(distance(runs[0], runs[1]), 2e-3)
    assert distance(runs[0], runs[2]) < 2 * floor


@each("name", [name for name in MOVES if name not in ("everything", "sinks behind others", "below zero")])
def test_exact_rows_move_with_their_cells(model: engine.Model, tokens: list[int], make_layout: Any, name: str) -> None:
    """Coarse codes, and a window that has all rows before and after: one lost row would show."""
    runs = []
    for layout, options in (
        (None, {}),
        (None, {"flash_attn": 0}),
        (make_layout(BANDS, BANDS), {"window": (1, 1200, 0)}),
        (make_layout(BANDS, BANDS), {"window": (1, 8, 0)}),
    ):
        with session(model, layout, n_ctx=512, **options) as s:
            s.decode(tokens[:120])
            for call, *arguments in MOVES[name]:
                s.rm(0, *arguments) if call == "rm" else add(s, 0, *arguments)
            end = C.llama_memory_seq_pos_max(s.memory, 0) + 1
            runs.append(s.decode(tokens[120:125], end))
    floor = max(distance(runs[0], runs[1]), 2e-3)
    assert distance(runs[0], runs[2]) < 2 * floor
    assert distance(runs[0], runs[3]) > 4 * floor, "codes are not coarse: the test proves nothing"


def test_many_shifts_stay_near_the_f16_cache(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]
) -> None:
    """Every shift rounds keys again: with 8-bit codes, a cell is coded 11 times."""
    runs = []
    for layout, options in ((None, {}), (make_layout([(32, 8)], [(32, 8)]), {"window": WINDOW})):
        with session(model, layout, **options) as s:
            out = [s.decode(tokens[:120])]
            for i in range(10):
                assert s.rm(0, KEEP, KEEP + 8)
                add(s, 0, KEEP + 8, -1, -8)
                out.append(s.decode(tokens[20 + 8 * i : 28 + 8 * i], 112))
            runs.append(np.concatenate(out))
    first, last = (distance(runs[0][a:b], runs[1][a:b]) for a, b in ((0, 120), (160, 200)))
    assert last < 8 * first, "errors of repeated shifts pile up"


@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_there_and_back_again(model: engine.Model, tokens: list[int], tmp_path: Any, mean: float) -> None:
    """With a gamma other than 1, which attention applies to stored keys."""
    shapes = [(il, 2, 32, 32) for il in range(C.llama_model_n_layer(model.handle))]
    kind: Any = {"arch": "llama", "block_count": len(shapes), "gamma": 0.5, "mean": mean}
    layout = engine.signed_permutations(shapes, [(32, 16)], [(32, 16)], path=tmp_path / "g.gguf", **kind)
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:130])
        s.clear()
        s.decode(tokens[:100])
        for by in (7, -7):
            add(s, 0, 10, -1, by)
            assert not last_error()
            s.state()  # carries the shift out
        assert distance(expected[100:], s.decode(tokens[100:130], 100)) < 5e-3


@pytest.mark.parametrize("unified", [False, True])
def test_other_sequences_notice_nothing(
    model: engine.Model, tokens: list[int], make_layout: Any, unified: bool
) -> None:
    layout = make_layout(BANDS, BANDS)
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:120])
    alone = shifted(model, tokens, layout, window=WINDOW)
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=unified, n_ctx=512) as s:
        s.decode(tokens[:90], 0, 1)
        s.decode(tokens[:LENGTH], 0, 0)
        discard(s)
        assert agree(expected[90:], s.decode(tokens[90:120], 90, 1))
        assert agree(alone, s.decode(tokens[LENGTH : LENGTH + 30], LENGTH - N_DISCARD, 0))


def test_a_state_taken_right_after_a_shift(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    """It waits for the next batch: a state must not hold keys that have yet to be turned."""
    layout = make_layout(BANDS, BANDS, recent_bits=10)
    expected = shifted(model, tokens, layout, window=WINDOW)
    for seq in (None, 0):
        with session(model, layout, window=WINDOW) as s:
            s.decode(tokens[:LENGTH])
            discard(s)
            state = s.state(seq)
        with session(model, layout, window=WINDOW) as s:
            s.decode(tokens[:33])  # elsewhere in the ring
            assert s.set_state(state, seq)
            assert agree(expected, s.decode(tokens[LENGTH : LENGTH + 30], LENGTH - N_DISCARD))
            discard(s, 16)
            again = s.decode(tokens[:5], LENGTH - N_DISCARD + 30 - 16)
            assert np.isfinite(again).all()


def test_a_copy_of_a_shifted_sequence(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    layout = make_layout(BANDS, BANDS)
    expected = shifted(model, tokens, layout, window=WINDOW)
    for unified in (False, True):
        with session(model, layout, window=WINDOW, n_seq_max=2, unified=unified, n_ctx=512) as s:
            s.decode(tokens[:LENGTH])
            discard(s)
            s.cp(0, 1)
            assert s.rm(0, -1)
            assert agree(expected, s.decode(tokens[LENGTH : LENGTH + 30], LENGTH - N_DISCARD, 1))


@pytest.mark.parametrize(
    ("p0", "p1", "by", "reason"),
    [
        (20, -1, -18, "two tokens at position"),
        (80, -1, -40, "two tokens at position"),
        (100, -1, 1 << 30, "below"),
    ],
)
def test_a_refused_shift_changes_nothing(
    model: engine.Model, tokens: list[int], make_layout: Any, p0: int, p1: int, by: int, reason: str
) -> None:
    with session(model, make_layout(BANDS, BANDS), window=WINDOW) as s:
        expected = s.decode(tokens[:125])
        s.clear()
        s.decode(tokens[:120])
        add(s, 0, p0, p1, by)
        assert last_error().startswith("seq_add: ") and reason in last_error()
        s.assert_refused()
        assert agree(expected[120:], s.decode(tokens[120:125], 120))


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.parametrize("flash", [0, 1])
def test_shared_cells_move_alone(tiny_model: Callable[..., Any], tmp_path: Any, arch: str, flash: int) -> None:
    """A sequence that shares its cells moves as one that does not; the other sequence stays where it is.

    gemma2: with cells of all positions in the sliding half, whose values are transposed without flash attention.
    """
    from test_variants import exact_layout

    model = engine.Model(tiny_model(arch))
    tokens = np.random.default_rng(4).integers(10, model.n_vocab, LENGTH + 30).tolist()
    layout = exact_layout(model, arch, tmp_path / "layout.gguf")
    options: dict[str, Any] = {"window": WINDOW, "n_ctx": 1024, "flash_attn": flash}
    moved = shifted(model, tokens, layout, **options)
    with session(model, layout, **options) as s:
        kept = s.decode(tokens)[LENGTH:]
    for other_first in (False, True):
        with session(model, layout, **options, n_seq_max=3, unified=True) as s:
            s.decode(tokens[:LENGTH])
            for seq in (1, 2):
                s.cp(0, seq)
            discard(s)
            found = {}
            for seq in (1, 0) if other_first else (0, 1):
                found[seq] = s.decode(tokens[LENGTH:], LENGTH - N_DISCARD if seq == 0 else LENGTH, seq)
            assert agree(found[0], moved) and agree(found[1], kept)
            state = s.state(2)
            assert s.rm(2, -1) and s.set_state(state, 2) == len(state)
            assert agree(s.decode(tokens[LENGTH:], LENGTH, 2), kept)
    model.free()


def test_shared_cells_that_have_no_room(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    """Refused: nothing is decoded in wrong positions, and evaluation goes on where the caller removes them."""
    layout = make_layout(BANDS, BANDS)
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:199])
        assert s.rm(0, 85)
        again = s.decode(tokens[85:110], 85)
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=256) as s:
        expected = s.decode(tokens[:200])
        assert s.rm(0, 199)
        s.cp(0, 1)
        assert s.rm(0, 100, 102)
        add(s, 0, 102, -1, -2)
        assert "97 free cells expected" in last_error() and "57 found" in last_error()
        s.assert_refused()
        add(s, 0, 102, -1, -2)
        assert engine.SUBKV.subkv_resume(s.ctx, 0, 197) == 100 - (WINDOW[1] - 1)
        assert s.rm(0, 150) and s.try_decode(tokens[:1], 150) == -2
        assert s.rm(0, 85)  # where evaluation resumes
        assert agree(s.decode(tokens[85:110], 85), again)
        assert agree(s.decode(tokens[199:200], 199, 1), expected[199:])


def test_adaptive_bases_refuse_a_shift(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    with session(model, make_layout(), window=(4, 32, 8), n_ctx=512, adapt="kv,block=16", offload_kqv=False) as s:
        assert not C.llama_memory_can_shift(C.llama_get_memory(s.ctx))
        s.decode(tokens[:100])
        add(s, 0, 50, -1, 8)
        assert "adaptive bases" in last_error()


@contextmanager
def stopped(s: Any, first: int, times: int) -> Iterator[None]:
    """Aborts the computation at calls [first, first + times) of the abort callback."""
    n_calls = 0

    @C.ggml_abort_callback
    def stop(_: Any) -> bool:
        nonlocal n_calls
        n_calls += 1
        return first <= n_calls < first + times

    C.llama_set_abort_callback(s.ctx, stop, None)
    try:
        yield
    finally:
        C.llama_set_abort_callback(s.ctx, ctypes.cast(None, C.ggml_abort_callback), None)


def test_an_aborted_shift_resumes(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    """Stopped after any of its nodes: no key is rotated twice, and none is read before its rotation."""
    layout, new = make_layout(BANDS, BANDS), tokens[LENGTH : LENGTH + 30]
    expected = shifted(model, tokens, layout, window=WINDOW)
    with session(model, layout, window=WINDOW, threads=1) as s:
        for n in range(1, 100):
            s.clear()
            s.decode(tokens[:LENGTH])
            discard(s)
            with stopped(s, n, 1):
                size = C.llama_state_seq_get_size(s.ctx, 0)
            if size > 0:  # behind all of them
                break
            assert last_error().startswith("shift: ")
            with stopped(s, 1, 10**9):
                assert s.try_decode(new, LENGTH - N_DISCARD) == 1
            assert last_error().startswith("shift: ")
            assert agree(expected, s.decode(new, LENGTH - N_DISCARD)), n
        assert n > 4, "hardly anything was stopped: the test proves nothing"


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_ordinary_layers_are_rotated_once(tiny_model: Callable[..., Any], tmp_path: Any, arch: str) -> None:
    """Next to coded layers in the same cache, or in a sliding half, wherever a shift is stopped."""
    from test_variants import shape_of

    model = engine.Model(tiny_model(arch))
    tokens = np.random.default_rng(3).integers(10, model.n_vocab, LENGTH + 30).tolist()
    shapes = shape_of(model)[1:]  # of the layers that do not slide
    k, v = ([(d, 8)] for d in shapes[0][2:])
    n_layer = C.llama_model_n_layer(model.handle)
    layout = engine.signed_permutations(shapes, k, v, arch=arch, block_count=n_layer, path=tmp_path / "layout.gguf")
    expected = shifted(model, tokens, layout, window=WINDOW)
    with session(model, layout, window=WINDOW, threads=1) as s:
        for n in range(1, 20):
            s.clear()
            s.decode(tokens[:LENGTH])
            discard(s)
            with stopped(s, n, 1):
                C.llama_state_seq_get_size(s.ctx, 0)
            assert agree(expected, s.decode(tokens[LENGTH : LENGTH + 30], LENGTH - N_DISCARD)), n
            with stopped(s, 1, 1):  # as before: pending shifts are restored
                assert s.try_decode(tokens[:5], LENGTH - N_DISCARD + 30) == 2
    model.free()


def test_nothing_moves_while_a_shift_is_half_done(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    with session(model, make_layout(BANDS, BANDS), window=WINDOW, threads=1) as s:
        s.decode(tokens[:LENGTH])
        discard(s)
        with stopped(s, 5, 1):
            assert C.llama_state_seq_get_size(s.ctx, 0) == 0
        add(s, 0, 40, -1, 1)
        assert "stopped behind some of the layers" in last_error()
        s.clear()
        s.decode(tokens[:100])
        add(s, 0, 40, -1, 1)
        assert not last_error()


def test_a_shift_of_a_long_text_needs_no_memory_for_its_keys(
    model: engine.Model, tokens: list[int], make_layout: Any
) -> None:
    """As floats, the keys of one layer would take 32 MiB here."""
    with session(model, make_layout(BANDS, BANDS), window=WINDOW, n_ctx=131072, threads=1) as s:
        s.decode(tokens[:100])
        s.decode(tokens[:1], 100)
        discard(s, 16)
        risen = engine.peak()
        s.decode(tokens[:1], 85)
        assert risen() < 8 << 20
