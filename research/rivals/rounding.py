"""Scalar quantizers that several codecs share."""

from __future__ import annotations

import numpy as np

from subkv.format.arrays import F32


def half(x: F32) -> F32:
    """As stored in half precision."""
    return x.astype(np.float16).astype(np.float32)


def min_max(x: F32, bits: int, axis: int) -> F32:
    """Round to nearest between minimum and maximum along an axis: 2^bits levels, scale and minimum in half precision.

    Costs 32 bits per row besides the codes.
    """
    low, levels = half(x.min(axis, keepdims=True)), 2**bits - 1
    scale = half((x.max(axis, keepdims=True) - low) / np.float32(levels))
    codes = np.rint(np.divide(x - low, scale, out=np.zeros_like(x), where=scale > 0))
    decoded: F32 = np.clip(codes, 0, levels) * scale + low
    return decoded


def nearest(x: F32, centroids: F32) -> F32:
    """The nearest of ascending centroids [m] for every element."""
    decoded: F32 = centroids[np.searchsorted(0.5 * (centroids[1:] + centroids[:-1]), x)]
    return decoded
