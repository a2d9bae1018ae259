"""The bounds of research/experiments/bounds.py hold on random and on adversarial data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.experiments import bounds
from research.experiments.sketch import Sketch

SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = 1.0 + 1e-9  # float64 against float64


def head(seed: int, n: int, d: int, r: int) -> tuple[np.random.Generator, bounds.F64, bounds.F64, bounds.F64]:
    """A generator, rows [n, d] over many orders of magnitude, a basis [r, d], and a query along the worst residual."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-3.0, 2.0, (n, 1))
    k[rng.random(n) < 0.1] = 0.0
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0][:, :r].T
    worst = (k - k @ basis.T @ basis)[np.argmax(np.linalg.norm(k - k @ basis.T @ basis, axis=1))]
    return rng, k, basis, worst


@given(SEEDS, st.integers(1, 40), st.integers(2, 16), st.floats(0.2, 1.5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_logit_and_output_bounds(seed: int, n: int, d: int, gamma: float, adversarial: bool) -> None:
    """Also for a query along the largest residual, where the logit bound is tight except for other cells."""
    r, scale = 1 + seed % d, d**-0.5
    rng, k, basis, worst = head(seed, n, d, r)
    v = rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-2.0, 2.0, (n, 1))
    basis_v = np.linalg.qr(rng.standard_normal((d, d)))[0][:, :r].T
    q = worst if adversarial else rng.standard_normal(d) * 10.0 ** rng.uniform(-2.0, 1.0)
    exact, coded = scale * k @ q, scale * gamma * (k @ basis.T) @ (basis @ q)
    error = float(np.abs(exact - coded).max())
    residual_k, residual_v = bounds.residual(k, basis), bounds.residual(v, basis_v)
    norm_q = float(np.linalg.norm(q))
    bound = bounds.logit_bound(scale, gamma, norm_q, residual_k, bounds.kept(k, basis))
    tiny = 1e-12 * (1.0 + np.abs(exact).max())
    assert error <= bound * ROUNDING + tiny
    assert bounds.paper_logit_bound(scale, 1.0, norm_q, residual_k) == pytest.approx(
        bounds.logit_bound(scale, 1.0, norm_q, residual_k, 1.0)
    )
    a, b = bounds.softmax(exact), bounds.softmax(coded)
    assert np.abs(a - b).sum() <= bounds.softmax_bound(error) * ROUNDING + 1e-9
    difference = np.linalg.norm(a @ v - b @ v @ basis_v.T @ basis_v)
    largest = float(np.linalg.norm(v, axis=1).max())
    assert difference <= bounds.output_bound(error, largest, residual_v) * ROUNDING + 1e-9 * largest
    assert bounds.output_bound(error, largest, residual_v) <= bounds.output_bound(bound + tiny, largest, residual_v)


def test_the_papers_logit_bound_fails_for_another_gamma() -> None:
    """A key inside the subspace has no residual, yet γ changes its logit."""
    k, basis, q = np.array([[2.0, 0.0]]), np.array([[1.0, 0.0]]), np.array([1.0, 0.0])
    gamma = 0.5**0.5
    error = abs(float((1.0 - gamma) * k[0] @ q))
    residual = bounds.residual(k, basis)
    assert bounds.paper_logit_bound(1.0, gamma, 1.0, residual) == 0.0 < error
    assert bounds.logit_bound(1.0, gamma, 1.0, residual, bounds.kept(k, basis)) == pytest.approx(error)


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-8, 8)), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_softmax_sensitivity(pairs: list[tuple[float, float]]) -> None:
    logits, change = np.array(pairs).T
    moved = np.abs(bounds.softmax(logits) - bounds.softmax(logits + change)).sum()
    assert moved <= bounds.softmax_bound(float(np.abs(change).max())) + 1e-9


@pytest.mark.parametrize("delta", [1e-3, 0.5, 3.0])
def test_softmax_sensitivity_is_tight(delta: float) -> None:
    one, other = np.array([delta, -delta]) / 2, np.array([-delta, delta]) / 2
    moved = np.abs(bounds.softmax(one) - bounds.softmax(other)).sum()
    assert moved == pytest.approx(bounds.softmax_bound(delta), rel=1e-9)


@given(SEEDS, st.integers(1, 5), st.integers(3, 12))
@settings(max_examples=60, deadline=None)
def test_bounds_over_chunks(seed: int, n_chunks: int, d: int) -> None:
    rng, k, _, _ = head(seed, 30, d, 1)
    v = rng.standard_normal((30, d))
    q = rng.standard_normal(d)
    cuts = np.sort(rng.integers(0, 31, n_chunks - 1))
    k_coded, v_coded, worst_k, worst_v = [], [], [], []
    for part in np.split(np.arange(30), cuts):
        b = np.linalg.qr(rng.standard_normal((d, d)))[0][:, : 1 + int(rng.integers(d))].T
        k_coded.append(k[part] @ b.T @ b)
        v_coded.append(v[part] @ b.T @ b)
        worst_k.append(bounds.residual(k[part], b))
        worst_v.append(bounds.residual(v[part], b))
    exact, coded = k @ q, np.concatenate(k_coded) @ q
    error = float(np.abs(exact - coded).max())
    norm_q = float(np.linalg.norm(q))
    assert error <= bounds.logit_bound(1.0, 1.0, norm_q, bounds.chunked(worst_k), 0.0) * ROUNDING + 1e-9
    difference = np.linalg.norm(bounds.softmax(exact) @ v - bounds.softmax(coded) @ np.concatenate(v_coded))
    largest = float(np.linalg.norm(v, axis=1).max())
    assert difference <= bounds.output_bound(error, largest, bounds.chunked(worst_v)) * ROUNDING + 1e-9


@given(SEEDS, st.integers(4, 24), st.integers(0, 120))
@settings(max_examples=40, deadline=None)
def test_residual_behind_a_frequent_directions_sketch(seed: int, d: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    r = 1 + int(rng.integers(d - 1))
    rows = r + 1 + int(rng.integers(2 * r))
    x = (rng.standard_normal((n, d)) * np.exp(-rng.uniform(0.0, 0.5) * np.arange(d))).astype(np.float32)
    x[n // 2 :] = x[n // 2 :, ::-1]  # turns, so that the sketch has to forget
    sketch = Sketch("fd", d, rows)
    sketch.absorb(x)
    a = x.astype(np.float64)
    noise = 1e-3 * bounds.norm(a) + 1e-9  # the sketch is float32: about √(rounding of its squares)
    assert bounds.residual(a, sketch.top(r)) <= bounds.fd_residual_bound(a, r, rows) + noise


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20), SEEDS)
@settings(max_examples=50, deadline=None)
def test_spearman(values: list[int], seed: int) -> None:
    x = np.array(values, dtype=np.float64)
    y = np.random.default_rng(seed).permutation(x)
    found = bounds.spearman(x, y)
    assert np.isnan(found) == (x.std() == 0.0)
    if x.std() > 0.0:
        assert bounds.spearman(x, np.exp(x)) == pytest.approx(1.0)
        assert bounds.spearman(x, -(x**3)) == pytest.approx(-1.0)
        assert -1.0 - 1e-9 <= found <= 1.0 + 1e-9


def test_ranks_share_ties() -> None:
    assert bounds.ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
