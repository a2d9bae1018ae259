"""Recurrent state besides coded cells: both continue together, are rolled back together, or refuse without a change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
from each import each
from engine import C, agree, check_sequences_apart, distance, last_error, session
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from machine import partial_state, set_partial_state

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 16, 8)


class Coded:
    """A tiny model, bases of its attention layers, tokens of no meaning."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.model = engine.Model(path)
        self.name = engine.architecture(path)
        n_layer = C.llama_model_n_layer(self.model.handle)
        attends = [il for il in range(n_layer) if il % 2 or self.name == "qwen2vl"]
        n_head_kv = max(1, C.llama_model_n_head_kv(self.model.handle))
        shape = [(il, n_head_kv, 32, 32) for il in attends]
        self.layout, self.exact = (
            engine.signed_permutations(
                shape, bands, bands, arch=self.name, block_count=n_layer, path=folder / f"{self.name}-{kind}.gguf"
            )
            for kind, bands in (("banded", BANDS), ("exact", [(32, 16)]))
        )
        self.tokens = self.model.random_tokens(200, seed=7)

    def session(self, **options: Any) -> Any:
        return session(self.model, self.layout, window=WINDOW, **options)


@pytest.fixture(scope="module", params=["lfm2", "qwen35"])
def hybrid(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coded]:
    coded = Coded(tiny_model(request.param), tmp_path_factory.mktemp("hybrid"))
    yield coded
    coded.model.free()


def last(s: engine.Session, seq: int = 0) -> int:
    """The last position that both halves hold."""
    return int(C.llama_memory_seq_pos_max(s.memory, seq))


#
# a tail
#


def test_a_tail_that_the_recurrent_state_cannot_lose_is_refused(hybrid: Coded) -> None:
    """Within the rollback of the window: the coded half could, and must not."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:106])
        s.clear()
        s.decode(tokens[:105])
        before = s.state(0)
        for first in (104, 100, 50):
            assert not s.rm(0, first)
            assert "seq_rm" in last_error()
        assert "recurrent state" in last_error() or "n_rollback" in last_error()
        assert s.state(0) == before
        assert agree(expected[105:], s.decode(tokens[105:106], 105))
        assert s.rm(0, -1)
        assert agree(expected[:40], s.decode(tokens[:40]))


def test_a_tail_beyond_the_window_can_be_removed_with_snapshots(hybrid: Coded) -> None:
    """Snapshots of the recurrent state for more tokens than the window has rows: the rest is read through codes."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:101])[85:]
    with hybrid.session(n_rs_seq=20) as s:
        s.decode([*tokens[:80], *tokens[80:85], *(t ^ 1 for t in tokens[85:100])], pieces=[80, 20])
        assert s.rm(0, 85)
        assert last(s) == 84
        assert engine.SUBKV.subkv_resume(s.ctx, 0, 85) == 85  # the recurrent state has no earlier position
        found = s.decode(tokens[85:101], 85)
    assert 0 < distance(expected, found) < 1


def test_a_short_tail_can_be_removed_with_snapshots(hybrid: Coded) -> None:
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:120])
    with hybrid.session(n_rs_seq=6) as s:
        s.decode(tokens[:96])
        s.decode([*tokens[96:100], *(t ^ 1 for t in tokens[100:104])], 96)
        assert s.rm(0, 100)
        assert last(s) == 99
        assert agree(expected[100:], s.decode(tokens[100:120], 100, pieces=[8, 12]))


def test_a_tail_is_refused_without_a_snapshot(hybrid: Coded) -> None:
    """llama.cpp keeps only snapshots of the last batch and would use them for older positions, or those of another
    state.
    """
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:110])
    with hybrid.session(n_rs_seq=6, n_seq_max=2, n_ctx=512) as s:
        s.decode(tokens[:96])
        s.decode(tokens[96:100], 96, pieces=[1, 1, 2])
        assert not s.rm(0, 98)
        assert "recurrent state" in last_error()
        before = s.state(0)
        assert s.set_state(before, 0) == len(before)
        assert not s.rm(0, 99)
        assert agree(expected[100:], s.decode(tokens[100:110], 100))
        s.cp(0, 1)
        assert not s.rm(1, 109) and not s.rm(0, 109)
        assert last(s, 0) == last(s, 1) == 109
        s.state()  # llama.cpp ends the process here if one of two sequences was rolled back


def test_a_rolled_back_state_is_copied_only_after_its_next_token(hybrid: Coded) -> None:
    """llama.cpp's copy would include the removed tokens."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:110])
    with hybrid.session(n_rs_seq=6, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:100])
        assert s.rm(0, 96)
        for src, dst in ((0, 1), (1, 0)):
            s.cp(src, dst)
            assert last_error().startswith("seq_cp: recurrent state") and last(s, 1) == -1
            s.assert_refused(dst)
        assert agree(expected[96:100], s.decode(tokens[96:100], 96))
        s.cp(0, 1)
        assert agree(expected[100:], s.decode(tokens[100:110], 100, 1))


@pytest.mark.parametrize("n", [100, 60])
def test_snapshots_belong_to_one_state(hybrid: Coded, n: int) -> None:
    """A copy that replaces a sequence with snapshots has none, even if it ends at the same position."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:110])
    with hybrid.session(n_rs_seq=6, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:100], 0, 1, pieces=[99, 1])
        s.decode(tokens[100 : 100 + n], 0, 0)
        assert s.rm(0, -1)
        s.cp(1, 0)
        assert s.rm(1, -1)
        assert not s.rm(0, 97)
        assert "recurrent state" in last_error()
        assert agree(expected[100:], s.decode(tokens[100:110], 100, 0))


def test_removing_all_positions_drops_the_snapshot(hybrid: Coded) -> None:
    """With any form of the range's end; llama.cpp drops the snapshot only for an open range."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[50:90])
    with hybrid.session(n_rs_seq=6) as s:
        s.decode(tokens[:100])
        assert s.rm(0, 96) and s.rm(0, 0, 96)
        assert agree(expected, s.decode(tokens[50:90]))


@pytest.mark.parametrize("n_rs_seq", [0, 6])
def test_an_aborted_decode_leaves_no_recurrent_state(hybrid: Coded, n_rs_seq: int) -> None:
    """The sequence is empty, without partial state or snapshots; other sequences are unchanged."""
    tokens = hybrid.tokens
    calls, limit = [0], 10**9

    @C.ggml_abort_callback
    def stop(_: Any) -> bool:
        calls[0] += 1
        return calls[0] > limit

    with hybrid.session(n_rs_seq=n_rs_seq, n_seq_max=2, n_ctx=512, threads=1) as s:
        expected = s.decode(tokens[:60])
        s.clear()
        s.decode(tokens[:50], 0, 1)
        s.decode(tokens[70:90], 0, 0)
        before = s.state(1)
        C.llama_set_abort_callback(s.ctx, stop, None)
        s.decode(tokens[90:94], 20, 0)
        requested = calls[0]
        for limit in (0, requested // 2, requested - 1):
            calls[0] = 0
            assert s.try_decode(tokens[94:98], 24, 0) == 2
            assert last(s) == -1 and s.state(1) == before
            limit = 10**9
            s.decode(tokens[70:94], 0, 0, pieces=[20, 4])
        C.llama_set_abort_callback(s.ctx, ctypes.cast(None, C.ggml_abort_callback), None)
        assert s.rm(0, -1)
        assert agree(expected, s.decode(tokens[:60]))
        assert agree(expected[50:], s.decode(tokens[50:60], 50, 1))


def test_positions_cannot_be_shifted_in_one_half(hybrid: Coded) -> None:
    if hybrid.name == "qwen35":
        pytest.skip("llama.cpp aborts: shifting is defined for one position per token")
    with hybrid.session() as s:
        s.decode(hybrid.tokens[:60])
        before = s.state(0)
        assert not C.llama_memory_can_shift(s.memory)
        C.llama_memory_seq_add(s.memory, 0, 10, -1, -5)
        assert "seq_add" in last_error()
        C.llama_memory_seq_div(s.memory, 0, 10, -1, 2)
        assert "seq_div" in last_error()
        s.assert_refused()
        assert s.state(0) == before


#
# sequences
#


@pytest.mark.parametrize("unified", [False, True])
def test_sequences_do_not_see_each_other(hybrid: Coded, unified: bool) -> None:
    check_sequences_apart(hybrid.session, hybrid.tokens, unified)


@pytest.mark.parametrize("unified", [False, True])
def test_copy_a_sequence(hybrid: Coded, unified: bool) -> None:
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:120])
    with hybrid.session(n_seq_max=2, unified=unified, n_ctx=512) as s:
        s.decode(tokens[:90], 0, 0)
        s.cp(0, 1)
        s.decode([t ^ 1 for t in tokens[90:120]], 90, 0)  # the source goes another way
        assert agree(expected[90:110], s.decode(tokens[90:110], 90, 1))
        assert s.rm(0, -1)
        assert agree(expected[110:], s.decode(tokens[110:120], 110, 1))


def test_a_part_of_a_sequence_is_not_copied(hybrid: Coded) -> None:
    """llama.cpp copies the state of the last position for any range."""
    tokens = hybrid.tokens
    with hybrid.session(n_seq_max=2, unified=True, n_ctx=512) as s:
        expected = s.decode(tokens[:31])
        s.clear()
        s.decode(tokens[:30])
        s.decode(tokens[40:70], 0, 1)
        before = s.state(1)
        for part in ((0, 20), (10, 30), (200, 300)):
            s.cp(0, 1, *part)
            assert last_error().startswith("seq_cp: all of sequence 0 expected")
            s.assert_refused(1)
            assert s.state(1) == before
        assert s.rm(1, -1)
        assert agree(expected[:10], s.decode(tokens[:10], 0, 1))
        assert agree(expected[30:], s.decode(tokens[30:31], 30, 0))


def test_a_copy_onto_a_longer_sequence_keeps_the_recurrent_state(hybrid: Coded) -> None:
    """The cells of both would end where the copied state does not."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:41])
    with hybrid.session(n_seq_max=3, unified=True, n_ctx=512) as s:
        s.decode(tokens[:30], 0, 0)
        s.cp(0, 1)
        s.decode(tokens[30:40], 30, 1)
        before = s.state(1)
        for src in (0, 2):  # shorter, and empty
            s.cp(src, 1)
            assert last_error().startswith("seq_cp: recurrent state of position 39 expected")
            s.assert_refused(1)
            assert s.state(1) == before
        assert agree(expected[40:], s.decode(tokens[40:41], 40, 1))
        assert s.rm(1, -1)
        s.cp(2, 1)  # nothing onto nothing
        assert not last_error() and last(s, 1) == -1
        s.decode(tokens[30:35], 30, 0)
        s.cp(0, 2)
        assert agree(expected[35:40], s.decode(tokens[35:40], 35, 2))
        s.cp(2, 0)  # onto a beginning of it
        assert agree(expected[40:], s.decode(tokens[40:41], 40, 0))


def test_a_copy_that_the_cells_refuse_copies_no_recurrent_state(hybrid: Coded) -> None:
    """Onto positions where the other sequence has the same number of tokens of another text."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[50:81])
    with hybrid.session(n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:30], 0, 0)
        s.decode(tokens[50:80], 0, 1)
        before = s.state(1)
        s.cp(0, 1)
        assert "seq_cp" in last_error()
        s.assert_refused(1)
        assert s.state(1) == before
        assert agree(expected[30:], s.decode(tokens[80:81], 30, 1))


@pytest.mark.parametrize("unified", [False, True])
def test_keep_one_sequence(hybrid: Coded, unified: bool) -> None:
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:100])
    with hybrid.session(n_seq_max=2, unified=unified, n_ctx=512) as s:
        s.decode(tokens[:80], 0, 1)
        s.decode(tokens[50:90], 0, 0)
        C.llama_memory_seq_keep(s.memory, 1)
        assert last(s, 0) == -1
        assert agree(expected[80:], s.decode(tokens[80:100], 80, 1))
        assert agree(expected[:30], s.decode(tokens[:30], 0, 0))


#
# states
#


@pytest.mark.parametrize("seq", [None, 0])
def test_save_and_restore(hybrid: Coded, seq: int | None) -> None:
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:120])
        s.clear()
        s.decode(tokens[:100])
        state = s.state(seq)
    with hybrid.session() as s:
        s.decode(tokens[30:60])
        assert s.set_state(state, seq) == len(state)
        assert s.state(seq) == state
        assert agree(expected[100:], s.decode(tokens[100:120], 100))


@each("cut", [0.2, 0.6, 0.9, 0.999])
@each("seq", [None, 0])
def test_a_truncated_state_leaves_no_half_behind(hybrid: Coded, seq: int | None, cut: float) -> None:
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:60])
        state = s.state(seq)
        assert s.set_state(state[: int(len(state) * cut)], seq) == 0
        if last(s) >= 0:  # refused before anything changed
            assert s.state(seq) == state
        assert s.rm(0, -1)
        assert agree(expected, s.decode(tokens[:60]))


def test_a_state_is_restored_in_another_sequence(hybrid: Coded) -> None:
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:110])
    with hybrid.session(n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[100:140], 0, 1)
        s.decode(tokens[:90], 0, 0)
        state = s.state(0)
        assert s.rm(0, -1) and s.rm(1, -1)
        assert s.set_state(state, 1) == len(state)
        assert agree(expected[90:], s.decode(tokens[90:110], 90, 1))


def test_a_partial_state_rolls_both_halves_back(hybrid: Coded) -> None:
    """Beyond the window's rollback: the cells stay, recurrent state and exact rows are restored from the state."""
    tokens = hybrid.tokens
    with hybrid.session() as s:
        expected = s.decode(tokens[:140])
        s.clear()
        s.decode(tokens[:70])
        kept, whole = partial_state(s), s.state(0)
        assert 0 < len(kept) < len(whole)
        s.decode([t ^ 1 for t in tokens[70:130]], 70)
        assert set_partial_state(s, kept) == len(kept)
        assert s.try_decode(tokens[70:71], 70) != 0  # the later cells are still there
        assert s.rm(0, 70)
        assert s.state(0) == whole
        assert agree(expected[70:], s.decode(tokens[70:140], 70))
        assert set_partial_state(s, kept[:-3]) == 0
        assert s.rm(0, -1)
        assert agree(expected[:40], s.decode(tokens[:40]))


def test_a_partial_state_of_other_bases_is_refused(hybrid: Coded, tmp_path: Path) -> None:
    tokens = hybrid.tokens
    other = engine.signed_permutations(
        [(1, 1, 32, 32)], BANDS, BANDS, arch=hybrid.name, block_count=4, path=tmp_path / "other.gguf"
    )
    with session(hybrid.model, other, window=WINDOW) as s:
        s.decode(tokens[:50])
        kept = partial_state(s)
    with hybrid.session() as s:
        s.decode(tokens[:50])
        before = s.state(0)
        assert set_partial_state(s, kept) == 0
        assert "fingerprint" in last_error()
        assert s.state(0) == before


def test_a_kept_sequence_leaves_no_snapshot_to_the_others(hybrid: Coded) -> None:
    """That a removed tail chose, and that the next text would begin with."""
    tokens = hybrid.tokens
    options: dict[str, Any] = {"n_seq_max": 2, "n_rs_seq": 6, "n_ctx": 512}
    with hybrid.session(**options) as s:
        expected = s.decode(tokens[20:40], 0, 1)
    with hybrid.session(**options) as s:
        s.decode(tokens[:10], 0, 0)
        s.decode(tokens[:10], 0, 1)
        assert s.rm(1, 9)
        C.llama_memory_seq_keep(s.memory, 0)
        assert agree(expected, s.decode(tokens[20:40], 0, 1))


#
# any of it, in any order
#

N_SEQ = 3
SEQ = st.integers(0, N_SEQ - 1)
STEPS = st.one_of(
    st.tuples(st.just("decode"), SEQ, st.integers(1, 40)),
    st.tuples(st.just("remove"), SEQ, st.integers(0, 12)),
    st.tuples(st.just("empty"), SEQ, st.just(0)),
    st.tuples(st.just("copy"), SEQ, SEQ),
    st.tuples(st.just("keep"), SEQ, st.just(0)),
    st.tuples(st.just("move"), SEQ, SEQ),
    st.tuples(st.just("mark"), SEQ, st.just(0)),
    st.tuples(st.just("back"), SEQ, st.just(0)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(STEPS, min_size=4, max_size=14), unified=st.booleans(), n_rs_seq=st.sampled_from([0, 6]))
@example(program=[("decode", 0, 1), ("copy", 0, 1), ("move", 1, 0)], unified=False, n_rs_seq=0)
@example(program=[("decode", 2, 2), ("remove", 2, 1), ("copy", 2, 0), ("copy", 2, 1)], unified=False, n_rs_seq=6)
def test_random_programs_equal_an_ordinary_cache(
    hybrid: Coded, program: list[tuple[str, int, int]], unified: bool, n_rs_seq: int
) -> None:
    """Exact codes against f16: calls that succeed on the coded cache also succeed on f16, with the same results."""
    texts: list[list[int]] = [[] for _ in range(N_SEQ)]
    marks: dict[int, tuple[list[int], bytes, bytes]] = {}
    copied = False  # in another stream, since the last decode
    pending: set[int] = set()  # sequences that were rolled back, without a token since
    options: dict[str, Any] = {"n_seq_max": N_SEQ, "unified": unified, "n_rs_seq": n_rs_seq, "n_ctx": 768}
    with (
        session(hybrid.model, hybrid.exact, window=WINDOW, **options) as coded,
        session(hybrid.model, **options) as stock,
    ):
        for i, (what, seq, n) in enumerate([*program, *(("decode", seq, 2) for seq in range(N_SEQ))]):
            text = texts[seq]
            if what == "decode" and len(text) + n < 200:
                new = [hybrid.tokens[(31 * i + j) % 200] for j in range(n)]
                found, expected = (s.decode(new, len(text), seq) for s in (coded, stock))
                assert distance(expected, found) < 0.02
                text += new
                copied = False
                pending.discard(seq)
            elif what == "remove" and coded.rm(seq, max(len(text) - n, 0)):
                assert stock.rm(seq, max(len(text) - n, 0))
                del text[max(len(text) - n, 0) :]
                pending |= {seq} if n and text else set()
            elif what == "empty":
                assert coded.rm(seq, -1) and stock.rm(seq, -1)
                texts[seq] = []
                pending.discard(seq)
            elif what == "copy" and seq != n:
                assert coded.rm(n, -1) and stock.rm(n, -1)
                coded.cp(seq, n)
                if text and seq in pending:  # llama.cpp's own copies the state of the tokens removed
                    assert "recurrent state" in last_error() and coded.take_refusal(n)
                    texts[n] = []
                else:
                    stock.cp(seq, n)
                    texts[n] = list(text)
                    copied = not unified
                pending.discard(n)
            elif what == "keep":
                for j in range(N_SEQ):  # llama.cpp's own keeps the cells of other streams, not their recurrent state
                    assert j == seq or stock.rm(j, -1)
                C.llama_memory_seq_keep(coded.memory, seq)
                texts = [t if j == seq else [] for j, t in enumerate(texts)]
            elif what == "move" and text:
                for s in (coded, stock):
                    if s is stock and copied:  # it would write a state without the rows that it has yet to copy
                        assert s.rm(n, -1)
                        s.decode(text, 0, n)
                    else:
                        state = s.state(seq)
                        assert s.set_state(state, n) == len(state)
                texts[n] = list(text)
                copied = False
                pending.discard(n)
            elif what == "mark" and text:
                marks[seq] = (list(text), partial_state(coded, seq), partial_state(stock, seq))
            elif what == "back" and seq in marks and text[: len(marks[seq][0])] == marks[seq][0]:
                texts[seq] = list(marks[seq][0])
                for s, kept in zip((coded, stock), marks[seq][1:], strict=True):
                    assert set_partial_state(s, kept, seq) == len(kept)
                    assert s.rm(seq, len(texts[seq]))
                pending.discard(seq)
            for j, held in enumerate(texts):
                assert last(coded, j) == last(stock, j) == len(held) - 1
