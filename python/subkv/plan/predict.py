"""Predicts the cost of a layout: encodes sampled rows and weights their errors with the layers' cost matrices.

KLD ≈ Σ over layers and heads of E eᵀ M e, e = x − x̂ of a stored key or value, M = half its sensitivity (costs.py):
second order in e; errors of different heads and tokens are assumed independent. Without sensitivities it has no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from subkv.format import codec
from subkv.format.arrays import F16, F32
from subkv.format.bases import CodedLayer, StoredBasis
from subkv.format.calibration import Calibration
from subkv.format.recent import rounded
from subkv.plan import stock
from subkv.plan.costs import LayerCost


def reconstructed(x: F32, stored: StoredBasis, gamma: float = 1.0) -> F32:
    """Encode and reconstruct rows x [n, d]: γ Dᵀ ĉ + μ; gamma: of keys."""
    coefficients = codec.round_trip(stored.coefficients(x), stored.bands, stored.ratio)
    return np.float32(gamma) * (coefficients @ stored.decode.astype(np.float32)) + stored.mean.astype(np.float32)


def _sum(
    calibration: Calibration, costs: Sequence[LayerCost], stored: Callable[[int, int, str, F32], F32]
) -> float | None:
    """Sum of all costs per token; None without samples.

    stored: maps a layer's index, a head, "k" or "v", and rows [n, d] to the rows after storing.
    """
    if not all(stats.has_samples for stats in calibration.layers):
        return None
    total = 0.0
    for i, (stats, cost) in enumerate(zip(calibration.layers, costs, strict=True)):
        for h in range(stats.shape.n_head_kv):
            for side, rows, matrices in (("k", stats.ks, cost.k), ("v", stats.vs, cost.v)):
                x = rows[:, h].astype(np.float32)
                error = x.astype(np.float64) - stored(i, h, side, x).astype(np.float64)
                total += float(np.sum((error @ matrices[h]) * error)) / len(x)
    return total


def layout_error(calibration: Calibration, costs: Sequence[LayerCost], layers: Sequence[CodedLayer]) -> float | None:
    """Cost per token of coded layers; None without samples. costs: parallel to calibration.layers."""

    def stored(i: int, h: int, side: str, x: F32) -> F32:
        head = layers[i].heads[h]
        if layers[i].latent:  # one row for both
            row = calibration.layers[i].ks[:, h].astype(np.float32)
            return reconstructed(row, head.k, head.gamma if side == "k" else 1.0)[:, : x.shape[1]]
        return reconstructed(x, head.k, head.gamma) if side == "k" else reconstructed(x, head.v)

    return _sum(calibration, costs, stored)


def recent_error(calibration: Calibration, costs: Sequence[LayerCost], means: Sequence[F16]) -> float | None:
    """Cost per token of recent rows as integers (FORMAT.md §3.2); None without samples.

    costs: near_cost() of every layer. means: [n_head_kv, d_k] per layer, subtracted from keys.
    """

    def stored(i: int, h: int, side: str, x: F32) -> F32:
        return rounded(x, means[i][h] if side == "k" else np.zeros(x.shape[1], np.float16))

    return _sum(calibration, costs, stored)


def stock_error(calibration: Calibration, costs: Sequence[LayerCost], kind: str, latent: bool = False) -> float | None:
    """Cost per token of a cache type of llama.cpp; None without samples, or if a layer's head size does not fit it.

    latent: the model's values are the first elements of its keys.
    """
    shapes = [layer.shape for layer in calibration.layers]
    if not all(stock.fits(shape.d_k) and stock.fits(shape.d_v) for shape in shapes):
        return None
    return _sum(calibration, costs, lambda _i, _h, side, x: stock.round_trip(kind, x, side == "k", latent))
