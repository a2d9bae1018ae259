"""Checkpoints: they return a context to an earlier position if its last tokens cannot simply be removed.

Cells can be removed. Recurrent state depends on all tokens, sliding layers keep the cells of their window only, and a
coded cache has dropped the exact rows that precede the removed tokens. So these are copied at likely branch points: the
end of a message or a prompt, every SPACING tokens, and positions where a text differed from an earlier one.
A checkpoint is a partial state of llama.cpp: everything except the cells that all tokens keep, which stay in place, and
of a coded cache the exact window. Its size is independent of the position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from subkv.native import library
from subkv.native.binding import C

# Maximum size of a context's copies. If fewer than N_LEAST fit, N_LEAST may stay: Gemma 3 12B's window takes 255 MiB in
# q8_0, and of two copies one is that of the prompt's end.
BYTES, N_LEAST = 512 << 20, 4
SPACING = 512  # tokens between checkpoints of a long text
SLIDING_SPACING = 4096  # the same without recurrent state: a window is a copy of hundreds of cells
PARTIAL = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


@dataclass(frozen=True)
class Checkpoint:
    """The state after the first n_tokens of a sequence, without its cells."""

    n_tokens: int
    state: ctypes.Array[ctypes.c_uint8]


def _copied(address: int, size: int) -> ctypes.Array[ctypes.c_uint8]:
    kind = ctypes.c_uint8 * size
    return kind.from_buffer_copy(kind.from_address(address))


def of_window(context: Any, model: Any, seq: int = 0) -> Checkpoints:
    """Checkpoints of a sequence in a context without recurrent state whose sliding layers keep their window only.

    context, model: llama.cpp's pointers.
    """
    memory, n_swa = C.llama_get_memory(context), C.llama_model_n_swa(model)
    coded = library.load().subkv_context_fingerprint(context) is not None

    def resume(n: int) -> int:
        if coded:
            return int(library.load().subkv_resume(context, seq, n))
        return n if C.llama_memory_seq_pos_min(memory, seq) <= max(0, n - n_swa) else 0

    return Checkpoints(context, seq, resume=resume, spacing=SLIDING_SPACING)


class Checkpoints:
    """The checkpoints (`points`, in order) of one sequence of a context, at most n_bytes in total."""

    def __init__(
        self,
        context: Any,
        seq: int = 0,
        n_bytes: int = BYTES,
        resume: Callable[[int], int] | None = None,
        spacing: int | None = None,
    ) -> None:
        """context: a llama_context pointer. resume(n): how many of the first n tokens stay if the later ones are
        removed without a checkpoint; 0: they cannot be. None: n, or the removal fails. spacing: default SPACING.
        """
        self._context, self._seq, self._n_bytes = context, seq, n_bytes
        self._resume, self._spacing = resume, spacing
        self.points: list[Checkpoint] = []
        self._divergence = 0  # where a text differed from an earlier one, without a checkpoint
        self._inconsistent = False  # the cells after a restored state may be of another text
        self._temporary: Checkpoint | None = None

    @property
    def spacing(self) -> int:
        """Tokens between the checkpoints of a long text."""
        return SPACING if self._spacing is None else self._spacing

    def forget(self) -> None:
        """Drop all: the sequence was emptied or replaced."""
        self.points.clear()
        self._inconsistent = False

    def restore(self, points: Iterable[tuple[int, int, int]]) -> None:
        """Use the checkpoints of a restored prompt: tokens, address and bytes of the state, in order."""
        self.points = [Checkpoint(n_tokens, _copied(data, size)) for n_tokens, data, size in points if size > 0]

    def restorable(self, n: int) -> int:
        """How many of the first n tokens rewind(n) would keep, by checkpoints alone."""
        return max((point.n_tokens for point in self.points if point.n_tokens <= n), default=0)

    def rewind(self, n: int, exactly: bool = False) -> int:
        """Remove the cells from position n on, or from an earlier checkpoint on. Returns the number of cells left.

        exactly: remove them from position n on, or remove none if that is impossible.
        """
        memory = C.llama_get_memory(self._context)
        n_cells: int = C.llama_memory_seq_pos_max(memory, self._seq) + 1
        if n_cells <= n and not self._inconsistent:
            return n_cells
        at = n if self._resume is None or self._inconsistent or n <= 0 else self._resume(n)
        direct = at > 0 and (at == n or (not exactly and self.restorable(n) < at))
        removed = direct and not self._inconsistent and C.llama_memory_seq_rm(memory, self._seq, at, -1)
        if exactly and not removed and self.restorable(n) < n:
            return n_cells
        self.points = [point for point in self.points if point.n_tokens <= (at if removed else n)]
        if removed:
            return at
        self._divergence = n
        while self.points:
            point = self.points[-1]
            self._inconsistent = True
            size = C.llama_state_seq_set_data_ext(self._context, point.state, len(point.state), self._seq, PARTIAL)
            if size == len(point.state) and C.llama_memory_seq_rm(memory, self._seq, point.n_tokens, -1):
                self._inconsistent = False
                return point.n_tokens
            self.points.pop()
        C.llama_memory_seq_rm(memory, self._seq, -1, -1)
        self.forget()
        return 0

    def pauses(self, first: int, end: int) -> list[int]:
        """Positions for take() while tokens [first, end) are evaluated."""
        if end - first < 2:
            return []
        spacing = self.spacing
        positions = {self._divergence, end - 1, *range(first - first % spacing + spacing, end, spacing)}
        return sorted(n for n in positions if first < n < end)

    def due(self, n: int) -> bool:
        """Whether a text that grows token by token needs a checkpoint after its first n tokens."""
        lasting = (point.n_tokens for point in self.points if point is not self._temporary and point.n_tokens <= n)
        return n - max(lasting, default=0) >= self.spacing

    def take_for_draft(self, n: int) -> None:
        """As take(n), for the state before a draft; the next draft replaces it, unless a checkpoint is due. Drafts
        leave the window of sliding layers in place.
        """
        if n <= self.restorable(n) or (self._resume is not None and not self.due(n)):
            return
        due = self.due(n)
        self.points = [point for point in self.points if point is not self._temporary]
        self.take(n)
        self._temporary = None if due or self.restorable(n) < n else self.points[-1]

    def take(self, n: int) -> None:
        """Copy the present state, after the first n tokens; drops others if they exceed n_bytes together, and N_LEAST.

        Most edits and questions are near the end, so copies become rarer towards the beginning: a dropped one saves the
        fewest tokens, relative to the tokens behind it.
        """
        if n <= self.restorable(n):
            return
        size = C.llama_state_seq_get_size_ext(self._context, self._seq, PARTIAL)
        if not 0 < size <= self._n_bytes:  # 0 if the cache cannot be rolled back
            return
        state = (ctypes.c_uint8 * size)()
        if C.llama_state_seq_get_data_ext(self._context, state, size, self._seq, PARTIAL) != size:
            return
        self.points.append(Checkpoint(n, state))
        limit = max(self._n_bytes, N_LEAST * size)
        while sum(len(point.state) for point in self.points) > limit:
            self.points.remove(min(self.points[:-1], key=lambda p: self._saved(p) / (n - p.n_tokens)))

    def _saved(self, point: Checkpoint) -> int:
        """How many tokens are evaluated again without this checkpoint, at most."""
        return point.n_tokens - self.restorable(point.n_tokens - 1)
