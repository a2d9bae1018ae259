"""The rate-distortion bound of the measured statistics, in the planner's metric: no code of single rows is better.

For a Gaussian row of covariance Σ whose error e costs eᵀ M e, the least cost at a rate of R bits is that of reverse
water-filling on the eigenvalues λ of M^½ Σ M^½: Σ min(λ, θ) for R = ½ Σ log₂ max(λ/θ, 1). K and V of all heads and
layers share one water level θ, since their costs add up. Rows that are not Gaussian, or that are coded with knowledge
of their position or of other rows, can do better.
"""

from __future__ import annotations

import numpy as np

from subkv.format.arrays import F64
from subkv.plan import latent
from subkv.plan.pipeline import Fit


def _spectrum(covariance: F64, cost: F64) -> F64:
    """Eigenvalues of M^½ Σ M^½ for heads [n, d, d], all in one row."""
    values, vectors = np.linalg.eigh(cost)
    root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    return np.maximum(np.linalg.eigvalsh(root.swapaxes(1, 2) @ covariance @ root), 0.0).ravel()


def spectrum(fit: Fit) -> F64:
    """The cost of every coefficient of the model if it is not coded at all, nats of KLD per token."""
    parts = []
    for stats, layer in zip(fit.calibration.layers, fit.layers, strict=True):
        if isinstance(layer, latent.Fitted):
            parts += [_spectrum(m[None], cost[None]) for m, cost in zip(layer.moments, layer.costs, strict=True)]
            continue
        for moment, mean, cost in ((stats.k2, stats.k1, layer.cost.k), (stats.v2, stats.v1, layer.cost.v)):
            parts.append(_spectrum(moment - mean[:, :, None] * mean[:, None, :], cost))
    return np.concatenate(parts)


def rate(importance: F64, cost: float) -> float:
    """Bits per coefficient that reverse water-filling needs for this cost; 0 where nothing needs to be coded."""
    descending = np.sort(importance)[::-1]
    if cost >= descending.sum():
        return 0.0
    # the n largest are coded: cost = n·θ + the sum of the others, θ between the n-th and the next
    rest = descending.sum() - np.cumsum(descending)
    levels = (cost - rest) / np.arange(1, len(descending) + 1)
    following = np.append(descending[1:], 0.0)
    n = int(np.argmax((levels > 0) & (levels >= following)))
    return float(0.5 * np.log2(descending[: n + 1] / levels[n]).sum() / len(descending))


def bound_bits(fit: Fit, kld: float) -> float | None:
    """Bits per K/V element at which the bound has this predicted KLD, with the exact window of `fit`; no bases.

    None where costs are not measured in nats.
    """
    if fit.calibration.sensitivity is None or kld <= 0.0:
        return None
    return rate(spectrum(fit), kld / fit.correction(fit.near)) + fit.overhead.window_bits(fit.heads)
