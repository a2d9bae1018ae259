"""On a GPU, codes of decoded tokens are made later, from the rows of the exact window: those made at once, bit for bit.

The scale of a cell without codes is NaN, so a reader of one shows in the logits or in a state. Needs a GPU with CUDA,
or two emulated ones (cmake -DSUBKV_EMULATE_CUDA=ON).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import engine
import numpy as np
import pytest
from each import each
from engine import C, Session
from machine import N_CALLS, partial_state, set_partial_state
from test_placement import JOINT, Places, gpus

pytestmark = pytest.mark.skipif(
    not any(name.startswith(("NVIDIA", "EMULATED")) for name in gpus()),
    reason="no GPU with CUDA, nor an emulated one (-DSUBKV_EMULATE_CUDA=ON)",
)

BANDS = [(8, 8), (8, 6), (16, 4)]
N_MOST = 60  # tokens of a sequence

Call = Callable[[Session], Any]


class Pair:
    """The same calls on a cache that defers codes and on one that does not; results must be equal bit for bit."""

    def __init__(
        self,
        model: engine.Model,
        layout: Any,
        monkeypatch: pytest.MonkeyPatch,
        window: tuple[int, int, int],
        **options: Any,
    ) -> None:
        self.sessions, self.places = [], [Places(), Places()]
        for defer, places in zip("10", self.places, strict=True):
            monkeypatch.setenv("SUBKV_DEFER", defer)
            self.sessions.append(Session(model, layout, window=window, on_node=places.callback, n_ubatch=16, **options))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for s in self.sessions:
            s.close()

    def same(self, call: Call) -> None:
        deferred, at_once = (call(s) for s in self.sessions)
        if isinstance(deferred, np.ndarray):
            assert np.isfinite(at_once).all()
            assert np.array_equal(deferred.view(np.uint32), at_once.view(np.uint32))
        else:
            assert deferred == at_once


def one_by_one(text: list[int], pos: int, seq: int) -> Call:
    return lambda s: s.decode(text, pos, seq, pieces=[1] * len(text))


def together(items: list[tuple[int, int, int]]) -> Call:
    return lambda s: s.decode_batch(items)


def batch(text: list[int], pos: int, seq: int) -> Call:
    return lambda s: s.decode(text, pos, seq)


def removal(seq: int, p0: int, p1: int) -> Call:
    return lambda s: s.rm(seq, p0, p1)


def copy(src: int, dst: int) -> Call:
    return lambda s: s.cp(src, dst)


def shift(seq: int, p0: int, by: int) -> Call:
    return lambda s: C.llama_memory_seq_add(s.memory, seq, p0, -1, by)


def keep(seq: int) -> Call:
    return lambda s: C.llama_memory_seq_keep(s.memory, seq)


def state(seq: int | None) -> Call:
    return lambda s: s.state(seq)


def restore(src: int, dst: int) -> Call:
    return lambda s: s.set_state(s.state(src), dst)


def restore_window(seq: int) -> Call:
    return lambda s: set_partial_state(s, partial_state(s, seq), seq)


def test_codes_are_made_when_rows_leave_the_window(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for window in ((4, 8, 4), (0, 5, 0), (3, 0, 0)):
        with Pair(model, make_layout(BANDS, BANDS), monkeypatch, window) as pair:
            pair.same(batch(tokens[:10], 0, 0))
            pair.same(one_by_one(tokens[10:32], 10, 0))
            pair.same(state(0))
            nodes = [set(places.found) for places in pair.places]
            assert (JOINT in nodes[0]) == (window[1] > 0) and JOINT not in nodes[1]


def random_calls(rng: random.Random, n_seq: int, ends: Callable[[], list[int]]) -> Iterator[Call]:
    """Calls that a cache accepts or refuses. ends: the last position of every sequence."""

    def text(n: int) -> list[int]:
        return [rng.randrange(10, 200) for _ in range(n)]

    kinds = ["one"] * 6 + ["each"] * 3
    kinds += ["batch", "tail", "middle", "copy", "shift", "keep", "state", "restore", "window", "clear"]
    for _ in range(N_CALLS):
        kind, seq, last = rng.choice(kinds), rng.randrange(n_seq), ends()
        room = N_MOST - last[seq]
        if kind == "one" and room > 12:
            yield one_by_one(text(rng.randrange(1, 12)), last[seq] + 1, seq)
        elif kind == "each":  # one token of several sequences at a time
            chosen = [q for q in range(n_seq) if rng.random() < 0.7 and N_MOST - last[q] > 5]
            for i in range(rng.randrange(1, 5) if chosen else 0):
                yield together([(text(1)[0], last[q] + 1 + i, q) for q in chosen])
        elif kind == "batch" and room > 20:
            yield batch(text(rng.randrange(2, 20)), last[seq] + 1, seq)
        elif kind == "tail":
            yield removal(seq, max(0, last[seq] + 1 - rng.randrange(1, 12)), -1)
        elif kind == "middle":
            first = rng.randrange(0, max(1, last[seq]))
            yield removal(seq, first, first + rng.randrange(1, 12))
        elif kind == "copy":
            yield copy(seq, rng.randrange(n_seq))
        elif kind == "shift":
            yield shift(seq, rng.randrange(0, N_MOST), rng.choice([-7, -2, 3]))
        elif kind == "keep" and rng.random() < 0.3:
            yield keep(seq)
        elif kind == "state":
            yield state(rng.choice([None, seq]))
        elif kind == "restore":
            yield restore(seq, rng.randrange(n_seq))
        elif kind == "window":
            yield restore_window(seq)
        elif kind == "clear" and rng.random() < 0.2:
            yield Session.clear


@pytest.mark.parametrize(
    ("n_seq", "unified", "window"), [(1, False, (2, 6, 3)), (3, True, (2, 6, 3)), (3, False, (1, 9, 0))]
)
def test_random_programs(
    model: engine.Model,
    make_layout: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    n_seq: int,
    unified: bool,
    window: tuple[int, int, int],
) -> None:
    options = {"n_seq_max": n_seq, "unified": unified, "n_ctx": 256 if unified else 256 * n_seq}
    with Pair(model, make_layout(BANDS, BANDS), monkeypatch, window, **options) as pair:
        memory = pair.sessions[0].memory

        def ends() -> list[int]:
            return [C.llama_memory_seq_pos_max(memory, q) for q in range(n_seq)]

        for call in random_calls(random.Random(n_seq), n_seq, ends):
            pair.same(call)
            pair.same(lambda s: [C.llama_memory_seq_pos_max(s.memory, q) for q in range(n_seq)])
        pair.same(state(None))


@pytest.mark.parametrize(("defer", "n_at_once"), [("1", 1), ("1", 3), ("0", 1)])
@each(
    "call",
    [
        *(shift(0, p0, by) for p0, by in ((0, 4), (27, 3), (20, 40), (10, -5))),
        *(removal(0, p0, p1) for p0, p1 in ((28, -1), (20, -1), (5, 9), (25, 27), (0, -1))),
        *(copy(0, 1), copy(1, 0), keep(0), keep(1)),
        *(state(0), state(None), restore(0, 1), restore(1, 0), restore_window(0), Session.clear),
    ],
)
def test_the_host_waits_for_work_that_it_changes(
    model: engine.Model,
    tokens: list[int],
    make_layout: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    defer: str,
    n_at_once: int,
    call: Call,
) -> None:
    """A call right after tokens without logits, for which nothing has waited, does what it does after a wait."""
    monkeypatch.setenv("SUBKV_DEFER", defer)
    results = []
    for waits in (True, False):
        s = Session(model, make_layout(BANDS, BANDS), window=(4, 8, 4), n_seq_max=2, unified=True)
        s.decode(tokens[:12], 0, 1)
        s.decode(tokens[:24], 0, 0)
        for pos in range(24, 24 + 3 * n_at_once, n_at_once):
            assert s.try_decode(tokens[pos : pos + n_at_once], pos, 0, logits=False) == 0
        if waits:
            C.llama_synchronize(s.ctx)
        found = call(s)
        ends = [C.llama_memory_seq_pos_max(s.memory, seq) for seq in range(2)]
        refused = [s.take_refusal(seq) for seq in range(2)]
        if any(refused):
            ends[0] = ends[1] = -1
            s.clear()
        logits = [s.decode(tokens[40:44], end + 1, seq) for seq, end in enumerate(ends)]
        results.append((found, ends, [of.tobytes() for of in logits]))
        s.close()
    assert results[0] == results[1]
