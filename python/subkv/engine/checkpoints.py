"""Checkpoints: how a context whose tail cannot simply be removed goes back to an earlier position.

Cells of a tail can be removed. Recurrent state has taken the tail in and cannot give it up, and of a coded cache's
exact rows those before the tail are gone. So copies of both are kept from where a text is likely to go on otherwise:
the end of a turn, of a prompt, every so many tokens, and where a text parted from an earlier one. A copy is what
llama.cpp calls a partial state: everything but the cells, which stay where they are, and of a coded cache the exact
window. It costs the same wherever it is taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from subkv.native.binding import C

BYTES = 512 << 20  # of all copies of a context
SPACING = 512  # tokens between two of a long text
PARTIAL = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


@dataclass(frozen=True)
class Checkpoint:
    """The state after the first n_tokens of a sequence."""

    n_tokens: int
    state: ctypes.Array[ctypes.c_uint8]


class Checkpoints:
    """Those of one sequence of a context, at most n_bytes of them, in order."""

    def __init__(self, context: Any, seq: int = 0, n_bytes: int = BYTES, sliding: bool = False) -> None:
        """context: a llama_context pointer. sliding: some layers have a window; states leave out what has left it."""
        self._context, self._seq, self._n_bytes, self._sliding = context, seq, n_bytes, sliding
        self.floor = 0  # with fewer tokens some of what their successor attends to would be missing
        self._held: list[Checkpoint] = []
        self._divergence = 0  # where a text went on otherwise and no checkpoint was
        self._inconsistent = False  # a restored state has cells behind it that may not be its own
        self._temporary: Checkpoint | None = None

    def forget(self) -> None:
        """The sequence was emptied or replaced."""
        self._held.clear()
        self._inconsistent, self.floor = False, 0

    def positions_changed(self, n: int) -> None:
        """The cells have other positions now, n of them: no state fits them; what was missing is missing still."""
        floor = n if self.floor else 0
        self.forget()
        self.floor = floor

    @property
    def held(self) -> tuple[Checkpoint, ...]:
        """In order."""
        return tuple(self._held)

    def adopt(self, points: Iterable[Checkpoint], n: int) -> None:
        """The sequence was replaced by a state of n tokens that has these."""
        self.forget()
        self._held += points
        self._trim()
        self._restored(n)

    def _restored(self, n: int) -> None:
        self.floor = n if self._sliding else 0

    def restorable(self, n: int) -> int:
        """How many of the first n tokens, fewer than are held, rewind(n) would leave."""
        return max((point.n_tokens for point in self._held if point.n_tokens <= n), default=0)

    def rewind(self, n: int, exactly: bool = False) -> int:
        """Remove the cells from position n on, or from an earlier checkpoint on. Returns how many are left.

        exactly: from position n on, or none where neither the cache nor a checkpoint has what that takes.
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
        """Another text is known to go on otherwise after the first n tokens: a place for a checkpoint."""
        self._divergence = n

    def pauses(self, first: int, end: int) -> list[int]:
        """Where to pause, to take() a checkpoint, while tokens [first, end) of a text are evaluated."""
        if end - first < 2:
            return []
        wanted = {self._divergence, end - 1, *range(first - first % SPACING + SPACING, end, SPACING)}
        return sorted(n for n in wanted if first < n < end)

    def due(self, n: int) -> bool:
        """Whether a text that grows token by token should have one after its first n."""
        lasting = (point.n_tokens for point in self._held if point is not self._temporary and point.n_tokens <= n)
        return n - max(lasting, default=0) >= SPACING

    def take_for_draft(self, n: int) -> None:
        """take(n), up to the next such one; for good where one is due."""
        if n <= self.restorable(n):
            return
        due = self.due(n)
        self._held = [point for point in self._held if point is not self._temporary]
        self.take(n)
        self._temporary = None if due or self.restorable(n) < n else self._held[-1]

    def take(self, n: int) -> None:
        """Keep the state after the first n tokens, which is the present one."""
        if n <= self.restorable(n):
            return
        size = C.llama_state_seq_get_size_ext(self._context, self._seq, PARTIAL)
        if not 0 < size <= self._n_bytes:  # bases that follow the text cannot go back
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
        """Tokens that would have to be evaluated again without it."""
        return point.n_tokens - self.restorable(point.n_tokens - 1)
