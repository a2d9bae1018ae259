"""Images in a coded cache: the guarantees of text also hold with images, whatever their positions and masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from engine import C, agree, distance, last_error
from machine import partial_state, set_partial_state
from pictures import KINDS, Picture, Vision, vision

__all__ = ["vision"]


@pytest.fixture(scope="module")
def floor(vision: Vision) -> float:
    """Differences of an f16 cache from itself by rounding."""
    found = []
    for options in ({"flash_attn": 0}, {"flash_attn": 1}, {"type_k": 0, "type_v": 0}):
        with vision.session(**options) as s:
            found.append(vision.decode(s, vision.parts))
    return max(distance(found[0], other) for other in found[1:])


def test_exact_codes_equal_the_f16_cache(vision: Vision, floor: float) -> None:
    with vision.session() as s:
        expected = vision.decode(s, vision.parts)
    with vision.session(vision.exact) as s:
        assert distance(expected, vision.decode(s, vision.parts)) < 2 * floor
        s.clear()
        assert distance(expected, vision.decode(s, vision.parts, pieces=itertools.cycle([5, 17, 1, 32]))) < 2 * floor


def test_later_tokens_see_the_pictures_through_their_codes(vision: Vision, floor: float) -> None:
    """The comparisons would mean nothing in a model that ignores pictures, or with all their rows in the window."""
    first, picture, *rest = vision.parts
    assert isinstance(picture, Picture)
    last = picture.rows.copy()
    last[-1] *= -1
    with vision.session() as s:
        expected = vision.decode(s, vision.parts)
        s.clear()
        other = vision.decode(s, [first, Picture(last, picture.nx, picture.ny), *rest])
    n_before, n_behind = len(first), len(first) + len(last)
    assert distance(expected[n_behind:], other[n_behind:]) > 10 * floor
    moved = np.abs(expected - other).max(1)[n_before:n_behind] > 0
    assert moved.all() if vision.whole else not moved[:-1].any()  # who sees the last token of a picture
    with vision.session(vision.coarse) as s:
        assert distance(expected, vision.decode(s, vision.parts)) > 10 * floor


def test_any_split_gives_the_same_result(vision: Vision) -> None:
    with vision.session(vision.coarse) as s:
        expected = vision.decode(s, vision.parts)
        for pieces in ([16], [7], [64, 1, 1, 9]):
            s.clear()
            assert agree(expected, vision.decode(s, vision.parts, pieces=itertools.cycle(pieces))), pieces
    n_ubatch = 64 if vision.whole else 16  # an image whose tokens attend to each other is one ubatch
    with vision.session(vision.coarse, n_ubatch=n_ubatch, threads=3) as s:
        assert agree(expected, vision.decode(s, vision.parts))


@pytest.mark.parametrize("exact", [True, False])
def test_a_tail_can_be_removed(vision: Vision, exact: bool, floor: float) -> None:
    """Text after an image, and a whole image, can be removed. With exact codes the results equal those of f16."""
    *before, last = vision.parts
    at = vision.end(before)
    junk = [[t ^ 1 for t in last[:6]]], [vision.picture(2, 2, seed=3)]
    with vision.session(vision.exact if exact else vision.coarse) as s, vision.session() as stock:
        straight = vision.decode(s, vision.parts)[-len(last) :]
        for tail in junk:
            found = []
            for each in (s, stock):
                each.clear()
                vision.decode(each, before)
                vision.decode(each, tail, at)
                if vision.hybrid:
                    assert not each.rm(0, at)  # recurrent state stays
                    assert each.rm(0, -1)
                    vision.decode(each, before)
                else:
                    assert each.rm(0, at), last_error()
                found.append(vision.decode(each, [last], at))
            assert agree(straight, found[0])
            assert not exact or distance(found[1], found[0]) < 2 * floor


def test_tails_beyond_the_window(vision: Vision, floor: float) -> None:
    """Exact codes: a removed picture, and text around one, leave a cache that decodes as if they had never been."""
    for n in (1, 3):
        before, rest = vision.parts[:n], vision.others[:1]
        at = vision.end(before)
        with vision.session(vision.exact) as s:
            vision.decode(s, before)
            expected = vision.decode(s, rest, at)
        with vision.session(vision.exact) as s:
            vision.decode(s, vision.parts)
            if not s.rm(0, at):  # cells of sliding windows, or recurrent state, are gone
                assert "sliding windows" in last_error() or "recurrent state" in last_error()
                continue
            assert distance(expected, vision.decode(s, rest, at)) < 2 * floor


def test_states(vision: Vision) -> None:
    """Of one sequence, of all, and a checkpoint: with a picture in the window's reach and one far behind."""
    before, rest = vision.parts[:4], vision.parts[4:]
    at = vision.end(before)
    with vision.session(vision.coarse) as s:
        vision.decode(s, before)
        one, whole, part = s.state(0), s.state(), partial_state(s)
        assert part, last_error()
        expected = vision.decode(s, rest, at)
    for state, seq in ((one, 0), (whole, None)):
        with vision.session(vision.coarse) as s:
            vision.decode(s, vision.others)
            assert s.set_state(state, seq) == len(state), last_error()
            assert s.state(seq) == state
            assert np.array_equal(expected, vision.decode(s, rest, at))
    with vision.session(vision.coarse) as s:
        assert s.set_state(one, 0) == len(one)
        vision.decode(s, [vision.parts[0][:50]], at)
        assert set_partial_state(s, part) == len(part), last_error()
        assert s.rm(0, at), last_error()
        assert agree(expected, vision.decode(s, rest, at))
        for i in range(8, len(one), len(one) // 50):
            damaged = bytearray(one)
            damaged[i] ^= 4
            assert s.set_state(bytes(damaged), 0) == 0


@pytest.mark.parametrize("unified", [True, False])
def test_sequences(vision: Vision, unified: bool, floor: float) -> None:
    """Two texts with images at the same positions, a copy of one, and a sequence replaced by the other."""
    alone = []
    for parts in (vision.parts, vision.others):
        with vision.session(vision.exact) as s:
            alone.append(vision.decode(s, [*parts, vision.others[0]]))
    with vision.session(vision.exact, n_seq_max=3, unified=unified, n_ctx=3 * 512) as s:
        for seq, parts in enumerate((vision.parts, vision.others)):
            vision.decode(s, parts[:3], 0, seq)
        for seq, parts in enumerate((vision.parts, vision.others)):
            found = vision.decode(s, parts[3:], vision.end(parts[:3]), seq)
            assert distance(alone[seq][: -len(vision.others[0])][-len(found) :], found) < 2 * floor
        s.cp(0, 2)
        other = s.state(1)
        assert s.rm(0, -1)
        found = vision.decode(s, [vision.others[0]], vision.end(vision.parts), 2)
        assert distance(alone[0][-len(found) :], found) < 2 * floor
        assert s.set_state(other, 2) == len(other)
        found = vision.decode(s, [vision.others[0]], vision.end(vision.others), 2)
        assert distance(alone[1][-len(found) :], found) < 2 * floor


@pytest.mark.parametrize("vision", [kind for kind in KINDS if kind.startswith("mrope")], indirect=True)
def test_a_second_picture_at_the_same_positions_is_refused(vision: Vision) -> None:
    first, picture, *_ = vision.parts
    with vision.session(vision.coarse, n_seq_max=2, unified=True) as s:
        vision.decode(s, [first, picture])
        s.cp(0, 1, 0, len(first))
        if not vision.hybrid:  # which copies whole sequences only
            vision.decode(s, [vision.picture(2, 2)], len(first), 1)
            before = s.state(1)
            s.cp(0, 1)
            assert f"position {len(first)}" in last_error() and last_error().startswith("seq_cp")
            assert s.take_refusal(1) and s.state(1) == before
        assert vision.try_picture(s, picture, len(first)) != 0  # its first token is a text's in all but kind
        assert f"position {len(first)}" in last_error()


def test_positions_of_mrope_cannot_shift(vision: Vision) -> None:
    """Nor those of hybrids. Other models shift as with f16: their images have one position per token."""
    with vision.session(vision.coarse) as s, vision.session() as stock:
        may = [bool(C.llama_memory_can_shift(each.memory)) for each in (s, stock)]
    assert may == ([False] * 2 if vision.mrope else [True] * 2)


def test_adaptive_bases_refuse_images(vision: Vision) -> None:
    """A block is coded when it leaves the window, so tokens must not see later ones or share positions."""
    first, picture, second, *_ = vision.parts
    assert isinstance(picture, Picture)
    with vision.session(vision.coarse, window=(4, 32, 8), adapt="kv,block=16,warm=1000000") as s:
        expected = vision.decode(s, [first])
        before = s.state(0)
        if vision.whole or vision.shared:
            assert vision.try_picture(s, picture, len(first)) != 0
            assert last_error().startswith("decode: ") and "static bases" in last_error()
            assert s.state(0) == before
        else:
            vision.decode(s, [picture, second], len(first))
        s.clear()
        assert agree(expected, vision.decode(s, [first]))
