"""The mathematics of perplexity and KLD against definitions written out token by token."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from converter import scoring

F32 = npt.NDArray[np.float32]


def logits(seed: int, n: int, n_vocab: int, spread: float = 3.0) -> F32:
    return (spread * np.random.default_rng(seed).standard_normal((n, n_vocab))).astype(np.float32)


def plain_log_softmax(row: F32) -> list[float]:
    top = max(float(x) for x in row)
    total = math.fsum(math.exp(float(x) - top) for x in row)
    return [float(x) - top - math.log(total) for x in row]


@pytest.mark.parametrize("n_threads", [1, 3])
def test_scores_follow_the_definitions(n_threads: int) -> None:
    n, n_vocab = 37, 50  # more than two pieces of work, the last one short
    x, base = logits(1, n, n_vocab), logits(2, n, n_vocab)
    targets = np.random.default_rng(3).integers(0, n_vocab, n).astype(np.int32)
    with ThreadPoolExecutor(n_threads) as pool:
        scores = scoring.score(x, targets, base, pool, n_threads)
    for i in range(n):
        p, q = plain_log_softmax(base[i]), plain_log_softmax(x[i])
        assert np.concatenate(scores.nll)[i] == pytest.approx(-q[targets[i]], rel=1e-12)
        assert np.concatenate(scores.nll_base)[i] == pytest.approx(-p[targets[i]], rel=1e-12)
        kld = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert np.concatenate(scores.kld)[i] == pytest.approx(kld, rel=1e-9)
        assert np.concatenate(scores.same)[i] == (np.argmax(p) == np.argmax(q))


def test_summary() -> None:
    rng = np.random.default_rng(5)
    nll, base, kld = rng.random(101) + 2, rng.random(101) + 2, rng.random(101)
    same = np.arange(101) % 4 > 0
    got = scoring.Scores([nll[:50], nll[50:]], [base], [kld], [same]).summary()
    assert got["ppl"] == pytest.approx(math.exp(nll.sum() / 101))
    variance = (nll**2).mean() - nll.mean() ** 2  # llama-perplexity: sqrt(var / (count - 1)) of the mean, times PPL
    assert got["ppl_stderr"] == pytest.approx(got["ppl"] * math.sqrt(variance / 100))
    assert got["ppl_ratio"] == pytest.approx(got["ppl"] / got["ppl_base"])
    errors = [(x**2).mean() - x.mean() ** 2 for x in (nll, base)]
    covariance = (nll * base).mean() - nll.mean() * base.mean()
    ratio_error = math.sqrt((errors[0] + errors[1] - 2 * covariance) / 100)  # llama-perplexity's error of the ratio
    assert got["ppl_ratio_stderr"] == pytest.approx(got["ppl_ratio"] * ratio_error)
    assert got["mean_kld"] == pytest.approx(kld.mean())
    assert got["median_kld"] == sorted(kld)[50]
    order = sorted(kld)
    assert got["kld_999"] == pytest.approx(order[99] + 0.9 * (order[100] - order[99]))
    assert got["same_top"] == same.mean()


def test_without_a_base_only_perplexity_is_known() -> None:
    got = scoring.Scores([np.array([1.0, 2.0])]).summary()
    assert got["ppl"] == pytest.approx(math.exp(1.5))
    assert got["ppl_base"] is got["mean_kld"] is got["same_top"] is None
