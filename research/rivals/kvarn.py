"""KVarN: tiles of 128 tokens, Hadamard, and scales of rows and columns by alternating normalisation (after SINQ).

Per head a tile is X = channels x tokens of Hk (keys) or tokens x channels of Hv (values). 16 alternations move the
logarithms of column and row scales by those of the standard deviations relative to the least of them, each within 0.7
… 2, the sums clipped to −0.3 … 10; the state with the least max/min std of rows plus max/min std of columns is kept.
X / (rows · columns) is rounded to nearest between every row's minimum and maximum. Scale and minimum of each row and
scale of each column in half precision: K 4.375 and V 2.375 bits at d = 128 for codes of 4 and 2. The first 128 tokens
and the open tile stay exact; here, as many as a whole tile, which is counted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import half, min_max
from subkv.format.arrays import F32
from subkv.plan.basis import mixing_matrix

TILE, ALTERNATIONS = 128, 16


def _spread(x: NDArray[np.floating], axis: int) -> F32:
    """Standard deviations, kept away from zero."""
    return np.clip(x.std(axis, ddof=1, keepdims=True), 1e-3, 1e3).astype(np.float32)


def scales(x: F32) -> tuple[F32, F32]:
    """Scales of columns [n, 1, c] and rows [n, r, 1] for tiles x [n, r, c]."""
    log_columns, log_rows = np.zeros_like(x[:, :1]), np.zeros_like(x[:, :, :1])
    best = log_columns, log_rows
    columns, rows = _spread(x, 1), _spread(x, 2)
    least = np.minimum(columns.min((1, 2)), rows.min((1, 2)))[:, None, None] + np.float32(1e-6)
    lowest = np.full_like(least, np.inf)
    for _ in range(ALTERNATIONS):
        current = x / np.exp(log_columns) / np.exp(log_rows)
        columns, rows = _spread(current, 1), _spread(current, 2)
        uneven = columns.max(2) / columns.min(2) + rows.max(1) / rows.min(1)
        better = uneven[:, :, None] <= lowest
        lowest = np.where(better, uneven[:, :, None], lowest)
        best = np.where(better, log_columns, best[0]), np.where(better, log_rows, best[1])
        log_columns = np.clip(log_columns + np.log(np.clip(columns / least, 0.7, 2.0)), -0.3, 10.0)
        log_rows = np.clip(log_rows + np.log(np.clip(rows / least, 0.7, 2.0)), -0.3, 10.0)
    return np.exp(best[0]), np.exp(best[1])


def round_trip_tiles(x: F32, bits: int) -> F32:
    """Tiles x [n, rows, columns] as stored."""
    columns, rows = scales(x)
    columns = half(columns)
    decoded: F32 = rows * min_max(x / columns / rows, bits, axis=2) * columns
    return decoded


def round_trip(x: F32, bits: int, keys: bool) -> F32:
    """x [n_head_kv, n, d] as stored, d a power of two; tokens behind the last whole tile stay as they are."""
    heads, n, d = x.shape
    whole = n - n % TILE
    matrix = mixing_matrix(d).astype(np.float32)
    tiles = (x[:, :whole] @ matrix).reshape(-1, TILE, d)
    coded = round_trip_tiles(tiles.swapaxes(1, 2), bits).swapaxes(1, 2) if keys else round_trip_tiles(tiles, bits)
    return np.concatenate([coded.reshape(heads, whole, d) @ matrix, x[:, whole:]], axis=1)


def make(known: Knowledge, bits_k: int, bits_v: int) -> Rival:
    d = known.power_of_two()

    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        return round_trip(k, bits_k, True), round_trip(v, bits_v, False)

    side_k, side_v = 32 / TILE + 16 / d, 32 / d + 16 / TILE
    return Rival(quantize, (bits_k + side_k + bits_v + side_v) / 2, tile=TILE, n_sink=TILE, n_recent=TILE)
