"""Bases that all plans of a file share, and the basis of a plan (FORMAT.md §3.3).

libsubkv derives the matrices of a plan when it loads a file (runtime/native/bases/plan.cpp). These are the same up to
rounding: the planner needs them for ratios, gamma and predictions.
"""

from __future__ import annotations

import numpy as np

from subkv.format.arrays import F16, F32, F64
from subkv.format.bases import Bands, SharedMatrix, StoredBasis
from subkv.format.codec import rank
from subkv.plan.basis import (
    N_HALVES,
    STEP_FLOOR,
    FullBasis,
    band_step,
    byte_rows,
    gains,
    half,
    in_bytes,
    mixing_matrix,
    slices,
)


def shared(basis: FullBasis) -> SharedMatrix:
    """E of all coefficients, unmixed: in bytes if E can be rounded to them."""
    return shared_matrix(basis.encode) if basis.fits_bytes else SharedMatrix(half(basis.encode, "E"), None)


def shared_matrix(encode: F64) -> SharedMatrix:
    """E [d, d] in bytes."""
    step, codes = byte_rows(encode)
    return SharedMatrix(half(step[:, 0], "E"), codes.astype(np.int8))


def mixed_ratios(bands: Bands, variance: F64) -> F32:
    """Steps of all bands, largest 1, if the coefficients of every band are mixed. variance: before mixing."""
    steps = np.ones(len(bands))
    for i, (part, (n, bits)) in enumerate(zip(slices(bands), bands, strict=True)):
        if bits != 16:  # 16-bit bands have no shared step
            steps[i] = band_step(bits, np.full(n, variance[part].mean()))[0]
    coded = np.array([bits != 16 for _, bits in bands])
    largest = steps[coded].max(initial=0.0)
    steps[coded] = np.maximum(steps[coded] / largest, STEP_FLOOR) if largest > 0.0 else 1.0
    return steps.astype(np.float32)


def derived(basis: FullBasis, bands: Bands, mean: F16, narrow: bool) -> StoredBasis:
    """The stored basis of a plan. narrow: D after its first rows in bytes, if E is in bytes."""
    matrix = shared(basis)
    encode, kept = matrix.values().astype(np.float64), rank(bands)
    for part, (n, bits) in zip(slices(bands), bands, strict=True):
        if bits != 16:
            encode[part] = mixing_matrix(n) @ encode[part]
    if matrix.codes is not None:
        encode[:kept] = in_bytes(encode[:kept])
    rounded = half(encode[:kept], "E")
    encode[:kept] = rounded
    decode: F64 = np.linalg.inv(encode).T[:kept] / gains(bands)[:, None]
    if narrow and matrix.codes is not None:
        decode[N_HALVES:] = in_bytes(decode[N_HALVES:])
    return StoredBasis(bands, rounded, half(decode, "D"), mixed_ratios(bands, basis.variance), mean)
