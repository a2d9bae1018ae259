"""Sketches (kernels/include/subkv/sketch.h): the eigen-solver, and guarantees of every kind for a stream of rows."""

from __future__ import annotations

import numpy as np
import pytest
import sketches
from adaptive_build import adaptive_only
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from sketches import COVARIANCE, F32, F64, FREQUENT_DIRECTIONS, KINDS, OJA, Refused, Sketch

pytestmark = adaptive_only
SEEDS = st.integers(0, 2**32 - 1)
EPS64 = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)


def check_eigen(a: F64) -> None:
    """Residual, orthogonality, order, and numpy's eigenvalues; all within a few n eps of the largest."""
    n, scale = len(a), max(float(np.abs(a).max()), np.finfo(np.float64).tiny)
    a = a / scale
    values, vectors = sketches.eigen(a * scale)
    values = values / scale
    tolerance = 8 * n * EPS64 * max(1.0, float(np.abs(values).max()))
    assert np.abs(vectors @ vectors.T - np.eye(n)).max() < 8 * n * EPS64
    assert np.abs(vectors @ a - values[:, None] * vectors).max() < tolerance
    assert np.all(np.diff(values) <= 0.0)
    assert np.abs(values - np.linalg.eigvalsh(a)[::-1]).max() < tolerance


@each("n", [1, 2, 3, 5, 8, 31, 64, 128, 256])
def test_eigen_of_random_matrices(n: int) -> None:
    rng = np.random.default_rng(n)
    a = rng.standard_normal((n, n))
    check_eigen(a + a.T)
    x = rng.standard_normal((2 * n, n)) * 10.0 ** rng.uniform(-6, 3, n)
    check_eigen(x.T @ x)


@given(SEEDS, st.integers(2, 70), st.integers(1, 4), st.sampled_from([1e-280, 1e-6, 1.0, 1e280]))
@settings(max_examples=60, deadline=None)
def test_eigen_of_repeated_and_missing_eigenvalues(seed: int, n: int, kinds: int, scale: float) -> None:
    """Few distinct eigenvalues, including zero, at any scale."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((n, n)))
    values = rng.choice(np.r_[0.0, rng.standard_normal(kinds)], n)
    a = (q * values) @ q.T
    check_eigen(0.5 * (a + a.T) * scale)
    few = rng.standard_normal((max(1, n // 3), n))
    check_eigen(few.T @ few * scale)


def test_eigen_of_special_matrices() -> None:
    for n in (1, 7, 64):
        check_eigen(np.zeros((n, n)))
        check_eigen(np.eye(n))
        check_eigen(np.diag(np.arange(n) - 3.0))
        check_eigen(np.ones((n, n)))
        check_eigen(np.abs(np.arange(n)[:, None] - np.arange(n)[None, :]) == 1.0)
        hilbert = 1.0 / (1.0 + np.arange(n)[:, None] + np.arange(n)[None, :])
        check_eigen(hilbert)


def test_eigen_refuses() -> None:
    with pytest.raises(Refused, match="finite"):
        sketches.eigen(np.full((3, 3), np.nan))
    with pytest.raises(Refused, match=r"n: expected 1\.\.256, found 257"):
        sketches.eigen(np.zeros((257, 257)))


def stream(seed: int, n: int, d: int) -> F32:
    """Rows whose spectrum decays and whose subspace drifts, with a few outliers."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((d, d)))
    x = rng.standard_normal((n, d)) * np.exp(-rng.uniform(0.0, 0.3) * np.arange(d))
    x[n // 2 :] = x[n // 2 :] @ q.T
    x[rng.random(n) < 0.02] *= 30.0
    x[rng.random(n) < 0.05] = 0.0
    return np.asarray(x, np.float32)


def norm(a: F64) -> float:
    return float(np.linalg.norm(a, 2))


@given(SEEDS, st.integers(2, 40), st.integers(1, 24), st.integers(0, 300))
@settings(max_examples=80, deadline=None)
def test_frequent_directions_bound(seed: int, d: int, rows: int, n: int) -> None:
    """‖AᵀA − SᵀS‖ ≤ ‖A − A_r‖_F² / (ℓ − r) for every r < ℓ, and SᵀS never exceeds AᵀA."""
    x = stream(seed, n, d)
    sketch = Sketch(FREQUENT_DIRECTIONS, d, rows)
    assert sketch.absorb(x) == 0
    a, s = x.astype(np.float64), sketch.sketch_rows()
    assert len(s) <= 2 * rows
    difference = a.T @ a - s.T @ s
    total = float((a**2).sum())
    noise = 40 * EPS32 * (1 + n / rows) * total
    assert sketch.energy == pytest.approx(total, rel=1e-9)
    assert np.linalg.eigvalsh(difference)[0] >= -noise
    tail = np.r_[np.linalg.eigvalsh(a.T @ a)[::-1], np.zeros(rows)]
    for r in range(rows):
        assert norm(difference) <= tail[r:].clip(0.0).sum() / (rows - r) + noise


@given(SEEDS, st.integers(2, 30), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_frequent_directions_shrink(seed: int, d: int, rows: int) -> None:
    """Row 2ℓ + 1 causes a shrink to ℓ rows: squared singular values minus the (ℓ + 1)th, same directions."""
    x = stream(seed, 2 * rows + 1, d)
    sketch = Sketch(FREQUENT_DIRECTIONS, d, rows)
    sketch.absorb(x[:-1])
    assert np.array_equal(sketch.sketch_rows(), x[:-1])
    sketch.absorb(x[-1:])
    rows_in_use = sketch.sketch_rows()
    assert len(rows_in_use) == min(rows, d) + 1
    assert np.array_equal(rows_in_use[-1], x[-1].astype(np.float64))
    values, vectors = np.linalg.eigh(x[:-1].astype(np.float64).T @ x[:-1].astype(np.float64))
    delta = values[::-1][rows] if rows < d else 0.0
    expected = (vectors * np.maximum(values - delta, 0.0)) @ vectors.T
    assert np.abs(rows_in_use[:-1].T @ rows_in_use[:-1] - expected).max() <= 50 * EPS32 * values[-1] + 1e-30


@given(SEEDS, st.sampled_from(KINDS), st.lists(st.integers(0, 60), max_size=6), st.sampled_from([1.0, 0.99, 0.7]))
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same(seed: int, kind: int, cuts: list[int], decay: float) -> None:
    x = stream(seed, 150, 12)
    whole, parts = Sketch(kind, 12, 7, decay), Sketch(kind, 12, 7, decay)
    whole.absorb(x)
    for part in np.split(x, sorted(cuts)):
        parts.absorb(part)
    for one, other in zip(whole.top(7), parts.top(7), strict=True):
        assert np.array_equal(one, other)
    assert whole.count == parts.count == 150


@each("decay", [1.0, 0.98, 0.6])
@each("kind", [COVARIANCE, FREQUENT_DIRECTIONS])
def test_top_is_that_of_the_weighted_covariance(kind: int, decay: float) -> None:
    """FD with ℓ ≥ d loses nothing and must agree."""
    d = 16
    x = stream(5, 700, d)
    sketch = Sketch(kind, d, d, decay)
    sketch.absorb(x)
    weighted = x.astype(np.float64) * (float(np.float32(decay)) ** (0.5 * np.arange(len(x))[::-1]))[:, None]
    moment = weighted.T @ weighted
    rows, energy = sketch.top(d)
    expected = np.linalg.eigvalsh(moment)[::-1]
    assert np.abs(rows @ rows.T - np.eye(d)).max() < 1e-12
    np.testing.assert_allclose(energy, expected, atol=1e-4 * expected[0])
    np.testing.assert_allclose((rows.T * energy) @ rows, moment, atol=1e-4 * expected[0])
    assert sketch.energy == pytest.approx(float(np.trace(moment)), rel=1e-6)


@given(SEEDS, st.sampled_from(KINDS), st.integers(1, 20), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_top_is_orthonormal_and_accounts_for_all_energy(seed: int, kind: int, rows: int, n: int) -> None:
    """Also for streams with fewer directions than requested, and for empty streams."""
    d = 20
    x = stream(seed, n, d)
    x[:, 5:] = 0.0
    sketch = Sketch(kind, d, rows)
    sketch.absorb(x)
    basis, energy = sketch.top(rows)
    assert np.abs(basis @ basis.T - np.eye(rows)).max() < 1e-6
    assert np.all(energy >= 0.0) and np.all(np.diff(energy) <= 1e-6 * max(1.0, energy[0]))
    assert energy.sum() <= float((x.astype(np.float64) ** 2).sum()) * (1.2 if kind == OJA else 1.0 + 1e-4) + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_oja_converges_to_the_top_subspace(seed: int) -> None:
    d, r = 32, 6
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((d, d)))
    x = (rng.standard_normal((6000, d)) * np.r_[np.full(r, 3.0), np.full(d - r, 0.3)]) @ q.T
    sketch = Sketch(OJA, d, r, rate=0.05)
    sketch.absorb(x.astype(np.float32))
    rows, _ = sketch.top(r)
    angles = np.linalg.svd(rows @ q[:, :r], compute_uv=False)
    assert angles.min() > 0.995


def test_oja_survives_outliers() -> None:
    """Norms over eight orders of magnitude."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 16)) * 10.0 ** rng.uniform(-4, 4, (2000, 1))
    sketch = Sketch(OJA, 16, 4, rate=0.5)
    sketch.absorb(x.astype(np.float32))
    rows, energy = sketch.top(4)
    assert np.abs(rows @ rows.T - np.eye(4)).max() < 1e-6
    assert np.isfinite(energy).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_finite_are_left_out(kind: int) -> None:
    x = stream(1, 100, 8)
    bad = x.copy()
    bad[::10, 3] = [np.nan, np.inf, -np.inf, 1e20, np.nan, np.inf, 3e38, np.nan, np.inf, np.nan]
    keep = np.arange(100) % 10 != 0
    one, other = Sketch(kind, 8, 4, 0.97), Sketch(kind, 8, 4, 0.97)
    assert one.absorb(bad) == 10
    assert other.absorb(x[keep]) == 0
    assert one.count == 90
    for a, b in zip(one.top(4), other.top(4), strict=True):
        assert np.array_equal(a, b)


def test_bytes() -> None:
    assert Sketch(COVARIANCE, 64, 0).bytes == 40 + 4 * 64 * 65 // 2
    assert Sketch(FREQUENT_DIRECTIONS, 64, 16).bytes == 40 + 4 * 32 * 64
    assert Sketch(OJA, 64, 16).bytes == 40 + 4 * (16 * 64 + 16)


@each(
    ("arguments", "message"),
    [
        ((3, 8, 4), r"kind: expected 0 \(covariance\), 1 .* found 3"),
        ((0, 0, 4), r"d: expected 1\.\.256, found 0"),
        ((0, 257, 4), r"d: expected 1\.\.256, found 257"),
        ((1, 8, 0), r"rows: expected 1\.\.1024, found 0"),
        ((2, 8, 9), r"rows: expected 1\.\.8, found 9"),
        ((1, 8, 4, 0.0), r"decay: expected 0\.5\.\.1 per token, found 0"),
        ((1, 8, 4, float("nan")), r"decay: expected 0\.5\.\.1 per token, found -?nan"),
        ((2, 8, 4, 1.0, 1.0), r"rate: expected above 0 and below 1, found 1"),
    ],
)
def test_bad_parameters(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(Refused, match="sketch: " + message):
        Sketch(*arguments)  # type: ignore[arg-type]


def test_more_directions_than_rows() -> None:
    with pytest.raises(Refused, match=r"r: expected 1\.\.4 \(a sketch of 4 rows of 8\), found 5"):
        Sketch(FREQUENT_DIRECTIONS, 8, 4).top(5)
    with pytest.raises(Refused, match=r"r: expected 1\.\.8"):
        Sketch(COVARIANCE, 8, 4).top(9)
