"""gamma: least squares on samples, the estimate from moments, the formulas, and when each is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calib_synthetic import draw, random_layer, with_key_means
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from subkv.format.bases import Bands, StoredBasis
from subkv.format.calibration import LayerStats
from subkv.format.codec import round_trip
from subkv.plan.basis import centred_moment, fit_metric, fit_pca, gains, half, store
from subkv.plan.gamma import gamma_of, moment_gamma, sampled_gamma


def stored_basis(stats: LayerStats, head: int, bands: Bands, aware: bool = True) -> StoredBasis:
    fit = fit_metric if aware else fit_pca
    return store(fit(stats.k2[head], stats.q2[head]), stats.k2[head], bands)


@given(st.integers(0, 10**6), st.sampled_from([((8, 3),), ((8, 8), (16, 4)), ((32, 2),), ((32, 8),)]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_sampled_gamma_is_the_least_squares_factor(seed: int, bands: Bands, aware: bool) -> None:
    stats = random_layer(0, seed)
    head = 1
    stored = stored_basis(stats, head, bands, aware)
    gamma = sampled_gamma(stats, head, stored)
    keys = stats.ks[:, head].astype(np.float64)
    c = (stats.ks[:, head].astype(np.float32) @ stored.encode.astype(np.float32).T).astype(np.float32)
    decoder = stored.decode.astype(np.float64) * gains(bands)[:, None]  # the shrinking of quantizers is not corrected
    decoded = round_trip(c, bands, stored.ratio) @ decoder
    queries = np.concatenate([stats.qs[:, 2], stats.qs[:, 3]]).astype(np.float64)  # the group of head 1
    exact, approximate = queries @ keys.T, queries @ decoded.T

    def loss(g: float) -> float:
        return float(np.sum((exact - g * approximate) ** 2))

    if gamma is None:
        assert np.sum(exact * approximate) <= 1e-3 * np.sum(approximate**2)
        return
    assert loss(gamma) <= min(
        loss(gamma * 1.001), loss(gamma * 0.999), loss(1.0), loss(np.sqrt(len(stored.encode) / 32))
    )


@each("bands", [((32, 8),), ((32, 2),), ((8, 4), (8, 2)), ((16, 8),)])
@each("aware", [True, False])
def test_moment_gamma_agrees_with_many_samples(bands: Bands, aware: bool) -> None:
    stats = random_layer(0, seed=3)
    rng = np.random.default_rng(0)
    stored = stored_basis(stats, 0, bands, aware)
    keys = draw(rng, stats.k2[0], 3000)[:, None].repeat(2, axis=1)
    queries = draw(rng, stats.q2[0], 1500)[:, None].repeat(4, axis=1)
    many = replace(stats, ks=keys.astype(np.float16), vs=keys.astype(np.float16), qs=queries.astype(np.float16))
    sampled = sampled_gamma(many, 0, stored)
    estimated = moment_gamma(stats.k2[0], stats.q2[0], stored)
    assert sampled is not None
    assert estimated == pytest.approx(sampled, rel=0.05)


@pytest.mark.parametrize("bands", [((32, 8),), ((32, 2),), ((16, 8),)])
def test_subtracting_a_mean_does_not_change_gamma(bands: Bands) -> None:
    """Estimates use the centred part: subtracting the mean of far keys gives the estimates of keys around 0."""
    plain = random_layer(0, seed=6)
    far = with_key_means(plain, 3.0)
    mean = half(far.k1[0], "mean")
    moment = centred_moment(far.k2[0], far.k1[0], mean)
    np.testing.assert_allclose(moment, plain.k2[0], atol=1e-2 * np.trace(plain.k2[0]))
    stored = store(fit_metric(moment, far.q2[0]), moment, bands, mean)
    around_zero = stored_basis(plain, 0, bands)
    for stats, basis, other in ((far, stored, around_zero),):
        found, expected = sampled_gamma(stats, 0, basis), sampled_gamma(plain, 0, other)
        assert found == pytest.approx(expected, rel=0.03)
        bare, bare_plain = replace(stats, ks=stats.ks[:0], qs=stats.qs[:0]), replace(plain, qs=plain.qs[:0])
        assert gamma_of("calibrated", bare, 0, basis, moment)[0] == pytest.approx(
            gamma_of("calibrated", bare_plain, 0, other, plain.k2[0])[0], rel=0.01
        )


def test_exact_codes_give_one() -> None:
    stats = random_layer(0, seed=1)
    stored = stored_basis(stats, 0, ((32, 16),))
    assert sampled_gamma(stats, 0, stored) == pytest.approx(1.0, abs=2e-3)
    assert moment_gamma(stats.k2[0], stats.q2[0], stored) == pytest.approx(1.0, abs=2e-3)


def test_methods_and_their_sources() -> None:
    stats, bare = random_layer(0, seed=2), random_layer(0, seed=2, samples=0)
    stored = stored_basis(stats, 0, ((16, 4),))
    assert gamma_of("sqrt", stats, 0, stored, stats.k2[0]) == (pytest.approx(np.sqrt(16 / 32)), "formula")
    assert gamma_of("one", stats, 0, stored, stats.k2[0]) == (1.0, "formula")
    assert gamma_of("calibrated", stats, 0, stored, stats.k2[0])[1] == "samples"
    assert gamma_of("calibrated", bare, 0, stored, bare.k2[0])[1] == "moments"
    silent = replace(bare, q2=np.zeros_like(bare.q2))
    assert gamma_of("calibrated", silent, 0, stored, silent.k2[0]) == (1.0, "none")


def test_samples_without_energy_fall_to_the_moments() -> None:
    stats = random_layer(0, seed=4)
    stored = stored_basis(stats, 0, ((16, 4),))
    dark = replace(stats, qs=np.zeros_like(stats.qs))
    assert sampled_gamma(dark, 0, stored) is None
    assert gamma_of("calibrated", dark, 0, stored, dark.k2[0])[1] == "moments"
