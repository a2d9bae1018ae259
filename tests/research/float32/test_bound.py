"""The rate-distortion bound: closed forms, and codes that must stay above it."""

from __future__ import annotations

import numpy as np
import pytest

from research.float32.bound import _spectrum, rate
from subkv.plan.quantizer import distortion


def test_equal_coefficients() -> None:
    """D = σ² 2^(−2R) for each of them."""
    for bits in (0.5, 2.0, 7.0):
        assert rate(np.full(40, 3.0), 40 * 3.0 * 4.0**-bits) == pytest.approx(bits)


def test_water_filling() -> None:
    """Any level θ is recovered; coefficients below it are not coded."""
    importance = np.random.default_rng(0).exponential(1.0, 200)
    for level in (0.01, 0.3, 2.0):
        bits = 0.5 * np.log2(np.maximum(importance / level, 1.0)).mean()
        assert rate(importance, np.minimum(importance, level).sum()) == pytest.approx(bits)
    assert rate(importance, importance.sum()) == 0.0
    assert rate(np.append(importance, np.zeros(9)), 1e-3) > 0.0


@pytest.mark.parametrize(("bits", "known"), [(2, 0.1188), (3, 0.03744), (4, 0.01154)])
def test_quantizers_stay_above(bits: int, known: float) -> None:
    """Of fixed rate on Gaussians: the uniform one, with Max's distortions of 1960, and a path through a trellis."""
    gaps = [bits - rate(np.ones(8), 8 * error) for error in (known, distortion(bits))]
    assert gaps[0] == pytest.approx(bits + 0.5 * np.log2(known), abs=1e-3)
    assert 0.2 < gaps[1] < gaps[0] - 0.2


def test_spectrum_is_that_of_the_metric() -> None:
    """Eigenvalues of M Σ, head by head; a metric that sees one direction leaves one."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 6, 20))
    covariance, m = x @ x.swapaxes(1, 2), rng.standard_normal((2, 6, 9))
    metric = m @ m.swapaxes(1, 2)
    expected = np.concatenate([np.linalg.eigvals(a @ b).real for a, b in zip(metric, covariance, strict=True)])
    np.testing.assert_allclose(np.sort(_spectrum(covariance, metric)), np.sort(expected), rtol=1e-8)
    one = np.zeros((1, 6, 6))
    one[0, 0, 0] = 2.0
    np.testing.assert_allclose(np.sort(_spectrum(covariance[:1], one))[-2:], [0, 2 * covariance[0, 0, 0]], atol=1e-9)
