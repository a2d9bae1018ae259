"""Contexts of several splits, calls and tiles: the promises of exactness and of threads hold there, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine
import numpy as np
import pytest
from engine import distance, session
from test_adaptive import MANY

WINDOW = (4, 24, 8)
N, TAIL = 1250, 60
OPTIONS: dict[str, Any] = {"n_ctx": 1536, "n_ubatch": 192}


@pytest.fixture(scope="module")
def text(model: engine.Model) -> list[int]:
    """1250 tokens of no meaning."""
    return model.random_tokens(N, seed=13)


@pytest.fixture(scope="module")
def exact(model: engine.Model, text: list[int]) -> engine.Logits:
    """The last tokens' logits with an f16 cache."""
    with session(model, **OPTIONS) as s:
        return s.decode(text)[-TAIL:]


@pytest.fixture(scope="module")
def bound(model: engine.Model, text: list[int], exact: engine.Logits) -> float:
    """Several times the effect of the f16 cache's rounding."""
    with session(model, type_k=0, type_v=0, **OPTIONS) as s:
        return 8 * distance(exact, s.decode(text)[-TAIL:])


@pytest.mark.parametrize("adapt", [None, MANY])
def test_exact_codes_equal_the_f16_cache_with_any_number_of_threads(
    model: engine.Model,
    text: list[int],
    make_layout: Callable[..., Any],
    exact: engine.Logits,
    bound: float,
    adapt: str | None,
) -> None:
    layout = make_layout(scale=3.0) if adapt else make_layout()
    found = []
    for threads in (1, 3):
        with session(
            model, layout, window=WINDOW, threads=threads, adapt=adapt, offload_kqv=adapt is None, **OPTIONS
        ) as s:
            found.append(s.decode(text, pieces=[700, N - 700 - 25, *[1] * 25])[-TAIL:])
    assert np.array_equal(found[0], found[1])
    assert distance(exact, found[0]) < bound


def test_cells_of_two_sequences_in_every_tile(
    model: engine.Model, text: list[int], make_layout: Callable[..., Any], exact: engine.Logits, bound: float
) -> None:
    """Runs of 7 cells, and tiles that one sequence does not see."""
    runs = [(0, 200), (1, 150), *[(0, 7), (1, 5)] * 60, (1, 200), (0, N - 200 - 7 * 60 - 25)]
    at = [0, 0]
    with session(
        model, make_layout(), window=WINDOW, n_seq_max=2, unified=True, n_ctx=2304, n_ubatch=192, threads=3
    ) as s:
        for seq, n in runs:
            s.decode([t ^ seq for t in text[at[seq] : at[seq] + n]], at[seq], seq)
            at[seq] += n
        found = s.decode(text[at[0] :], at[0], 0, pieces=[1] * 25)
    assert distance(exact[-25:], found) < bound
