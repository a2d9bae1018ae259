"""Random programs over sequences: decode, remove, copy, keep, shift, states, on an ordinary f16 cache and a coded one.

`Machine` runs every call on both and compares logits. The coded cache holds the same half-precision numbers (full rank,
16-bit bands), so they may differ by rounding only. `Held` predicts the refusals of the coded cache: with adaptive bases
they depend only on its window, with recurrent state on that state's position. Two limits depend on more: the tokens by
which recurrent state can be rolled back (n_rs_seq), and the rows of sliding-window layers. There a successful call must
be correct, and a call that is certainly possible must succeed.
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Iterable
from typing import Any

import engine
from engine import C, agree, distance, last_error, session
from held import BLOCK, WINDOW, Held
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

N_PROGRAMS, N_CALLS = (int(os.environ.get(f"SUBKV_{name}", n)) for name, n in (("PROGRAMS", "0"), ("CALLS", "20")))
N_SEQ = 3  # and one that makes llama.cpp execute pending copies
N_MOST = 110  # tokens of a sequence
ADAPT = f"kv,block={BLOCK},length=16,warm=16,max_chunks=3,gain=100,reuse=0,merge=1"
SEQ = st.integers(0, N_SEQ - 1)
EVERYTHING = 2**31 - 1
PARTIAL = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
M_ROPE = (C.LLAMA_ROPE_TYPE_MROPE, C.LLAMA_ROPE_TYPE_IMROPE)


def partial_state(s: engine.Session, seq: int = 0) -> bytes:
    """A sequence's state without its cells; empty: refused."""
    buf = (ctypes.c_uint8 * C.llama_state_seq_get_size_ext(s.ctx, seq, PARTIAL))()
    n = C.llama_state_seq_get_data_ext(s.ctx, buf, len(buf), seq, PARTIAL)
    return bytes(buf[:n])


def set_partial_state(s: engine.Session, data: bytes, seq: int = 0) -> int:
    """Bytes read, 0 when refused."""
    buf = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    return int(C.llama_state_seq_set_data_ext(s.ctx, buf, len(data), seq, PARTIAL))


class Machine(RuleBasedStateMachine):
    """One program. bound: difference between two f16 caches with different rounding; recurrent: state besides the
    cells,
    which can be rolled back by n_rs_seq tokens; sliding: layers of short windows besides coded ones.
    """

    def __init__(
        self,
        model: engine.Model,
        layout: Any,
        bound: float,
        *,
        unified: bool,
        adapt: bool = False,
        recurrent: bool = False,
        sliding: bool = False,
        n_rs_seq: int = 0,
    ) -> None:
        super().__init__()
        self.unified, self.adapt, self.recurrent, self.bound = unified, adapt, recurrent, bound
        self.n_rs_seq, self.halves = n_rs_seq, recurrent or sliding
        shared: dict[str, Any] = {"n_ubatch": 16, "threads": 1, "n_rs_seq": n_rs_seq}
        coded = shared | {"window": WINDOW, "adapt": ADAPT if adapt else None, "offload_kqv": not adapt}
        many: dict[str, Any] = {"n_seq_max": N_SEQ + 1, "unified": unified, "n_ctx": 512 if unified else 1024}
        # in one piece with sliding layers: llama.cpp overwrites cells that an earlier piece of a batch needs
        self.plain = engine.Session(model, **shared | ({"n_ubatch": 64} if sliding else {}), **many)
        self.coded = engine.Session(model, layout, **coded, **many)
        self.fresh = engine.Session(model, layout, **coded)
        self.seqs = [Held() for _ in range(N_SEQ)]
        self.saved: list[tuple[bytes, bytes, Any]] = []
        self.marked: list[tuple[bytes, bytes, Held]] = []
        self.n_cells = 0

    def teardown(self) -> None:
        for s in (self.plain, self.coded, self.fresh):
            s.close()

    def text(self, n: int, word: int) -> list[int]:
        n_word = min(200, self.plain.model.n_vocab - 12)
        return [10 + (self.n_cells * 37 + i * 101 + word * 11) % n_word for i in range(n)]

    def decoded(self, tokens: list[int], pos: int, to: list[int]) -> Any:
        """Logits of the coded cache; None: it refused, as it must."""
        held = [self.seqs[seq] for seq in to]
        torn = self.recurrent and any(h.tail != h.last() for h in held)
        if torn or not all(h.can_decode(pos, self.adapt) for h in held):
            assert self.coded.try_decode(tokens, pos, to) != 0
            assert torn or "exact row" in last_error()  # llama.cpp itself refuses some where halves end apart
            return None
        expected = self.plain.decode(tokens, pos, to)
        found = self.coded.decode(tokens, pos, to)
        apart = distance(expected, found)
        assert apart < self.bound or apart < self.noise(held[0], tokens), apart
        for i, token in enumerate(tokens):
            self.n_cells += 1
            for seq in to:
                self.seqs[seq].decode(pos + i, token, self.n_cells, self.adapt)
        for i, other in enumerate(self.seqs):
            other.back = min(self.n_rs_seq, len(tokens) - 1) if i in to else 0
        return found

    def noise(self, held: Held, tokens: list[int]) -> float:
        """Twice the effect of ordinary caches' rounding on exactly these tokens, which some models amplify."""
        if not held.whole or sorted(held.cells) != list(range(len(held.cells))):
            return 0.0
        found = []
        for options in ({"flash_attn": 0}, {"flash_attn": 1}, {"flash_attn": 0, "type_k": 0, "type_v": 0}):
            with session(self.plain.model, threads=1, n_ubatch=128, **options) as s:
                found.append(s.decode([*held.tokens(), *tokens])[-len(tokens) :])
        return 2 * max(distance(found[2], f16) for f16 in found[:2])

    @rule(seq=SEQ, pieces=st.lists(st.integers(1, 20), min_size=1, max_size=3), word=st.integers(0, 9), start=SEQ)
    def decode(self, seq: int, pieces: list[int], word: int, start: int) -> None:
        held = self.seqs[seq]
        for n in pieces:
            if len(held.cells) + n > N_MOST:
                return
            pos = held.last() + 1 if held.cells else (0, 0, 1000)[start]
            if self.decoded(self.text(n, word), pos, [seq]) is None:
                return

    @rule(n=st.integers(1, 20), word=st.integers(0, 9))
    def decode_for_two(self, n: int, word: int) -> None:
        a, b = self.seqs[0], self.seqs[1]
        # cells of the first answer for both; llama.cpp splits no batch for two of one recurrent state, and takes none
        # for two with different first sliding cells
        alone = self.recurrent or a.apart or b.apart
        if self.unified and not alone and a.cells == b.cells and len(a.cells) + n <= N_MOST:
            self.decoded(self.text(n, word), a.last() + 1, [0, 1])

    @rule(n=st.lists(st.integers(0, 12), min_size=N_SEQ, max_size=N_SEQ), word=st.integers(0, 9))
    def decode_together(self, n: list[int], word: int) -> None:
        """Decodes the same number of tokens of every sequence in one batch."""
        items = []
        for seq, held in enumerate(self.seqs):
            torn = self.recurrent and held.tail != held.last()
            if len(held.cells) + n[seq] > N_MOST or torn or not held.can_decode(held.last() + 1, self.adapt):
                continue
            text = self.text(n[seq], word + seq)
            items += [(i, token, held.last() + 1 + i, seq) for i, token in enumerate(text)]
        if not items:
            return
        batch = [item[1:] for item in sorted(items)]  # their tokens take turns
        expected, found = (s.decode_batch(batch) for s in (self.plain, self.coded))
        apart, texts = distance(expected, found), {seq: [t for t, _, of in batch if of == seq] for *_, seq in batch}
        assert apart < self.bound or apart < max(self.noise(self.seqs[seq], texts[seq]) for seq in texts), apart
        for token, pos, seq in batch:
            self.n_cells += 1
            self.seqs[seq].decode(pos, token, self.n_cells, self.adapt)
        for held in self.seqs:
            held.back = 0

    @rule(seq=SEQ, word=st.integers(0, 9))
    def decode_anew(self, seq: int, word: int) -> None:
        """Decodes a token after the sequence, and after the same text in another context."""
        held = self.seqs[seq]
        if not held.cells or not held.whole or len(held.cells) == N_MOST:
            return
        before, token = held.tokens(), self.text(1, word)
        found = self.decoded(token, len(before), [seq])
        self.fresh.clear()
        if found is None:  # the copied part ends where exact rows of the source are lost
            return
        expected = self.fresh.decode([*before, *token])[-1:]
        # another half rounds by how a text is split
        assert agree(expected, found) or (self.halves and distance(expected, found) < self.bound), token

    @rule(seq=SEQ, n=st.integers(1, 12))
    def remove_tail(self, seq: int, n: int) -> None:
        self.remove(seq, max(0, self.seqs[seq].last() + 1 - n), -1)

    @rule(seq=st.integers(-1, N_SEQ - 1), p0=st.integers(-1, N_MOST), n=st.integers(0, N_MOST))
    def remove_some(self, seq: int, p0: int, n: int) -> None:
        self.remove(seq, p0, p0 + n)

    @rule(seq=st.integers(-1, N_SEQ - 1))
    def remove_all(self, seq: int) -> None:
        self.remove(seq, -1, -1)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        of = self.seqs if seq < 0 else [self.seqs[seq]]
        first, last = max(p0, 0), EVERYTHING if p1 < 0 else p1
        able = all(held.can_remove(first, last, self.adapt) for held in of)
        parts = self.recurrent and seq >= 0 and self.seqs[seq].state_parts(first, last)
        if self.recurrent:
            able = able and seq >= 0  # llama.cpp's recurrent state knows no call for every sequence
        removed = self.coded.rm(seq, p0, p1)
        if parts and able:
            by = of[0].tail + 1 - first
            assert removed or by > of[0].back, "the recurrent state goes back so far"
            assert not removed or by <= self.n_rs_seq
            able = removed
        if able and not removed and "sliding windows" in last_error():
            left = {i: [p for p in self.seqs[i].cells if not first <= p < last] for i in range(N_SEQ) if seq in (i, -1)}
            assert any(self.left_window(i, positions, max(positions, default=-1) + 1) for i, positions in left.items())
            return
        assert removed == able
        if able:
            assert self.plain.rm(seq, p0, p1)
            for held in of:
                held.remove(first, last)
                held.borrow([other for other in self.seqs if other is not held and self.unified])
        if able and seq >= 0 and self.halves:
            self.decode_anew(seq, 3)

    def left_window(self, seq: int, positions: Iterable[int], end: int) -> bool:
        """The sliding half has lost one of these that the window of a token at `end` needs."""
        window = range(end + 1 - C.llama_model_n_swa(self.plain.model.handle), end)
        lost = range(C.llama_memory_seq_pos_min(self.coded.memory, seq))  # its pieces are others than the plain one's
        return any(p in lost and p in window for p in positions)

    @rule(src=SEQ, dst=SEQ, p0=st.integers(-1, N_MOST), n=st.integers(0, N_MOST), all_of_it=st.booleans())
    def copy(self, src: int, dst: int, p0: int, n: int, all_of_it: bool) -> None:
        a, b = self.seqs[src], self.seqs[dst]
        p1 = p0 + n
        if all_of_it or not self.unified:  # llama.cpp aborts the process
            p0 = p1 = -1
        first, last = max(p0, 0), EVERYTHING if p1 < 0 else p1
        copied = {p: cell for p, cell in a.cells.items() if first <= p < last}
        self.coded.cp(src, dst, p0, p1)
        torn = self.unified and b.cells and a.tail != max(a.last(), b.last())
        reason = last_error()
        if reason:
            self.coded.assert_refused(dst)
        if self.recurrent and src != dst and (a.pending or b.pending or torn or copied != a.cells):
            assert "recurrent state" in reason
            return
        if self.unified and any(b.cells.get(p, cell)[1] != cell[1] for p, cell in copied.items()):
            assert "one token per position" in reason
            return
        if "one token per position expected in the layers of sliding windows" in reason:
            assert a.apart or b.apart
            return
        if "sliding windows" in reason:
            assert self.left_window(src, copied, max((*copied, b.last())) + 1)
            return
        assert not reason and not self.coded.take_refusal(dst)
        self.plain.cp(src, dst, p0, p1)
        if src == dst:
            return
        if not self.unified:
            self.plain.decode([10], 0, N_SEQ)  # llama.cpp carries out the copy
            assert self.plain.rm(N_SEQ, -1)
            a.back = 0
            self.seqs[dst] = copy.deepcopy(a)
            return
        begins = first == 0 and (len(copied) < len(a.cells) or a.whole) and sorted(copied) == list(range(len(copied)))
        b.whole = begins and set(b.cells) <= set(copied) if copied else b.whole
        b.tail, b.back, a.back, b.apart = a.tail, 0, 0, a.apart or b.apart
        if not b.cells or a.moves == b.moves:
            b.moves = a.moves
        elif a.moves:
            b.moves = b.moves, a.moves
        b.cells |= copied
        for p in a.rows.values():
            if p in copied and b.rows.get(b.slot(p), -1) <= p:
                b.rows[b.slot(p)] = p
        if self.halves:
            self.decode_anew(dst, 3)

    @rule(seq=SEQ)
    def keep(self, seq: int) -> None:
        for i in range(N_SEQ + 1):  # llama.cpp keeps the cells of other streams, not their recurrent state
            assert not self.recurrent or i == seq or self.plain.rm(i, -1)
        for s in (self.plain, self.coded):
            C.llama_memory_seq_keep(s.memory, seq)
        if self.unified or self.recurrent:
            self.seqs = [held if i == seq else Held() for i, held in enumerate(self.seqs)]

    @rule(seq=SEQ, n_removed=st.integers(0, 20), keep=st.integers(0, 12))
    def discard(self, seq: int, n_removed: int, keep: int) -> None:
        """Simulates a full context: removes some tokens after the first ones, and moves the later ones up."""
        before = len(self.seqs[seq].cells)
        self.remove(seq, keep, keep + n_removed)
        if n_removed and len(self.seqs[seq].cells) < before:
            self.shift(seq, keep + n_removed, -n_removed)

    @rule(seq=SEQ, p0=st.integers(0, N_MOST), by=st.integers(-5, 5).filter(bool))
    def shift(self, seq: int, p0: int, by: int) -> None:
        if C.llama_model_rope_type(self.coded.model.handle) in M_ROPE:  # llama.cpp ends the process
            return
        held = self.seqs[seq]
        last = C.llama_memory_seq_pos_max(self.coded.memory, seq)
        C.llama_memory_seq_add(self.coded.memory, seq, p0, -1, by)
        if self.adapt or self.recurrent or (held.cells and not held.can_shift(p0, by)):
            assert last_error().startswith("seq_add: ")
            self.coded.assert_refused(seq)
            assert C.llama_memory_seq_pos_max(self.coded.memory, seq) == last
            return
        self.unshare(seq, p0)
        held.shift(p0, by)
        assert C.llama_memory_seq_pos_max(self.coded.memory, seq) == held.last()
        C.llama_memory_seq_add(self.plain.memory, seq, p0, -1, by)
        # a state of llama.cpp's would have keys that are still to be turned; the token may take a cell that slid away
        for s in (self.plain, self.coded) if self.halves else (self.plain,):
            s.decode([10], 0, N_SEQ)
            assert s.rm(N_SEQ, -1)

    def unshare(self, seq: int, p0: int) -> None:
        """Gives a sequence cells of its own from p0 on: llama.cpp would move a shared cell in all of its sequences."""
        held = self.seqs[seq]
        others = [other for other in self.seqs if other is not held]

        def sharing(p: int) -> list[int]:
            return [self.seqs.index(other) for other in others if other.cells.get(p) == held.cells[p]]

        if not self.unified or not any(sharing(p) for p in held.cells if p >= p0):
            return
        self.plain.decode([10], 0, N_SEQ)  # a state would have keys that are still to be turned
        assert self.plain.rm(N_SEQ, -1)
        state = self.plain.state(seq)
        assert self.plain.rm(seq, -1) and self.plain.set_state(state, seq) == len(state)
        for p, (token, _) in list(held.cells.items()):
            if p >= p0:
                self.n_cells += 1
                held.cells[p] = token, self.n_cells
            elif with_others := sharing(p):
                assert self.plain.rm(seq, p, p + 1)
                self.plain.cp(with_others[0], seq, p, p + 1)

    @rule()
    def clear(self) -> None:
        for s in (self.plain, self.coded):
            s.clear()
        self.seqs = [Held() for _ in range(N_SEQ)]

    @rule(seq=st.none() | SEQ)
    def save(self, seq: int | None) -> None:
        what = copy.deepcopy(self.seqs if seq is None else self.seqs[seq])
        for held in what if isinstance(what, list) else [what]:
            held.back, held.pending = 0, False
        self.saved.append((self.plain.state(seq), self.coded.state(seq), what))

    @rule(which=st.integers(0, 9), seq=SEQ)
    def restore(self, which: int, seq: int) -> None:
        if not self.saved:
            return
        plain, coded, what = self.saved[which % len(self.saved)]
        what = copy.deepcopy(what)
        to = None if isinstance(what, list) else seq
        assert self.coded.set_state(coded, to) == len(coded), last_error()
        if to is None:
            self.seqs = what
        else:
            for p, (token, _) in what.cells.items():  # separate cells
                self.n_cells += 1
                what.cells[p] = token, self.n_cells
            self.seqs[seq] = what
            assert self.plain.rm(seq, -1, -1)  # which llama.cpp leaves out where there are no cells
        for held in self.seqs:
            held.back = 0  # cells of recurrent state may have been in the way
        assert self.plain.set_state(plain, to) == len(plain)

    @rule(which=st.integers(0, 9), seq=SEQ, at=st.integers(0, 10**9), bit=st.integers(0, 7))
    def restore_damaged(self, which: int, seq: int, at: int, bit: int) -> None:
        if not self.saved:
            return
        _, coded, what = self.saved[which % len(self.saved)]
        damaged = bytearray(coded)
        damaged[8 + at % (len(coded) - 8)] ^= 1 << bit  # llama.cpp's own eight bytes name a sequence
        to = None if isinstance(what, list) else seq
        assert self.coded.set_state(bytes(damaged), to) == 0

    @rule(seq=SEQ)
    def mark(self, seq: int) -> None:
        """A checkpoint: the cells stay, and the state besides them is saved."""
        held = self.seqs[seq]
        if not held.cells or (self.recurrent and held.tail != held.last()):
            return
        kept = copy.deepcopy(held)
        kept.back, kept.pending = 0, False
        states = [partial_state(s, seq) for s in (self.plain, self.coded)]
        if self.adapt:
            assert not states[1] and "partial state" in last_error()
            return
        self.marked.append((states[0], states[1], kept))

    @rule(which=st.integers(0, 9), seq=SEQ)
    def go_back(self, which: int, seq: int) -> None:
        """To a checkpoint of a sequence that has, or should have, the cells of then."""
        if not self.marked:
            return
        plain, coded, kept = self.marked[which % len(self.marked)]
        held, first = self.seqs[seq], kept.last() + 1
        if held.moves != kept.moves:
            last = C.llama_memory_seq_pos_max(self.coded.memory, seq)
            assert set_partial_state(self.coded, coded, seq) == 0
            assert "a shift" in last_error()
            assert C.llama_memory_seq_pos_max(self.coded.memory, seq) == last
        elif any(p not in held.cells for p in kept.rows.values()):
            assert set_partial_state(self.coded, coded, seq) == 0
            assert "exact rows" in last_error()
            assert self.plain.rm(seq, -1, -1)
            self.seqs[seq] = Held()
        elif kept.cells == {p: cell for p, cell in held.cells.items() if p < first}:
            assert set_partial_state(self.coded, coded, seq) == len(coded), last_error()
            assert self.coded.rm(seq, first, -1), last_error()
            if self.halves:  # else a whole state with separate cells
                assert set_partial_state(self.plain, plain, seq) == len(plain)
            assert self.plain.rm(seq, first, -1)
            self.seqs[seq] = copy.deepcopy(kept)
            self.seqs[seq].apart = True
            for other in self.seqs:
                other.back = 0

    @initialize()
    def begin(self) -> None:
        """A program without a token is none."""
        self.decode(0, [20, 13], 1, 0)


def bound(model: engine.Model) -> float:
    """Twice the differences of an f16 cache's logits between attention kernels and splits, as in test_exact.py, on the
    text
    out of six with the largest differences.
    """
    n_word, most = min(200, model.n_vocab - 12), 0.0
    for text in range(6):
        tokens = [10 + (i * i * 37 + i * text * 13) % n_word for i in range(200)]
        found = []
        for flash, pieces in ((0, None), (0, [20] * 10), (1, None)):
            with session(model, flash_attn=flash, threads=1) as s:
                found.append(s.decode(tokens, pieces=pieces))
        most = max(most, *(distance(found[0], other) for other in found[1:]))
    return 2 * most


def run_programs(model: engine.Model, layout: Any, n: int, **options: Any) -> None:
    """n random programs, the same in every run; or SUBKV_PROGRAMS new ones. options: of Machine."""
    most = bound(model)
    run_state_machine_as_test(
        lambda: Machine(model, layout, most, **options),
        settings=settings(
            max_examples=N_PROGRAMS or n,
            stateful_step_count=N_CALLS,
            deadline=None,
            database=None,
            derandomize=not N_PROGRAMS,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
