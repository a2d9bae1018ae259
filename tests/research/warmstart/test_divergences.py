"""The criteria of warm starts, on known distributions and outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from each import each

from research.warmstart import divergences as metrics
from research.warmstart.divergences import METHOD, NEIGHBOUR, RETRIEVED, Latency, Outcome


def outcome(target: str, kl: float, similarity: float | None = 0.95, **more: object) -> Outcome:
    fields: dict[str, object] = {
        "cache": "f16",
        "n_slots": 8,
        "task": "year",
        "words": 60,
        "n_tokens": 100,
        "system": METHOD,
        "kl_reverse": 2 * kl,
        "same_top": kl < 0.1,
        "kind": "paraphrase",
        "neighbour": f"{target}'",
        "correct": True,
        "correct_head": True,
        "correct_cold": True,
    }
    return Outcome(target=target, kl=kl, similarity=similarity, **(fields | more))  # type: ignore[arg-type]


def latency(target: str, cold: float, warm: float) -> Latency:
    return Latency("f16", 8, target, 100, cold, warm, 0.5 * warm, {"embed": 0.1 * warm, "decode": 0.9 * warm})


def test_divergence_of_known_distributions() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(q)
    assert metrics.divergence(log_p, log_q) == pytest.approx(math.log(2))
    assert metrics.divergence(log_q, log_p) == math.inf
    assert metrics.divergence(log_p, log_p) == 0.0
    rng = np.random.default_rng(0)
    a, b = (np.log(x / x.sum()) for x in rng.random((2, 50)))
    assert metrics.divergence(a, b) == pytest.approx(float(np.exp(a) @ (a - b)))
    assert metrics.divergence(a, b) > 0.0


def test_cosine() -> None:
    assert metrics.cosine([1, 0], [1, 1]) == pytest.approx(math.sqrt(0.5))
    assert metrics.cosine([[2, 0], [0, 2]], [[-1, 0], [0, -1]]) == pytest.approx(-1.0)
    assert metrics.cosine([0, 0], [1, 1]) == 0.0


@each(
    ("similarity", "expected"),
    [(-0.3, "-1 to 0"), (0.0, "0 to 0.5"), (0.8999, "0.8 to 0.9"), (0.9, "0.9 to 0.95"), (1.0, "0.99 to 1")],
)
def test_bins(similarity: float, expected: str) -> None:
    assert metrics.similarity_bin(similarity) == expected


def test_summary_of_outcomes() -> None:
    some = [
        outcome("a", 0.0, nll=1.0, nll_cold=0.5, cosines=[1.0, 0.5], same_answer=True),
        outcome("b", 1.0, nll=2.0, nll_cold=0.5, cosines=[0.0, 0.5], correct=False, same_answer=False),
        outcome("c", 2.0, correct=None),
    ]
    row = metrics.summary(some)
    assert (row["n"], row["kl"], row["kl_median"], row["kl_reverse"]) == (3, 1.0, 1.0, 2.0)
    assert row["kl_stderr"] == pytest.approx(1 / math.sqrt(3))
    assert row["same_top"] == pytest.approx(1 / 3)
    assert row["ppl_ratio"] == pytest.approx(math.exp(1.0))
    assert (row["cosine"], row["n_labelled"], row["correct"], row["same_answer"]) == (0.5, 2, 0.5, 0.5)
    assert metrics.layer_cosines(some).tolist() == [0.5, 0.5]
    assert metrics.summary([])["n"] == 0


def test_criteria_met() -> None:
    found = metrics.criteria([outcome("a", 0.02), outcome("b", 0.06)], [latency("a", 1.0, 0.5), latency("b", 1.0, 0.6)])
    assert [c.met for c in found] == [True, True, True, True]
    assert str(found[0]) == "at least 40% less first-token latency: met (45.0% ± 5.0% less, n = 2)"
    assert str(found[1]) == "mean KL(warm‖cold) at most 0.05: met (0.04 ± 0.02, n = 2)"


def test_criteria_count_similar_pairs_once_and_no_others() -> None:
    some = [
        outcome("a", 0.3),
        outcome("a", 0.3, kind=RETRIEVED),
        outcome("b", 0.1, correct=False, correct_head=False),
        outcome("c", 9.0, similarity=0.9),
        outcome("a", 9.0, system=NEIGHBOUR),
        outcome("d", 9.0, system=metrics.OWN, similarity=None),
    ]
    found = metrics.criteria(some, [latency("a", 1.0, 0.7), latency("c", 1.0, 0.1)])
    assert [c.met for c in found] == [False, False, False, False]
    assert [c.n for c in found] == [1, 2, 2, 2]
    assert "0.2 ± 0.1" in found[1].found
    assert found[2].found.startswith("+50.0% ± 50.0% drop from 100.0%")


def test_criteria_not_measured() -> None:
    found = metrics.criteria([outcome("a", 0.0, similarity=0.5)], [])
    assert [(c.met, c.n) for c in found] == [(None, 0)] * 4
    assert "not measured" in str(found[0])
    found = metrics.criteria([outcome("a", 0.0, correct=None)], [latency("a", 1.0, 0.1)])
    assert [c.met for c in found] == [True, True, None, None]
    never = {"correct": False, "correct_head": True, "correct_cold": False}
    found = metrics.criteria([outcome("a", 0.0, **never)], [])
    assert [(c.met, c.found) for c in found[2:]] == [(None, "no cold answer is right")] * 2


def test_risk_and_coverage() -> None:
    some = [
        outcome(str(i), kl, predicted_kl=guess) for i, (kl, guess) in enumerate([(3.0, 9.0), (0.1, 0.04), (0.5, 0.2)])
    ]
    found = metrics.risk_coverage([*some, outcome("x", 7.0)], 0.05)
    assert (found["n"], found["coverage"], found["kl"]) == (3, pytest.approx(1 / 3), 0.1)
    assert found["kl_all"] == pytest.approx(1.2)
    assert np.allclose(found["curve"], [[1 / 3, 0.1], [2 / 3, 0.3], [1.0, 1.2]])
    assert metrics.risk_coverage(some, 0.01)["kl"] is None
    assert metrics.risk_coverage([], 0.01)["coverage"] is None
