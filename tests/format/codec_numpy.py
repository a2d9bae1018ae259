"""The independent definition of rows in numpy, after FORMAT.md §3. All kernels are compared with it.

The bytes are a function of the float32 coefficients alone. Fused multiply-adds of the reference are computed in
float64 here, which differs only by double rounding (about once in 2^29 operations). trellis_numpy.py has the paths
through a trellis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from trellis_numpy import BELOW, PATH_BITS, TRIED, Path

from subkv.format.arrays import F32, U8
from subkv.format.bases import Bands
from subkv.format.codec import rank, row_bytes
from subkv_triton.widths import PLANES

SCALE_ONE, SCALE_MOST, SCALE_NAN = 160, 254, 255
CANDIDATES_BELOW = 10  # scale codes tried below the smallest that clips nothing, kernels/ref/rows.h
HALF_MAX = 65504.0

_OCTAVE = np.array([1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081], dtype=np.float32)


def scale_table() -> F32:
    """[256] float32: 2^((u − 160)/8); entry 0, the zero row, is 0, and 255, a row that is not finite, NaN."""
    octaves = np.ldexp(np.float32(1.0), np.arange(-20, 12)).astype(np.float32)
    table: F32 = (octaves[:, None] * _OCTAVE[None, :]).ravel()
    table[0], table[SCALE_NAN] = 0.0, np.nan
    return table


def _slices(bands: Bands) -> Iterator[tuple[int, int, int, int]]:
    """(first coefficient, byte offset, n, bits) of every band."""
    first, offset = 0, 1
    for n, bits in bands:
        yield first, offset, n, bits
        first += n
        offset += n * bits // 8


def _codes(c: F32, step: F32, bits: int) -> F32:
    """Codes as float32; c [..., n], step broadcastable to it."""
    half_range = np.float32(0.5 * (2**bits - 1))
    inverse = np.float32(1.0) / step
    u = np.rint((c.astype(np.float64) * inverse + half_range).astype(np.float32))
    return np.clip(u, np.float32(0.0), np.float32(2.0) * half_range)


def _squared_error(c: F32, bands: Bands, ratio: Sequence[np.float32], k: NDArray[np.int64], beyond: int = 0) -> F32:
    """[n] of the rows at scale codes k [n]: of bands of more than `beyond` bits, coded without a path."""
    lane = np.zeros((len(c), 8), dtype=np.float32)
    for (first, _, n, bits), rho in zip(_slices(bands), ratio, strict=True):
        if bits == 16 or bits <= beyond:
            continue
        step = (scale_table()[k] * rho).astype(np.float32)[:, None]
        x = c[:, first : first + n]
        centred = _codes(x, step, bits) - np.float32(0.5 * (2**bits - 1))
        error = (x.astype(np.float64) - step.astype(np.float64) * centred).astype(np.float32)
        for j in range(0, n, 8):
            part = error[:, j : j + 8].astype(np.float64)
            lane = (lane + part * part).astype(np.float32)
    return ((lane[:, 0] + lane[:, 4]) + (lane[:, 2] + lane[:, 6])) + (
        (lane[:, 1] + lane[:, 5]) + (lane[:, 3] + lane[:, 7])
    )


def _choose_scales(c: F32, bands: Bands, ratio: Sequence[np.float32]) -> NDArray[np.int64]:
    """Scale code of every row [n]: least squared error among the candidates of kernels/ref/encode.cpp."""
    table = scale_table()
    coded = [
        (first, n, bits, rho) for (first, _, n, bits), rho in zip(_slices(bands), ratio, strict=True) if bits != 16
    ]
    if not coded:
        return np.full(len(c), SCALE_ONE, dtype=np.int64)
    reach = np.zeros(len(c), dtype=np.float32)
    for first, n, bits, rho in coded:
        largest = np.abs(c[:, first : first + n]).max(axis=1)
        reach = np.maximum(reach, largest / (rho * np.float32(0.5 * (2**bits - 1))))
    start = np.minimum(np.searchsorted(table[1:SCALE_NAN], reach, side="left") + 1, SCALE_MOST)

    best, best_error = start.copy(), _squared_error(c, bands, ratio, start)
    for below in range(1, CANDIDATES_BELOW + 1):
        k = start - below
        error = _squared_error(c, bands, ratio, np.maximum(k, 1))
        better = (k >= 1) & (error < best_error)
        best[better] = k[better]
        best_error[better] = error[better]
    return best


def _choose_path_scales(
    path: Path, c: F32, bands: Bands, ratio: Sequence[np.float32], middle: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Scale code of every row [n]: the least error of four near _choose_scales', the smallest of equal ones."""
    best, least = middle.copy(), np.full(len(c), np.inf, dtype=np.float32)
    for k in (middle + offset for offset in range(-BELOW, TRIED - BELOW)):
        tried = np.clip(k, 1, SCALE_MOST)
        cost = path.free_cost(c, scale_table()[tried]) + _squared_error(c, bands, ratio, tried, PATH_BITS)
        better = (k == tried) & (cost < least)
        best[better] = k[better]
        least[better] = cost[better]
    return best


def encode(c: F32, bands: Bands, ratio: Sequence[float] | NDArray[np.floating], latent: bool = False) -> U8:
    """Coefficients [n, rank] float32 -> rows [n, row_bytes]. A zero row is zeros, one that is not finite SCALE_NAN.

    latent: of a latent layer.
    """
    if c.dtype != np.float32 or c.ndim != 2 or c.shape[1] != rank(bands):
        raise ValueError(f"coefficients: expected float32 [n, {rank(bands)}], found {c.dtype} {list(c.shape)}")
    rho = [np.float32(value) for value in ratio]
    live = np.isfinite(c).all(axis=1) & (c != 0.0).any(axis=1)
    clean = np.where(live[:, None], c, np.float32(1.0))
    scale_code = _choose_scales(clean, bands, rho)
    path = Path.of(bands, rho, latent)
    if path is not None:
        scale_code = _choose_path_scales(path, clean, bands, rho, scale_code)
    scale = scale_table()[scale_code]
    on_path = None if path is None else path.codes(clean, scale)
    rows = np.zeros((len(c), row_bytes(bands)), dtype=np.uint8)
    rows[:, 0] = scale_code
    for (first, offset, n, bits), r in zip(_slices(bands), rho, strict=True):
        x = clean[:, first : first + n]
        if bits == 16:
            halves = np.clip(x, -HALF_MAX, HALF_MAX).astype("<f2")
            rows[:, offset : offset + 2 * n] = halves.view(np.uint8).reshape(len(c), 2 * n)
            continue
        if on_path is not None and bits <= PATH_BITS:
            u = on_path[:, first : first + n]
        else:
            u = _codes(x, (scale * r).astype(np.float32)[:, None], bits).astype(np.uint8)
        for width in PLANES[bits]:
            size, per_byte = n * width // 8, 8 // width
            parts = (u & ((1 << width) - 1)).reshape(len(c), per_byte, size)
            shifts = (width * np.arange(per_byte, dtype=np.uint8))[None, :, None]
            rows[:, offset : offset + size] = np.bitwise_or.reduce(parts << shifts, axis=1)
            offset += size
            u = (u >> (width & 7)).astype(np.uint8)
    rows[~live] = 0
    rows[~np.isfinite(c).all(axis=1), 0] = SCALE_NAN
    return rows


def decode(rows: U8, bands: Bands, ratio: Sequence[float] | NDArray[np.floating], latent: bool = False) -> F32:
    """Rows [n, row_bytes] -> dequantized coefficients [n, rank] float32."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != row_bytes(bands):
        raise ValueError(f"rows: expected uint8 [n, {row_bytes(bands)}], found {rows.dtype} {list(rows.shape)}")
    scale = scale_table()[rows[:, 0]]
    c = np.zeros((len(rows), rank(bands)), dtype=np.float32)
    codes = np.zeros(c.shape, dtype=np.uint8)
    for (first, offset, n, bits), r in zip(_slices(bands), ratio, strict=True):
        if bits == 16:
            halves = np.ascontiguousarray(rows[:, offset : offset + 2 * n]).view("<f2")
            c[:, first : first + n] = halves.astype(np.float32)
            continue
        u = np.zeros((len(rows), n), dtype=np.uint8)
        low = 0
        for width in PLANES[bits]:
            size, per_byte = n * width // 8, 8 // width
            shifts = (width * np.arange(per_byte, dtype=np.uint8))[None, :, None]
            parts = (rows[:, None, offset : offset + size] >> shifts) & ((1 << width) - 1)
            u |= (parts.reshape(len(rows), n) << low).astype(np.uint8)
            offset += size
            low += width
        step = (scale * np.float32(r)).astype(np.float32)[:, None]
        codes[:, first : first + n] = u
        c[:, first : first + n] = step * (u.astype(np.float32) - np.float32(0.5 * (2**bits - 1)))
    path = Path.of(bands, [np.float32(r) for r in ratio], latent)
    if path is not None:
        path.decode(codes, scale, c)
    c[rows[:, 0] == 0] = 0.0
    c[rows[:, 0] == SCALE_NAN] = np.nan
    return c
