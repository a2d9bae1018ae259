"""Rows of the recent part of the exact window in integers (FORMAT.md §3.2), as kernels/ref/recent.cpp has them."""

from __future__ import annotations

import numpy as np

from subkv.format.arrays import F16, F32

MOST = 511  # largest integer
HALF_MAX = np.float32(65504.0)


def rounded(x: F32, mean: F16) -> F32:
    """What attention sees of recent rows x [n, d] of a head, all finite. mean: [d] that keys lose, or zeros."""
    centre = mean.astype(np.float32)
    y = np.clip(x, -HALF_MAX, HALF_MAX) - centre
    step = (np.abs(y).max(axis=-1, keepdims=True) / np.float32(MOST)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(step > 0.0, np.clip(np.rint(y / step), -MOST, MOST), np.float32(0.0))
    seen: F32 = np.clip(centre + step * q, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)
    return seen
