"""Checkpoints: they return a context to an earlier position if its last tokens cannot simply be removed.

Cells can be removed. Recurrent state depends on all tokens, and a coded cache has no exact rows left from before the
removed tokens. So copies of both are kept at likely branch points: the end of a message or a prompt, regular
intervals, and positions where a text differed from an earlier one. A copy is a partial state of llama.cpp: everything
except the cells, which stay in place, and of a coded cache the exact window. Its size is independent of the position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from subkv.native.binding import C

BYTES = 512 << 20  # maximum size of a context's copies
SPACING = 512  # tokens between checkpoints of a long text
PARTIAL = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


@dataclass(frozen=True)
class Checkpoint:
    """The state after the first n_tokens of a sequence."""

    n_tokens: int
    state: ctypes.Array[ctypes.c_uint8]


class Checkpoints:
    """The checkpoints of one sequence of a context, in order, at most n_bytes in total."""

    def __init__(self, context: Any, seq: int = 0, n_bytes: int = BYTES, sliding: bool = False) -> None:
        """context: a llama_context pointer. sliding: some layers have a sliding window; states omit older tokens."""
        self._context, self._seq, self._n_bytes, self._sliding = context, seq, n_bytes, sliding
        self.floor = 0  # with fewer tokens, the next one would miss cells that it attends to
        self._held: list[Checkpoint] = []
        self._divergence = 0  # where a text differed from an earlier one, without a checkpoint
        self._inconsistent = False  # the cells after a restored state may be of another text
        self._temporary: Checkpoint | None = None

    def forget(self) -> None:
        """Drop all: the sequence was emptied or replaced."""
        self._held.clear()
        self._inconsistent, self.floor = False, 0

    def positions_changed(self, n: int) -> None:
        """Drop all: the n cells have other positions now. Missing cells are still missing."""
        floor = n if self.floor else 0
        self.forget()
        self.floor = floor

    @property
    def held(self) -> tuple[Checkpoint, ...]:
        """The checkpoints in order."""
        return tuple(self._held)

    def adopt(self, points: Iterable[Checkpoint], n: int) -> None:
        """Replace all: the sequence was replaced by a state of n tokens with these checkpoints."""
        self.forget()
        self._held += points
        self._trim()
        self._restored(n)

    def _restored(self, n: int) -> None:
        self.floor = n if self._sliding else 0

    def restorable(self, n: int) -> int:
        """How many of the first n tokens rewind(n) would keep, by checkpoints alone."""
        return max((point.n_tokens for point in self._held if point.n_tokens <= n), default=0)

    def rewind(self, n: int, exactly: bool = False) -> int:
        """Remove the cells from position n on, or from an earlier checkpoint on. Returns the number of cells left.

        exactly: remove them from position n on, or remove none if that is impossible.
        """
        memory = C.llama_get_memory(self._context)
        n_held: int = C.llama_memory_seq_pos_max(memory, self._seq) + 1
        if n_held <= n and not self._inconsistent:
            return n_held
        simple = (
            n > 0 and n >= self.floor and not self._inconsistent and C.llama_memory_seq_rm(memory, self._seq, n, -1)
        )
        if exactly and not simple and self.restorable(n) < n:
            return n_held
        self._held = [point for point in self._held if point.n_tokens <= n]
        if simple:
            return n
        self._divergence = n
        while self._held:
            point = self._held[-1]
            self._inconsistent = True
            done = C.llama_state_seq_set_data_ext(self._context, point.state, len(point.state), self._seq, PARTIAL)
            if done == len(point.state) and C.llama_memory_seq_rm(memory, self._seq, point.n_tokens, -1):
                self._inconsistent = False
                self._restored(point.n_tokens)
                return point.n_tokens
            self._held.pop()
        C.llama_memory_seq_rm(memory, self._seq, -1, -1)
        self.forget()
        return 0

    def mark_divergence(self, n: int) -> None:
        """Another text differs after the first n tokens; take a checkpoint there next time."""
        self._divergence = n

    def pauses(self, first: int, end: int) -> list[int]:
        """Positions for take() while tokens [first, end) are evaluated."""
        if end - first < 2:
            return []
        positions = {self._divergence, end - 1, *range(first - first % SPACING + SPACING, end, SPACING)}
        return sorted(n for n in positions if first < n < end)

    def due(self, n: int) -> bool:
        """Whether a text that grows token by token needs a checkpoint after its first n."""
        lasting = (point.n_tokens for point in self._held if point is not self._temporary and point.n_tokens <= n)
        return n - max(lasting, default=0) >= SPACING

    def take_for_draft(self, n: int) -> None:
        """take(n); it is dropped at the next draft, unless a checkpoint is due."""
        if n <= self.restorable(n):
            return
        due = self.due(n)
        self._held = [point for point in self._held if point is not self._temporary]
        self.take(n)
        self._temporary = None if due or self.restorable(n) < n else self._held[-1]

    def take(self, n: int) -> None:
        """Copy the present state, after the first n tokens."""
        if n <= self.restorable(n):
            return
        size = C.llama_state_seq_get_size_ext(self._context, self._seq, PARTIAL)
        if not 0 < size <= self._n_bytes:  # adaptive bases cannot be rolled back
            return
        state = (ctypes.c_uint8 * size)()
        if C.llama_state_seq_get_data_ext(self._context, state, size, self._seq, PARTIAL) != size:
            return
        self._held.append(Checkpoint(n, state))
        self._trim()

    def _trim(self) -> None:
        while sum(len(point.state) for point in self._held) > self._n_bytes:
            self._held.remove(min(self._held[:-1] or self._held, key=self._worth))

    def _worth(self, point: Checkpoint) -> int:
        """Tokens to evaluate again without this checkpoint."""
        return point.n_tokens - self.restorable(point.n_tokens - 1)
