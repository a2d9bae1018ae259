"""Encodes and decodes rows of coefficients with libsubkv (FORMAT.md §3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from subkv.format.arrays import F32, U8
from subkv.format.bases import Bands
from subkv.native import library

Ratio = Sequence[float] | NDArray[np.floating]  # steps of the bands, relative to the largest


def rank(bands: Bands) -> int:
    """Number of coefficients of a head."""
    return sum(n for n, _ in bands)


def row_bytes(bands: Bands) -> int:
    """Bytes of a head's row: scale byte and planes."""
    return 1 + sum(n * bits // 8 for n, bits in bands)


def encode(c: F32, bands: Bands, ratio: Ratio) -> U8:
    """Coefficients [n, rank] float32 -> rows [n, row_bytes]. A row that is not finite decodes to NaN.

    Raises ValueError for a wrong shape or type, and for invalid bands or ratios.
    """
    if c.dtype != np.float32 or c.ndim != 2 or c.shape[1] != rank(bands):
        raise ValueError(f"coefficients: expected float32 [n, {rank(bands)}], found {c.dtype} {list(c.shape)}")
    bands_i32, ratio_f32 = _arrays(bands, ratio)
    c, rows = np.ascontiguousarray(c), np.empty((len(c), row_bytes(bands)), dtype=np.uint8)
    arguments = bands_i32.ctypes.data, ratio_f32.ctypes.data, len(bands), c.ctypes.data, len(c), rows.ctypes.data
    if library.load().subkv_encode_rows(*arguments) < 0:
        raise ValueError(library.last_error())
    return rows


def decode(rows: U8, bands: Bands, ratio: Ratio) -> F32:
    """Rows [n, row_bytes] -> dequantized coefficients [n, rank] float32. Raises ValueError as encode()."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != row_bytes(bands):
        raise ValueError(f"rows: expected uint8 [n, {row_bytes(bands)}], found {rows.dtype} {list(rows.shape)}")
    bands_i32, ratio_f32 = _arrays(bands, ratio)
    rows, c = np.ascontiguousarray(rows), np.empty((len(rows), rank(bands)), dtype=np.float32)
    arguments = bands_i32.ctypes.data, ratio_f32.ctypes.data, len(bands), rows.ctypes.data, len(rows), c.ctypes.data
    if not library.load().subkv_decode_rows(*arguments):
        raise ValueError(library.last_error())
    return c


def _arrays(bands: Bands, ratio: Ratio) -> tuple[NDArray[np.int32], F32]:
    """Bands and ratios for libsubkv."""
    if len(ratio) != len(bands):
        raise ValueError(f"ratio: expected one for each of {len(bands)} bands, found {len(ratio)}")
    return np.array(bands, dtype=np.int32), np.ascontiguousarray(ratio, dtype=np.float32)


def round_trip(c: F32, bands: Bands, ratio: Ratio) -> F32:
    """Encode and decode coefficients [n, rank] float32. Raises ValueError as encode()."""
    return decode(encode(c, bands, ratio), bands, ratio)
