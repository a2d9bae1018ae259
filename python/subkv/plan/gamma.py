"""The logit factor gamma of a head's key basis.

gamma multiplies every approximate logit ℓ̂ = s·(D q)·ĉ. `calibrated` minimises E (ℓ − γ ℓ̂)², so γ = Σ ℓ ℓ̂ / Σ ℓ̂². If a
mean μ is subtracted from keys, ℓ is the logit minus s·q·μ, which is added exactly.
"""

from __future__ import annotations

import math

import numpy as np

from subkv.format.arrays import F64
from subkv.format.bases import StoredBasis
from subkv.format.calibration import LayerStats
from subkv.format.codec import round_trip
from subkv.plan.basis import gains


def sqrt_gamma(rank: int, d: int) -> float:
    """√(r/d), the default of the paper on static bases."""
    return math.sqrt(rank / d)


def sampled_gamma(stats: LayerStats, head: int, stored: StoredBasis) -> float | None:
    """Least squares over all pairs of sampled queries and encoded keys.

    Keys [n_key, d] and the group's queries [n_query·n_group, d] come from held-out text; keys precede the queries of
    their chunk. Returns None if there are no samples, all approximate logits are zero, or gamma is not positive.
    """
    if not stats.has_samples:
        return None
    group = stats.shape.n_group
    keys = stats.ks[:, head].astype(np.float32)
    queries = stats.qs[:, head * group : (head + 1) * group].reshape(-1, stats.shape.d_k).astype(np.float64)
    decoded = round_trip(stored.coefficients(keys), stored.bands, stored.ratio).astype(np.float64)
    exact = queries @ (keys.astype(np.float64) - stored.mean.astype(np.float64)).T
    approximate = queries @ _least_squares_decoder(stored).T @ decoded.T
    return _ratio(float(np.sum(exact * approximate)), float(np.sum(approximate**2)))


def moment_gamma(key_moment: F64, query_moment: F64, stored: StoredBasis) -> float | None:
    """Least squares from second moments [d, d], assuming independent keys and queries and Gaussian coefficients.

    The best uniform quantizer of relative distortion δ acts like the gain 1 − δ and independent noise of variance
    δ(1 − δ)·E c². key_moment: of the keys minus the stored mean. Returns None as sampled_gamma().
    """
    encode, decode = stored.encode.astype(np.float64), _least_squares_decoder(stored)
    gain = gains(stored.bands)
    delta = 1.0 - gain
    covariance = encode @ key_moment @ encode.T
    projected = decode @ query_moment @ decode.T
    cross = float(np.sum(decode @ query_moment * ((gain[:, None] * encode) @ key_moment)))
    noisy = gain[:, None] * covariance * gain[None, :] + np.diag(delta * gain * np.diag(covariance))
    return _ratio(cross, float(np.sum(projected * noisy)))


def _least_squares_decoder(stored: StoredBasis) -> F64:
    """D [r, d] before division by the quantizers' gains."""
    return np.asarray(stored.decode.astype(np.float64) * gains(stored.bands)[:, None])


def _ratio(cross: float, power: float) -> float | None:
    if not (math.isfinite(cross) and math.isfinite(power)) or power <= 0.0:
        return None
    gamma = cross / power
    return gamma if gamma > 1e-3 else None


def gamma_of(method: str, stats: LayerStats, head: int, stored: StoredBasis, key_moment: F64) -> tuple[float, str]:
    """gamma of one head and its source: `samples`, `moments`, `formula`, or `none` (gamma is 1).

    method: one of GAMMAS; calibrated uses the samples, or else the moments. key_moment: [d, d], of the keys minus the
    stored mean.
    """
    rank, d = stored.encode.shape
    if method == "sqrt":
        return sqrt_gamma(rank, d), "formula"
    if method == "one":
        return 1.0, "formula"
    sampled = sampled_gamma(stats, head, stored)
    if sampled is not None:
        return sampled, "samples"
    estimated = moment_gamma(key_moment, stats.q2[head], stored)
    if estimated is not None:
        return estimated, "moments"
    return 1.0, "none"
