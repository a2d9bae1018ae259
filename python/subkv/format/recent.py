"""Recent rows of the exact window as integers (FORMAT.md §3.2), computed as in kernels/ref/recent.cpp."""

from __future__ import annotations

import numpy as np

from subkv.format.arrays import F16, F32

MAX_INTEGER = 511
HALF_MAX = np.float32(65504.0)


def rounded(x: F32, mean: F16) -> F32:
    """Recent rows x [n, d] of a head after rounding, [n, d] f32, all finite. mean: [d], of keys; zeros for values."""
    centre = mean.astype(np.float32)
    y = np.clip(x, -HALF_MAX, HALF_MAX) - centre
    step = (np.abs(y).max(axis=-1, keepdims=True) / np.float32(MAX_INTEGER)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(step > 0.0, np.clip(np.rint(y / step), -MAX_INTEGER, MAX_INTEGER), np.float32(0.0))
    return np.clip(centre + step * q, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)
