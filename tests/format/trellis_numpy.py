"""Paths through a trellis in numpy: the bands of 2 to 6 bits of codec_numpy's rows (FORMAT.md §3).

The search is that of kernels/ref/trellis.cpp in words of arrays: a path's states are [2, 2] of the lowest bits of the
last code but one and of the last code, and all rows go along it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subkv.format.arrays import F32, U8
from subkv.format.bases import Bands
from subkv_triton.widths import BENDS, SHARES

LEAST, LEAST_LATENT = 24, 64  # coefficients from which a row has a path
PATH_BITS = 6
BELOW, TRIED = 2, 4  # scale codes tried, kernels/include/subkv/trellis.h

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def levels(bits: int) -> F32:
    """[2^(bits+1)] the alphabet of a band, ascending, in steps; level and a half."""
    k = np.arange(2**bits)
    upper = k + sum(np.maximum(k - bend, 0) for bend in BENDS[bits]) + 0.5
    return np.concatenate([-upper[::-1], upper]).astype(np.float32)


def nearest(bits: int, step: F32, c: F32) -> tuple[I64, F32]:
    """Of each subset of the levels, i % 4, that nearest to c [n]: its index and the error it leaves, [4, n]."""
    double, triple = (bend + 0.5 for bend in BENDS[bits])
    y = c * (np.float32(1.0) / step)
    size = np.abs(y)
    magnitude = size
    total = 0.0
    slopes = zip((2 / 3, 1 / 2, 2 / 5, 1 / 3), (double - 2, *sorted((double + 2, triple - 2)), triple + 2), strict=True)
    for factor, bend in slopes:
        total += 0.5 * bend
        a = np.float32(factor)
        b = np.float32(total) * a
        magnitude = np.fmin(magnitude, (size.astype(np.float64) * a + b).astype(np.float32))
    place = np.copysign(magnitude, y).astype(np.float64)
    q = np.arange(4)[:, None]
    g = np.rint((place * 0.25 + 0.25 * (2**bits - 0.5 - q)).astype(np.float32))
    index = 4 * np.clip(g, 0, 2 ** (bits - 1) - 1).astype(np.int64) + q
    error = (c.astype(np.float64) - step.astype(np.float64) * levels(bits)[index]).astype(np.float32)
    return index, error


def extend(cost: F32, error: F32) -> tuple[F32, NDArray[np.bool_]]:
    """cost [2 (h), 2 (l), ..., n] of paths that end in bits h, l, after one more place of error [4, n].

    -> the same of bits l, x, and whether the better of two paths came from h = 1.
    """
    squared = error.astype(np.float64) ** 2
    branches = np.stack(
        [[[squared[2 * (x ^ h) + low] + cost[h, low] for x in (0, 1)] for low in (0, 1)] for h in (0, 1)]
    ).astype(np.float32)
    taken = branches[1] < branches[0]
    return np.where(taken, branches[1], branches[0]), taken


@dataclass(frozen=True)
class Path:
    """The places of the rows of one head: (coefficient, bits, step relative to the row's scale, first of a lane)."""

    places: list[tuple[int, int, np.float32, bool]]
    lanes: bool
    """Every lane begins with two zeros, instead of with the last two places."""

    @classmethod
    def of(cls, bands: Bands, ratio: Sequence[np.float32], latent: bool) -> Path | None:
        """None: rows without a path."""
        bits = [b for n, b in bands for _ in range(n)]
        rho = [r for (n, _), r in zip(bands, ratio, strict=True) for _ in range(n)]
        places = []
        for lane in range(8):
            of_lane = [j for j in range(lane, len(bits), 8) if bits[j] <= PATH_BITS]
            places += [(j, bits[j], rho[j] * np.float32(SHARES[bits[j]]), j == of_lane[0]) for j in of_lane]
        return cls(places, latent) if len(places) >= (LEAST_LATENT if latent else LEAST) else None

    def free_cost(self, c: F32, scale: F32) -> F32:
        """[n] squared error of the best path of rows c at scales [n], wherever it begins and ends."""
        cost = np.zeros((2, 2, len(c)), np.float32)
        for j, bits, step, first in self.places:
            if self.lanes and first:
                cost = self._begin(cost)
            cost, _ = extend(cost, nearest(bits, scale * step, c[:, j])[1])
        return cost.min(axis=(0, 1))

    @staticmethod
    def _begin(cost: F32) -> F32:
        out = np.full_like(cost, np.inf)
        out[0, 0] = cost.min(axis=(0, 1))
        return out

    def codes(self, c: F32, scale: F32) -> U8:
        """[n, rank] codes of the best path of rows c at scales [n], 0 of coefficients that are not on it."""
        n = np.arange(len(c))
        ends = 1 if self.lanes else 4  # states that the path begins and ends in, high bit first
        cost = np.full((2, 2, ends, len(c)), np.inf, np.float32)
        for state in range(ends):
            cost[state >> 1, state & 1, state] = 0
        steps, origin = [], {}
        for t, (j, bits, step, first) in enumerate(self.places):
            if self.lanes and first:
                origin[t] = cost.reshape(4, len(c)).argmin(axis=0)
                cost = self._begin(cost)
            index, error = nearest(bits, scale * step, c[:, j])
            cost, taken = extend(cost, error)
            steps.append((index, taken))
        if self.lanes:
            start, state = np.zeros(len(c), np.int64), cost.reshape(4, len(c)).argmin(axis=0)
        else:
            start = np.stack([cost[w >> 1, w & 1, w] for w in range(4)]).argmin(axis=0)
            state = start
        out = np.zeros(c.shape, np.uint8)
        for t in reversed(range(len(self.places))):
            index, taken = steps[t]
            low, x = state >> 1, state & 1
            high = taken[low, x, start, n].astype(np.int64)
            out[:, self.places[t][0]] = (index[2 * (x ^ high) + low, n] ^ 2 * high ^ low) >> 1
            state = origin[t] if t in origin else 2 * high + low
        return out

    def decode(self, codes: U8, scale: F32, c: F32) -> None:
        """Writes the coefficients of the path to c [n, rank], from codes [n, rank] and scales [n]; others stay
        unchanged.
        """
        since = 0
        for t, (j, bits, step, first) in enumerate(self.places):
            since = 0 if first else since + 1
            one, two = (
                np.zeros(len(c), np.uint8) if self.lanes and since < back else codes[:, self.places[t - back][0]] & 1
                for back in (1, 2)
            )
            index = 2 * codes[:, j] ^ 2 * two ^ one
            c[:, j] = (scale * step).astype(np.float32) * levels(bits)[index]
