"""Random programs with images: an f16 cache and exact codes give the same results after every call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from engine import distance, last_error
from pictures import WINDOW, Part, Picture, Vision, vision

__all__ = ["vision"]

N_SEQ, N_CALLS, N_CTX = 3, 60, 2048
N_ROLLBACK = WINDOW[2]


@pytest.fixture(scope="module")
def bound(vision: Vision) -> float:
    """Twice the differences of f16 caches with other rounding, on the text of three with the largest ones."""
    found = 0.0
    for parts in (vision.parts, vision.others, [*vision.others, *vision.parts[1:]]):
        made = []
        for options in ({"flash_attn": 0}, {"flash_attn": 1}, {"type_k": 0, "type_v": 0}):
            with vision.session(**options) as s:
                made.append(vision.decode(s, parts))
        found = max(found, *(distance(made[0], other) for other in made[1:]))
    return 2 * found


@dataclass
class Held:
    """A sequence's contents: the position and kind of each part, and the next position."""

    parts: list[tuple[int, Part]] = field(default_factory=list)
    end: int = 0
    newest: int = 0  # after the last position of the window

    def copy(self) -> Held:
        return Held(list(self.parts), self.end, self.newest)


class Program:
    """The same calls to both."""

    def __init__(self, vision: Vision, seed: int, bound: float, unified: bool) -> None:
        self.vision, self.bound, self.unified = vision, bound, unified
        self.rng = random.Random(seed)
        options = {"n_seq_max": N_SEQ + 1, "unified": unified, "n_ctx": N_CTX, "threads": 1}
        self.opened = [vision.session(**options), vision.session(vision.exact, **options)]
        self.held = [Held() for _ in range(N_SEQ)]
        self.saved: list[tuple[bytes, bytes, Held]] = []
        self.compared = self.removed = self.restored = 0

    def run(self) -> None:
        with self.opened[0] as self.stock, self.opened[1] as self.coded:
            for _ in range(N_CALLS):
                seq = self.rng.randrange(N_SEQ)
                self.rng.choice(
                    [self.decode, self.decode, self.decode, self.remove, self.copy, self.save, self.restore]
                )(seq)
            self.decode(0)

    def part(self) -> Part:
        if self.rng.random() < 0.5:
            return self.vision.picture(self.rng.randint(1, 7), self.rng.randint(1, 5), seed=self.rng.randrange(99))
        return [self.rng.randrange(10, self.vision.model.n_vocab - 4) for _ in range(self.rng.choice([1, 5, 12, 30]))]

    def decode(self, seq: int) -> None:
        part, held = self.part(), self.held[seq]
        if held.end > N_CTX // (N_SEQ + 1) - 50:
            return self.forget(seq)
        pieces = [self.rng.randint(1, 20) for _ in range(40)]
        expected = self.vision.decode(self.stock, [part], held.end, seq, iter(pieces))
        found = self.vision.decode(self.coded, [part], held.end, seq, iter(pieces))
        assert distance(expected, found) < self.bound
        self.compared += len(found)
        held.parts.append((held.end, part))
        n_visible = 1 if isinstance(part, Picture) and self.vision.shared else self.vision.advance(part)
        held.newest = max(held.newest, held.end + n_visible)
        held.end += self.vision.advance(part)
        return None

    def forget(self, seq: int) -> None:
        assert self.stock.rm(seq, -1)
        assert self.coded.rm(seq, -1)
        self.held[seq] = Held()

    def remove(self, seq: int) -> None:
        """From a part's beginning on, or from within a text."""
        held = self.held[seq]
        if not held.parts or self.vision.hybrid:
            return self.forget(seq)
        at, part = self.rng.choice(held.parts[-2:])
        if not isinstance(part, Picture):
            at += self.rng.randrange(len(part))
        if at == 0:
            return self.forget(seq)
        done = self.coded.rm(seq, at)
        if not done:  # a state, and a longer tail, leave sliding windows without their earlier rows
            slides = self.vision.slides and "sliding windows" in last_error()
            assert slides or held.newest - at > N_ROLLBACK
            assert last_error().startswith("seq_rm: ")
            return None
        assert self.stock.rm(seq, at)
        self.removed += 1
        held.parts = [
            (first, one if isinstance(one, Picture) else one[: at - first]) for first, one in held.parts if first < at
        ]
        held.end = at
        return None

    def copy(self, seq: int) -> None:
        to = (seq + 1) % N_SEQ
        self.forget(to)
        for s in (self.stock, self.coded):
            s.cp(seq, to)
        if not self.unified:  # llama.cpp executes the copy; a state would have the earlier contents
            self.stock.decode([10], 0, N_SEQ)
            assert self.stock.rm(N_SEQ, -1)
        self.held[to] = self.held[seq].copy()

    def save(self, seq: int) -> None:
        if self.held[seq].parts:
            self.saved.append((self.stock.state(seq), self.coded.state(seq), self.held[seq].copy()))

    def restore(self, seq: int) -> None:
        if not self.saved:
            return
        plain, coded, held = self.rng.choice(self.saved[-3:])
        self.forget(seq)
        assert self.stock.set_state(plain, seq) == len(plain)
        assert self.coded.set_state(coded, seq) == len(coded), last_error()
        self.held[seq] = held.copy()
        self.restored += 1


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_programs(vision: Vision, bound: float, seed: int, unified: bool) -> None:
    program = Program(vision, seed, bound, unified)
    program.run()
    assert program.compared > 100
    assert program.removed + program.restored > 0
