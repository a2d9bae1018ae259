"""Eviction policies: kept keys of a text of random keys, and their rules on synthetic attention."""

from __future__ import annotations

import numpy as np
import pytest

from research.evictions import h2o, quest, snapkv, streaming
from research.evictions.keeping import POLICIES
from research.evictions.policy import Request

N, FIRST, BUDGET, HEADS, D = 640, 400, 256, 2, 16


def request(seed: int = 0) -> Request:
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((heads, N, D)).astype(np.float32) for heads in (2 * HEADS, HEADS))
    return Request(q, k, FIRST, BUDGET, D**-0.5)


@pytest.mark.parametrize("name", POLICIES)
def test_within_the_budget(name: str) -> None:
    """No more than the budget, nothing of the future, and always the query's own key."""
    kept = POLICIES[name][0](request())
    assert kept.shape == (2 * HEADS, N - FIRST, N) and kept.dtype == np.bool_
    assert kept.sum(2).max() <= BUDGET and kept.sum(2).min() >= BUDGET - snapkv.EVERY - snapkv.OBSERVING
    rows = np.arange(N - FIRST)
    assert kept[:, rows, FIRST + rows].all()
    assert not (kept & (np.arange(N)[None] > FIRST + rows[:, None])).any()


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv"])
def test_evicted_keys_stay_evicted(name: str) -> None:
    kept = POLICIES[name][0](request())
    for i in range(1, N - FIRST):
        assert not (kept[:, i, : FIRST + i] & ~kept[:, i - 1, : FIRST + i]).any()


def test_streaming_keeps_sinks_and_the_latest() -> None:
    kept = streaming.keep(request())
    assert np.flatnonzero(kept[1, 7]).tolist() == [0, 1, 2, 3, *range(FIRST + 8 - BUDGET + 4, FIRST + 8)]


@pytest.mark.parametrize("policy", [h2o.keep, snapkv.keep, quest.keep])
def test_a_key_that_draws_attention_is_kept(policy: object) -> None:
    """One early key that every query likes; a neighbour's is none of its business."""
    text = request()
    text.q[:, :, 0] = 4.0
    text.k[:, 37, 0], text.k[:, 37, 1:] = 9.0, 0.0
    assert policy(text)[:, :, 37].all()  # type: ignore[operator]


def test_h2o_keeps_the_latest_half() -> None:
    kept = h2o.keep(request())
    for i in (0, 100, N - FIRST - 1):
        assert kept[:, i, FIRST + i + 1 - BUDGET // 2 : FIRST + i + 1].all()


def test_quest_reads_whole_pages_by_an_upper_bound() -> None:
    """No unread page has a higher bound than a read one, and no key scores more than its page's bound."""
    text = request()
    kept = quest.keep(text)
    early = FIRST // quest.PAGE * quest.PAGE
    pages = kept[:, :, :early].reshape(2 * HEADS, N - FIRST, -1, quest.PAGE)
    read = pages.all(3)
    assert (read == pages.any(3)).all()
    keys = np.repeat(text.k, 2, axis=0)[:, None, :early].reshape(2 * HEADS, 1, -1, quest.PAGE, D)
    q = text.q[:, FIRST:, None, None]
    bound = np.maximum(q * keys.min(3, keepdims=True), q * keys.max(3, keepdims=True)).sum(4)[..., 0]
    assert (bound >= (q * keys).sum(4).max(3) - 1e-4).all()
    assert (np.where(read, bound, np.inf).min(2) >= np.where(read, -np.inf, bound).max(2) - 1e-4).all()
