"""The planner: budget respected and used, valid bands, monotone, near-optimal; every refusal."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subkv.base.errors import SubkvError
from subkv.format.bases import Bands
from subkv.format.codec import rank
from subkv.format.window import DEFAULT, Window
from subkv.plan.budget import (
    GROUP,
    Head,
    Overhead,
    account,
    check_rank,
    first_within,
    loss,
    plan_banded,
    plan_int8,
)
from subkv.plan.costs import near_share
from subkv.plan.quantizer import WIDTHS

OVERHEAD = Overhead(8192, DEFAULT)


def random_heads(seed: int, n: int = 24, d: int = 64, sort: bool = True) -> list[Head]:
    rng = np.random.default_rng(seed)
    heads = []
    for _ in range(n):
        importance = np.exp(rng.uniform(-3, 3) - rng.uniform(1, 8) * np.arange(d) / d) * rng.uniform(0.3, 1.0, d)
        heads.append(Head(d, np.sort(importance)[::-1] if sort else importance))
    return heads


def error(heads: list[Head], plan: list[Bands]) -> float:
    """Expected error of a plan by the planner's own model, counted coefficient by coefficient."""
    total = 0.0
    for head, bands in zip(heads, plan, strict=True):
        bits = [b for n, b in bands for _ in range(n)]
        bits += [0] * (len(head.importance) - len(bits))
        total += sum(i * loss(b) for i, b in zip(head.importance, bits, strict=True))
    return total


@given(st.integers(0, 10**9), st.floats(2.6, 8.6), st.sampled_from([512, 4096, 8192, 131072]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_budget_is_kept_and_used(seed: int, kv_bits: float, context: int, sort: bool) -> None:
    heads = random_heads(seed, sort=sort)
    overhead = Overhead(context, Window(4, 0).with_defaults())
    least = account(heads, [((8, 2),)] * len(heads), overhead).total
    budget = max(kv_bits, 1.02 * least)
    plan = plan_banded(heads, budget, overhead)
    counted = account(heads, plan, overhead)
    assert counted.total <= budget + 1e-9
    assert counted.total >= 0.98 * budget
    for bands in plan:
        assert 1 <= len(bands) <= 8
        assert all(n > 0 and n % GROUP == 0 and bits in WIDTHS for n, bits in bands)
        assert rank(bands) <= 64
        assert [bits for _, bits in bands] == sorted({bits for _, bits in bands}, reverse=True)


@given(st.integers(0, 10**9), st.floats(2.0, 8.0), st.floats(0.25, 2.0))
@settings(max_examples=40, deadline=None)
def test_more_bits_never_hurt(seed: int, kv_bits: float, more: float) -> None:
    heads = random_heads(seed, n=8)
    poor, rich = (plan_banded(heads, bits, OVERHEAD) for bits in (kv_bits, kv_bits + more))
    assert error(heads, rich) < error(heads, poor)
    assert account(heads, rich, OVERHEAD).bytes_per_token > account(heads, poor, OVERHEAD).bytes_per_token


@given(st.integers(0, 10**9), st.floats(3.0, 6.0))
@settings(max_examples=20, deadline=None)
def test_plan_beats_uniform_bits(seed: int, kv_bits: float) -> None:
    heads = random_heads(seed)
    plan = plan_banded(heads, kv_bits, OVERHEAD)
    for uniform in (((64, 2),), ((64, 3),), ((64, 4),), ((64, 5),), ((32, 6),), ((48, 4),)):
        if account(heads, [uniform] * len(heads), OVERHEAD).total <= kv_bits:
            assert error(heads, plan) < error(heads, [uniform] * len(heads))


@pytest.mark.parametrize("kv_bits", [2.0, 3.1, 4.5])
def test_plan_is_close_to_the_best_of_all_plans(kv_bits: float) -> None:
    """Two heads of 24 coefficients: compare with exhaustive search over all non-increasing widths."""
    heads = random_heads(7, n=2, d=24)
    overhead = Overhead(65536, Window(0, 0).with_defaults())
    widths = (0, *WIDTHS)
    options = [(a, b, c) for a in widths[1:] for b in widths if b <= a for c in widths if c <= b]
    costs, errors = [], []
    for head in heads:
        sums = head.importance.reshape(-1, GROUP).sum(axis=1)
        costs.append([sum(GROUP * (bits + (overhead.basis_bits(head) if bits else 0)) for bits in o) for o in options])
        errors.append([sum(s * loss(bits) for s, bits in zip(sums, o, strict=True)) for o in options])
    budget = (kv_bits - overhead.window_bits(heads)) * 48 - 16  # two scale bytes
    best = min(
        errors[0][i] + errors[1][j]
        for i in range(len(options))
        for j in range(len(options))
        if costs[0][i] + costs[1][j] <= budget
    )
    assert error(heads, plan_banded(heads, kv_bits, overhead)) <= 1.6 * best


def test_important_heads_get_more_bits() -> None:
    base = np.exp(-np.arange(64) / 16.0)
    plan = plan_banded([Head(64, 100.0 * base), Head(64, base)], 4.0, OVERHEAD)
    strong, weak = (sum(n * bits for n, bits in bands) for bands in plan)
    assert strong > weak + 64


def test_account_counts_every_byte() -> None:
    heads = [Head(64, np.ones(64)), Head(32, np.ones(32))]
    plan: list[Bands] = [((16, 8), (24, 3)), ((32, 5),)]
    counted = account(heads, plan, Overhead(1000, DEFAULT))
    assert counted.bytes_per_token == (1 + 16 + 9) + (1 + 20)
    assert counted.rows == pytest.approx(8 * 47 / 96)
    assert counted.window == pytest.approx((16 * 4 + (10 + 16 * 2 / 96) * (128 + 16)) / 1000)
    halves = account(heads, plan, Overhead(1000, Window(recent_bits=16).with_defaults()))
    assert halves.window == pytest.approx(16 * (4 + 128 + 16) / 1000)
    bases = (2 + 1) * (40 * 64 + 32 * 32) + 2 * (40 + 32)  # in memory: D in f16, E in bytes, steps of its rows
    assert counted.bases == pytest.approx(8 * bases / (1000 * 96))
    assert counted.total == pytest.approx(counted.rows + counted.window + counted.bases)


def test_budget_range_in_the_message_is_exact() -> None:
    heads = random_heads(1, n=6)
    messages = []
    for bits in (0.5, 100.0, float("nan")):
        with pytest.raises(SubkvError, match=r"^kv_bits: expected .* found") as caught:
            plan_banded(heads, bits, OVERHEAD)
        messages.append(str(caught.value))
    low, high = map(float, re.findall(r"expected ([\d.]+) to ([\d.]+) bits", messages[0])[0])
    assert account(heads, plan_banded(heads, low, OVERHEAD), OVERHEAD).total <= low
    step = 8 * GROUP / sum(head.d for head in heads)  # the message rounds down, so one last step may not fit
    assert high - 1.01 * step <= account(heads, plan_banded(heads, high, OVERHEAD), OVERHEAD).total <= high
    for outside in (low - 0.002, high + 0.002):
        with pytest.raises(SubkvError):
            plan_banded(heads, outside, OVERHEAD)


def test_heads_without_importance_still_get_valid_bands() -> None:
    plan = plan_banded([Head(64, np.zeros(64)), Head(64, np.ones(64))], 4.0, OVERHEAD)
    assert all(bands for bands in plan)
    assert account([Head(64, np.zeros(64))] * 2, plan, OVERHEAD).total <= 4.0


def test_rank_caps_hold() -> None:
    heads = [Head(64, np.ones(16)), Head(64, np.ones(64))]
    assert [rank(bands) for bands in plan_int8(heads)] == [16, 64]
    assert all(bands == ((rank(bands), 8),) for bands in plan_int8(heads))
    assert rank(plan_banded(heads, 4.0, OVERHEAD)[0]) <= 16


def test_ranks_that_do_not_fit_are_refused() -> None:
    assert check_rank(None, 64, 0) == 64
    assert check_rank(48, 64, 0) == 48
    with pytest.raises(SubkvError, match=r"^rank: expected at most the head size 64 of layer 3, found 72$"):
        check_rank(72, 64, 3)
    for bad in (0, -8, 12):
        with pytest.raises(SubkvError, match=rf"^rank: expected a positive multiple of 8, found {bad}$"):
            check_rank(bad, 64, 0)


def test_near_share_of_a_smaller_window() -> None:
    """The share of near cells: all without a window, none with the measured window, few with half of it."""
    shares = [near_share(n, 128) for n in (0, 1, 8, 32, 64, 127, 128, 500)]
    assert shares[0] == 1.0 and shares[-2:] == [0.0, 0.0]
    assert shares == sorted(shares, reverse=True)
    assert 0.01 < shares[4] < shares[3] < 0.1
    assert near_share(0, 0) == near_share(9, 0) == 0.0


@given(
    falls=st.lists(st.floats(0.0, 5.0), max_size=200),
    target=st.floats(1e-300, 1e3),
    first=st.integers(-5, 50),
    usual=st.floats(1.01, 4.0),
)
def test_the_first_step_within_a_target(falls: list[float], target: float, first: int, usual: float) -> None:
    """For any decreasing errors, zeros and infinities included, and with few evaluations."""
    errors = list(np.exp(100.0 - np.cumsum(falls))) if falls else []
    errors[: len(errors) // 10] = [math.inf] * (len(errors) // 10)
    errors[len(errors) - len(errors) // 10 :] = [0.0] * (len(errors) // 10)
    looked = []

    def error(step: int) -> float:
        looked.append(step)
        return float(errors[step - first])

    last = first + len(errors) - 1
    expected = next((first + i for i, found in enumerate(errors) if found <= target), last + 1)
    assert first_within(target, first, last, usual, error) == expected
    assert len(set(looked)) == len(looked) <= 3 * len(errors).bit_length()


def test_a_usual_decrease_needs_few_evaluations() -> None:
    """As in the search for the default budget: errors fall to a quarter per bit, in steps of a twentieth."""
    looked = []

    def error(step: int) -> float:
        looked.append(step)
        return 3.0 * 4.0 ** (-0.05 * step)

    step = first_within(0.002, 50, 200, 4.0**0.05, error)
    assert len(looked) <= 4
    assert step is not None and error(step) <= 0.002 < error(step - 1)


def test_a_search_ends_without_error_estimates() -> None:
    assert first_within(1.0, 0, 9, 2.0, lambda _step: None) is None
