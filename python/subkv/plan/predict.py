"""Predicted cost of a layout: the real codec on sampled rows, each error priced by the layers' cost matrices.

KLD ≈ Σ over layers and heads of E eᵀ M e, e = x − x̂ of a stored key or value, M = half its sensitivity (costs.py):
second order in e, errors of different heads and tokens taken as independent. Without sensitivities the sum has no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from subkv.format import codec
from subkv.format.arrays import F32, F64
from subkv.format.bases import CodedLayer, StoredBasis
from subkv.format.calibration import Calibration
from subkv.plan import stock
from subkv.plan.costs import LayerCost


def _cost(rows: F64, seen: F64, matrix: F64) -> float:
    """Mean eᵀ M e of rows [n, d]."""
    error = rows - seen
    return float(np.einsum("ni,ij,nj->", error, matrix, error)) / len(rows)


def reconstructed(x: F32, stored: StoredBasis, gamma: float = 1.0) -> F32:
    """What attention sees of rows x [n, d] kept in this basis: γ Dᵀ ĉ + μ, gamma being that of keys."""
    coefficients = codec.round_trip(stored.coefficients(x), stored.bands, stored.ratio)
    seen: F32 = np.float32(gamma) * (coefficients @ stored.decode.astype(np.float32))
    return seen + stored.mean.astype(np.float32)


def _sum(
    calibration: Calibration,
    costs: Sequence[LayerCost],
    seen: Callable[[int, int, F32, F32], tuple[F32, F32]],
) -> float | None:
    if not all(stats.has_samples for stats in calibration.layers):
        return None
    total = 0.0
    for i, (stats, cost) in enumerate(zip(calibration.layers, costs, strict=True)):
        for h in range(stats.shape.n_head_kv):
            k, v = stats.ks[:, h].astype(np.float32), stats.vs[:, h].astype(np.float32)
            k_seen, v_seen = seen(i, h, k, v)
            total += _cost(k.astype(np.float64), k_seen.astype(np.float64), cost.k[h])
            total += _cost(v.astype(np.float64), v_seen.astype(np.float64), cost.v[h])
    return total


def layout_error(calibration: Calibration, costs: Sequence[LayerCost], layers: Sequence[CodedLayer]) -> float | None:
    """Cost per token of coded layers; None without samples. costs: parallel to calibration.layers."""

    def seen(i: int, h: int, k: F32, v: F32) -> tuple[F32, F32]:
        head = layers[i].heads[h]
        return reconstructed(k, head.k, head.gamma), reconstructed(v, head.v)

    return _sum(calibration, costs, seen)


def stock_error(calibration: Calibration, costs: Sequence[LayerCost], kind: str) -> float | None:
    """The same for one of llama.cpp's types; None also where llama.cpp cannot quantize a layer's head size."""
    shapes = [layer.shape for layer in calibration.layers]
    if not all(stock.fits(shape.d_k) and stock.fits(shape.d_v) for shape in shapes):
        return None

    def seen(i: int, h: int, k: F32, v: F32) -> tuple[F32, F32]:
        return stock.round_trip(kind, k, keys=True), stock.round_trip(kind, v, keys=False)

    return _sum(calibration, costs, seen)
