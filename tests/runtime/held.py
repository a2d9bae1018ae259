"""A model of a sequence's contents, exact window and adaptive bases: the calls that a coded cache must accept or
refuse. With static bases it refuses few copies and shifts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

N_SINK, N_RECENT, N_ROLLBACK = WINDOW = (4, 16, 8)
BLOCK = 8


@dataclass
class Held:
    """A sequence's contents: its tokens by position, the exact rows in its window, and the range that adaptive bases
    coded.
    """

    cells: dict[int, tuple[int, int]] = field(default_factory=dict)  # token and number of the cell, by position
    rows: dict[int, int] = field(default_factory=dict)  # position, by slot of the window
    coded: int = 0
    origin: int = 0  # of the ring: shifted positions keep their slots
    whole: bool = True  # every token saw all those before it, from position 0 on
    tail: int = -1  # position that recurrent state is of
    back: int = 0  # tokens that it certainly goes back
    pending: bool = False  # it was rolled back, and no token decoded since
    apart: bool = False  # a checkpoint may have given it sliding cells beside those that others share
    moves: Any = ()  # all shifts, including those of copied cells

    def slot(self, pos: int) -> int:
        return pos if pos < N_SINK else N_SINK + (pos + self.origin) % (N_RECENT + N_ROLLBACK)

    def last(self) -> int:
        return max(self.cells, default=-1)

    def holds(self, positions: Iterable[int]) -> bool:
        """Whether the exact rows of these positions, as far as they have cells, are in the window."""
        return all(self.rows.get(self.slot(p)) == p for p in positions if p in self.cells)

    def can_decode(self, pos: int, adapts: bool) -> bool:
        if not adapts:
            return True
        first = max(0, pos - N_RECENT + 1)
        exact = [*range(min(N_SINK, first)), *range(first, pos)]
        uncoded = [p for p in self.cells if max(N_SINK, self.coded) <= p < first]
        return self.holds(exact) and self.holds(uncoded)

    def decode(self, pos: int, token: int, cell: int, adapts: bool) -> None:
        self.whole = self.whole and sorted(self.cells) == list(range(pos))
        self.tail, self.pending = pos, False
        self.cells[pos] = token, cell
        self.rows[self.slot(pos)] = pos
        if adapts and self.coded <= pos - N_RECENT:
            self.coded = ((pos - N_RECENT) // BLOCK + 1) * BLOCK

    def can_remove(self, p0: int, p1: int, adapts: bool) -> bool:
        if not adapts:
            return True
        left = max((p for p in self.cells if not p0 <= p < p1), default=-1)
        window = [p for p in range(max(0, left + 2 - N_RECENT), left + 1) if not p0 <= p < p1]
        return self.holds(window) and not 0 <= left < self.coded - 1

    def state_parts(self, p0: int, p1: int) -> bool:
        """Recurrent state would have to lose a tail."""
        return 0 < p0 <= self.tail < p1

    def remove(self, p0: int, p1: int) -> None:
        if p0 <= self.tail < p1:
            self.tail, self.back, self.pending = max(p0 - 1, -1), 0, p0 > 0
        self.cells = {p: cell for p, cell in self.cells.items() if not p0 <= p < p1}
        self.rows = {slot: p for slot, p in self.rows.items() if not p0 <= p < p1}
        self.whole = sorted(self.cells) == list(range(len(self.cells))) and (self.whole or not self.cells)
        if not self.cells:
            self.coded, self.moves = 0, ()

    def borrow(self, others: Iterable[Held]) -> None:
        """The next token's exact rows that others have, of cells that they share."""
        for p in (*range(N_SINK), *range(max(N_SINK, self.last() + 2 - N_RECENT), self.last() + 1)):
            if p in self.cells and any(other.cells.get(p) == self.cells[p] and other.holds([p]) for other in others):
                self.rows[self.slot(p)] = p

    def can_shift(self, p0: int, by: int) -> bool:
        """Positions from p0 on; llama.cpp removes cells that get a negative one."""
        after = [q for p in self.cells if (q := p + by * (p >= p0)) >= 0]
        return len(set(after)) == len(after)

    def shift(self, p0: int, by: int) -> None:
        if not any(p >= p0 for p in self.cells):
            return
        rows = {p: p + by * (p >= p0) for p in self.rows.values()}
        self.cells = {q: cell for p, cell in self.cells.items() if (q := p + by * (p >= p0)) >= 0}
        self.origin -= by
        kept = sorted(q for p, q in rows.items() if q >= 0 and (p < N_SINK) == (q < N_SINK))
        self.rows = {self.slot(q): q for q in kept}
        self.moves = (self.moves, p0, by)
        self.whole = False

    def tokens(self) -> list[int]:
        return [self.cells[p][0] for p in sorted(self.cells)]
