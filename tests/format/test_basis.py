"""Bases: quantizer constants, full-rank reconstruction, optimality of the metric bases, mixing, storing."""

from __future__ import annotations

import numpy as np
import pytest
from calib_synthetic import draw, random_moment
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from subkv.base.errors import SubkvError
from subkv.format.bases import StoredBasis
from subkv.format.calibration import MAX_HEAD_SIZE
from subkv.format.codec import round_trip
from subkv.plan.basis import (
    F64,
    N_HALVES,
    band_step,
    fit_metric,
    fit_pca,
    gains,
    half,
    in_bytes,
    mixing_matrix,
    store,
)
from subkv.plan.hadamard import spreading
from subkv.plan.quantizer import CODED_WIDTHS, best_step, distortion, gaussian_distortion, shared_step

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.sampled_from([8, 16, 24, 64, 80])
APART = (184, 232, 344, 376, 472, 520, 536)  # orders of no Hadamard matrix that hadamard.py makes


def expected_error(stored: StoredBasis, moment: F64, metric: F64) -> float:
    """Metric error of the unquantized projection: tr(M R Σ Rᵀ), R = I − Dᵀ E, D before it was divided by the gains."""
    decode = stored.decode.astype(np.float64) * gains(stored.bands)[:, None]
    lost = np.eye(len(moment)) - decode.T @ stored.encode.astype(np.float64)
    return float(np.trace(metric @ lost @ moment @ lost.T))


@each(
    ("bits", "step", "error"),
    [
        (2, 0.9957, 0.11885),
        (3, 0.5860, 0.03744),
        (4, 0.3352, 0.01154),
        (5, 0.1881, 0.003495),
        (6, 0.1041, 0.001040),
        (8, 0.0308, 0.0000877),
    ],
)
def test_quantizer_matches_published_optima(bits: int, step: float, error: float) -> None:
    """Max, Quantizing for minimum distortion (1960), table of uniform quantizers."""
    assert best_step(bits) == pytest.approx(step, rel=2e-3)
    best = gaussian_distortion(bits, best_step(bits))
    assert float(best) == pytest.approx(error, rel=2e-3)
    assert (gaussian_distortion(bits, best_step(bits) * np.array([1.0 - 1e-4, 1.0 + 1e-4])) >= best).all()


@each("bits", CODED_WIDTHS)
def test_distortion_agrees_with_sampling(bits: int) -> None:
    x = np.random.default_rng(bits).standard_normal(200_000)
    for step in (0.5 * best_step(bits), best_step(bits), 2.0 * best_step(bits)):
        half_range = 0.5 * (2**bits - 1)
        code = np.clip(np.rint(x / step + half_range), 0, 2**bits - 1)
        measured = np.mean((x - step * (code - half_range)) ** 2)
        assert float(gaussian_distortion(bits, step)) == pytest.approx(measured, rel=0.1)


@given(SEEDS, st.sampled_from(CODED_WIDTHS))
@settings(max_examples=30, deadline=None)
def test_shared_step_is_a_minimum(seed: int, bits: int) -> None:
    variance = np.random.default_rng(seed).uniform(0.01, 1.0, 16)
    step, error = shared_step(bits, variance)

    def cost(s: float) -> float:
        return float(np.sum(variance * gaussian_distortion(bits, s / np.sqrt(variance))))

    assert error == pytest.approx(cost(step), rel=5e-3)
    assert cost(step) <= 1.005 * min(cost(0.9 * step), cost(1.1 * step))


@each("n", [1, 2, 8, 24, 40, 64, 120, 256])
def test_mixing_is_orthonormal(n: int) -> None:
    matrix = mixing_matrix(n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)


@each("n", range(8, MAX_HEAD_SIZE + 1, 8))
def test_spreading_is_orthonormal_and_in_bytes(n: int) -> None:
    """Whichever construction has this order; its inverse, too, is halves times bytes."""
    matrix = spreading(n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    assert n in APART or np.ptp(np.abs(matrix)) == 0.0
    for row in half(np.linalg.inv(in_bytes(matrix)).T, "D"):
        assert len(np.unique(np.abs(row[row != 0]))) == 1


def test_mixing_is_chosen_for_unequal_variances_only() -> None:
    assert band_step(4, np.array([8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.1]))[1]
    for bits in CODED_WIDTHS:
        assert band_step(bits, np.full(8, 4.0)) == (pytest.approx(2 * best_step(bits)), False)


@given(SEEDS, SIZES)
@settings(max_examples=40, deadline=None)
def test_fitted_bases_reconstruct_and_order(seed: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    moment, metric = random_moment(rng, d), random_moment(rng, d)
    for basis in (fit_pca(moment, metric), fit_metric(moment, metric)):
        assert basis.encode.shape == basis.decode.shape == (d, d)
        np.testing.assert_allclose(basis.decode.T @ basis.encode, np.eye(d), atol=1e-8)
        covariance = basis.encode @ moment @ basis.encode.T
        np.testing.assert_allclose(covariance, np.diag(basis.variance), atol=1e-8 * basis.variance[0])
        assert (np.diff(basis.variance) <= 1e-9 * basis.variance[0]).all()
    aware = fit_metric(moment, metric)
    assert np.sqrt(np.mean(aware.encode**2)) == pytest.approx(1.0)
    np.testing.assert_allclose(
        np.diag(aware.decode @ metric @ aware.decode.T) * aware.variance, aware.importance, rtol=0.1
    )


@given(SEEDS, SIZES, st.floats(0.1, 1.0))
@settings(max_examples=60, deadline=None)
def test_metric_basis_beats_pca_at_every_rank(seed: int, d: int, share: float) -> None:
    """Expected logit (output) error of the truncated projection, both decoders at their best."""
    rng = np.random.default_rng(seed)
    moment, metric = random_moment(rng, d), random_moment(rng, d)
    bands = ((max(8, int(share * d) // 8 * 8), 16),)
    aware = expected_error(store(fit_metric(moment, metric), moment, bands), moment, metric)
    plain = expected_error(store(fit_pca(moment, metric), moment, bands), moment, metric)
    floor = 1e-4 * float(np.trace(metric @ moment))  # half precision of E and D
    assert aware <= plain * (1 + 1e-3) + floor


@given(SEEDS, SIZES)
@settings(max_examples=40, deadline=None)
def test_truncation_error_is_the_dropped_importance(seed: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    moment, metric = random_moment(rng, d), random_moment(rng, d)
    basis = fit_metric(moment, metric, ridge=0.0)
    rank = max(8, d // 2 // 8 * 8)
    error = expected_error(store(basis, moment, ((rank, 16),)), moment, metric)
    assert error == pytest.approx(basis.importance[rank:].sum(), rel=0.02, abs=1e-4 * basis.importance.sum())


@given(SEEDS, st.sampled_from([(64, 8), (64, 4), (40, 6)]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_stored_shapes_ratio_and_full_rank_inverse(seed: int, band: tuple[int, int], aware: bool) -> None:
    rng = np.random.default_rng(seed)
    d = 64
    moment, metric = random_moment(rng, d), random_moment(rng, d)
    bands = ((8, 8), band) if band[0] < d else (band,)
    stored = store((fit_metric if aware else fit_pca)(moment, metric), moment, bands)
    rank = sum(n for n, _ in bands)
    assert stored.encode.shape == stored.decode.shape == (rank, d)
    assert stored.encode.dtype == stored.decode.dtype == np.float16
    assert stored.ratio.dtype == np.float32
    assert stored.ratio.max() == pytest.approx(1.0)
    assert (stored.ratio > 0).all()
    product = stored.encode.astype(np.float64) @ stored.decode.astype(np.float64).T * gains(bands)
    # E·Dᵀ = I up to the rounding of D: an ulp of D times E's row, summed over d
    bound = 2.0**-11 * np.abs(stored.encode.astype(np.float64)) @ np.abs(stored.decode.astype(np.float64)).T
    assert (np.abs(product - np.eye(rank)) <= bound + 1e-6).all()


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_quantized_error_is_near_the_plan(seed: int) -> None:
    """Gaussian rows through the codec: the metric error is within 1.5 times the planner's estimate for the bands."""
    rng = np.random.default_rng(seed)
    d, bands = 64, ((8, 8), (16, 5), (24, 4), (16, 2))
    moment, metric = random_moment(rng, d, decay=5.0), random_moment(rng, d)
    basis = fit_metric(moment, metric)
    stored = store(basis, moment, bands)
    x = draw(rng, moment, 400)
    c = (x @ stored.encode.astype(np.float64).T).astype(np.float32)
    lost = x - round_trip(c, bands, stored.ratio).astype(np.float64) @ stored.decode.astype(np.float64)
    measured = np.einsum("td,de,te->t", lost, metric, lost).mean()
    split = np.cumsum([0] + [n for n, _ in bands])
    expected = sum(
        basis.importance[a:b].sum() * distortion(bits)
        for (_, bits), a, b in zip(bands, split[:-1], split[1:], strict=True)
    )
    assert 0.3 * expected < measured < 1.5 * expected


def test_degenerate_statistics_give_finite_bases() -> None:
    d = 16
    zero, one = np.zeros((d, d)), np.zeros((d, d))
    one[0, 0] = 1.0
    for moment in (zero, one):
        for metric in (zero, one, np.eye(d)):
            for fit in (fit_pca, fit_metric):
                for bands in (((16, 4),), ((8, 8),), ((8, 8), (8, 2))):
                    stored = store(fit(moment, metric), moment, bands)
                    assert np.isfinite(stored.encode).all()
                    assert np.isfinite(stored.decode).all()
                    assert (stored.ratio > 0).all()
    narrow = store(fit_metric(zero, zero), zero, ((16, 4),), narrow=True)
    assert np.isfinite(narrow.decode).all()


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_decoders_in_bytes(seed: int) -> None:
    """Rows behind the first are whole multiples of a step, with errors that cost less than rounding alone."""
    rng = np.random.default_rng(seed)
    d, bands = 64, ((8, 8), (24, 4), (32, 2))
    moment, metric = random_moment(rng, d, decay=5.0), random_moment(rng, d)
    basis = fit_metric(moment, metric)
    wide, narrow = store(basis, moment, bands), store(basis, moment, bands, narrow=True)
    exact, found = wide.decode.astype(np.float64), narrow.decode.astype(np.float64)
    assert np.array_equal(narrow.encode, wide.encode) and np.array_equal(found[:N_HALVES], exact[:N_HALVES])
    np.testing.assert_array_equal(in_bytes(found[N_HALVES:]), found[N_HALVES:])

    def cost(decode: F64) -> float:
        return float(np.einsum("id,de,ie->", decode - exact, metric, decode - exact))

    plain = np.concatenate([exact[:N_HALVES], in_bytes(exact[N_HALVES:])])
    assert cost(found) < cost(plain)
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)


def test_values_beyond_half_precision_are_refused() -> None:
    basis = fit_pca(np.eye(8), np.eye(8))
    huge = type(basis)(1e6 * basis.encode, basis.decode / 1e6, basis.variance, basis.importance)
    with pytest.raises(SubkvError, match=r"^basis E: expected values within half precision, found "):
        store(huge, np.eye(8), ((8, 4),))
