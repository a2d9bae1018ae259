"""The quantizers of FORMAT.md on a unit Gaussian: distortion and best step per width.

A band of b bits without a path decodes u in [0, 2^b − 1] to step·(u − (2^b − 1)/2): a mid-rise quantizer with 2^b
levels. Its best step is also the ratio of a band with a path, whose steps are defined relative to it. All values are
for variance 1; distortion scales with the variance, the step with the standard deviation.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from subkv.format.arrays import F64
from subkv.native import library

WIDTHS = (2, 3, 4, 5, 6, 8, 16)  # bits of a band, FORMAT.md §2 (widths.h; a test compares them)
CODED_WIDTHS = WIDTHS[:-1]  # those with integer codes

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gaussian_distortion(bits: int, step: F64 | float) -> F64:
    """E (x − x̂)² of a unit Gaussian under the 2^bits-level uniform quantizer with the given step(s).

    step: any shape, > 0; returns the same shape. Exact integrals over the cells: with density φ and cell (a, b)
    around level y, ∫ (x − y)² φ = (1 + y²)(Φ(b) − Φ(a)) − (bφ(b) − aφ(a)) − 2y(φ(a) − φ(b)).
    """
    steps = np.asarray(step, dtype=np.float64)
    half = 2 ** (bits - 1)
    # positive half only: both halves cost the same
    level = (np.arange(half) + 0.5) * steps[..., None]
    lower = np.arange(half) * steps[..., None]
    upper = lower + steps[..., None]
    upper[..., -1] = np.inf

    def density(x: F64) -> F64:
        return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)

    def moment(x: F64) -> F64:  # x·φ(x), 0 at infinity
        return np.where(np.isfinite(x), x, 0.0) * density(x)

    mass = 0.5 * (_erf(upper / math.sqrt(2.0)) - _erf(lower / math.sqrt(2.0)))
    cell = (1.0 + level**2) * mass - (moment(upper) - moment(lower)) - 2.0 * level * (density(lower) - density(upper))
    total: F64 = 2.0 * cell.sum(axis=-1)
    return total


@functools.cache
def _quantizers() -> dict[int, tuple[float, float]]:
    """Width in bits -> (best step, distortion), from the library (runtime/native/bases/quantizer.h)."""
    return {int(bits): (step, error) for bits, (step, error) in library.constants()["quantizers"].items()}


def best_step(bits: int) -> float:
    """The step that minimises gaussian_distortion. bits: of CODED_WIDTHS."""
    return _quantizers()[bits][0]


def distortion(bits: int) -> float:
    """The relative distortion E (x − x̂)² / E x² of a Gaussian at the best step; 1 for a coefficient that is dropped.

    bits: 0 (dropped) or one of WIDTHS.
    """
    return _quantizers()[bits][1] if bits else 1.0


@functools.cache
def _curve(bits: int) -> tuple[F64, F64]:
    """log step and log distortion of a unit Gaussian, on a grid fine enough for linear interpolation to 1e-3."""
    log_step = np.linspace(math.log(2.0**-12), math.log(2.0**6), 18 * 24 + 1)
    return log_step, np.log(gaussian_distortion(bits, np.exp(log_step)))


def shared_step(bits: int, variance: F64) -> tuple[float, float]:
    """Best single step for independent Gaussian coefficients of unequal variance.

    variance: [n], >= 0, not all zero. Returns (step, Σ expected squared error).
    """
    live = variance[variance > 0.0]
    scale = math.sqrt(float(live.mean()))
    grid, curve = _curve(bits)
    # candidate steps relative to the band's rms, 2% apart over a range that holds the optimum of every width
    candidate = np.log(best_step(bits)) + np.linspace(-1.0, 2.5, 176)
    relative = candidate[:, None] - 0.5 * np.log(live / scale**2)[None, :]
    error = (live[None, :] * np.exp(np.interp(relative, grid, curve))).sum(axis=1)
    best = int(np.argmin(error))
    return scale * math.exp(float(candidate[best])), float(error[best])
