"""Rows by coefficient: the bits and bytes of each code. Python kernels need nothing else of bands and bit planes.

The numbers are those of kernels/include/subkv/format.h, which Python cannot include; tests hold them to libsubkv's.
This module needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths of the bit planes of a band by its bits, low bits first (converter/FORMAT.md)."""

SCALE_ONE = 160
"""Scale code of a scale of 1: scales are 2^((code - SCALE_ONE)/8), 0 for code 0."""
SCALE_CANDIDATES_BELOW = 10
"""Number of scale codes tried below the smallest one without clipping."""
HALF_MAX = 65504.0
"""Coefficients stored as halves are clamped to +- this."""

# Paths through a trellis (kernels/include/subkv/trellis.h)
PATH_LEAST = 24
"""Coefficients of bands of at most 6 bits from which the codes of a row are a path."""
PATH_BELOW, PATH_TRIED = 2, 4
"""Scale codes tried: from PATH_BELOW less than the best one of rows without a path on, PATH_TRIED of them."""
BENDS = {2: (2, 4), 3: (5, 6), 4: (9, 12), 5: (19, 25), 6: (37, 50)}
"""By the bits of a band: magnitudes of levels beyond which they are twice and three times as far apart."""
SHARES = {2: 0.411522634, 3: 0.40290088, 4: 0.358166188, 5: 0.353481798, 6: 0.329380765}
"""By the bits of a band: distance of levels relative to its ratio."""
LINE_FACTORS = np.array([2 / 3, 1 / 2, 2 / 5, 1 / 3], np.float32)
"""What level a value is nearest to: with y in steps, level and a half have the magnitude min(|y|, a |y| + b)."""
STRAIGHT = 1e9
"""Beyond every level: what a coefficient that is not on the path has for bends."""

PADDING, CODED, HALF = 0, 1, 2
"""Kinds of a coefficient: beyond the head's rank, quantized, or stored as a half."""

Band = tuple[int, int, float]
"""(n coefficients, bits, ratio)"""


def line_constants(bits: int) -> npt.NDArray[np.float32]:
    """[4] b of the lines of LINE_FACTORS for the levels of a band."""
    double, triple = (bend + 0.5 for bend in BENDS[bits])
    bends = np.array([double - 2, *sorted((double + 2, triple - 2)), triple + 2])
    return (0.5 * np.cumsum(bends)).astype(np.float32) * LINE_FACTORS


@dataclass(frozen=True)
class Path:
    """The places of a head's path, of none without one: [n] of the coefficient and its band's bits, int32."""

    coefficient: npt.NDArray[np.int32]
    bits: npt.NDArray[np.int32]

    @classmethod
    def of(cls, bands: Sequence[Band]) -> Path:
        bits = np.repeat([b for _, b, _ in bands], [n for n, _, _ in bands]).astype(np.int32)
        lane_by_lane = np.arange(len(bits)).reshape(-1, 8).T.ravel()
        places = lane_by_lane[np.isin(bits[lane_by_lane], list(BENDS))].astype(np.int32)
        places = places if len(places) >= PATH_LEAST else places[:0]
        return cls(places, bits[places])

    def before(self, back: int) -> npt.NDArray[np.int32]:
        """[n] coefficients that many places before: ahead of the first place come the last."""
        return np.roll(self.coefficient, back)

    @property
    def bends(self) -> npt.NDArray[np.int32]:
        """[2, n]"""
        return np.array([BENDS[int(bits)] for bits in self.bits], np.int32).reshape(-1, 2).T

    @property
    def lines(self) -> npt.NDArray[np.float32]:
        """[4, n] of line_constants."""
        return np.array([line_constants(int(bits)) for bits in self.bits], np.float32).reshape(-1, 4).T


def scale_table() -> npt.NDArray[np.float32]:
    """[256] the scale of every scale code."""
    table = np.exp2((np.arange(256) - SCALE_ONE) / 8).astype(np.float32)
    table[0] = 0
    return table


@dataclass(frozen=True)
class Fields:
    """A head's row, K or V. A coefficient's code is the sum over i of (row[byte[i]] >> shift[i] & mask[i]) << lift[i].

    byte, shift, bits, lift: [2, width] int32, of the low and the high bits of codes; bits: how many, 0 for none. kind,
    int32, ratio, zero, float32: [width]. ratio: step of the coefficient's band relative to the row's scale, 1 where
    nothing is quantized. zero: the code that stands for 0, (2^bits - 1)/2; 0 where nothing is quantized.

    Beside them, for those who decode: a coefficient's index is its code, but of one on the path (on = 1) it is
    2 code ^ 2 (lowest bit of coefficient before[1]'s code) ^ (that of before[0]'s). With y = index - centre it is
    step * sign(y) (|y| + max(|y| - bend[0], 0) + max(|y| - bend[1], 0)).
    """

    byte: npt.NDArray[np.int32]
    shift: npt.NDArray[np.int32]
    bits: npt.NDArray[np.int32]
    lift: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int32]
    ratio: npt.NDArray[np.float32]
    zero: npt.NDArray[np.float32]
    path: Path
    on: npt.NDArray[np.int32]
    before: npt.NDArray[np.int32]
    step: npt.NDArray[np.float32]
    centre: npt.NDArray[np.float32]
    bend: npt.NDArray[np.float32]

    @classmethod
    def of(cls, bands: Sequence[Band], width: int) -> Fields:
        """Of these bands, and as many empty coefficients as fill `width`."""
        byte, shift, bits, lift = np.zeros((4, 2, width), np.int32)
        kind = np.full(width, PADDING, np.int32)
        ratio, zero = np.ones(width, np.float32), np.zeros(width, np.float32)
        first, at = 0, 1  # byte 0 is the scale
        for n, of_code, rho in bands:
            here, j = slice(first, first + n), np.arange(n)
            first += n
            if of_code == 16:  # a half, low byte first
                kind[here], bits[:, here], lift[1, here] = HALF, 8, 8
                byte[:, here] = at + 2 * j, at + 2 * j + 1
                at += 2 * n
                continue
            kind[here], ratio[here], zero[here] = CODED, rho, (2**of_code - 1) / 2
            below = 0
            for part, plane in enumerate(PLANES[of_code]):
                size = n * plane // 8
                byte[part, here], shift[part, here] = at + j % size, plane * (j // size)
                bits[part, here], lift[part, here] = plane, below
                below += plane
                at += size
        path = Path.of(bands)
        places = path.coefficient
        on, before = np.zeros(width, np.int32), np.zeros((2, width), np.int32)
        step, centre, bend = ratio.copy(), zero.copy(), np.full((2, width), STRAIGHT, np.float32)
        on[places], before[:, places] = 1, [path.before(1), path.before(2)]
        step[places] *= np.array([SHARES[int(of_code)] for of_code in path.bits], np.float32)
        centre[places], bend[:, places] = 2.0**path.bits - 0.5, path.bends + 0.5
        return cls(byte, shift, bits, lift, kind, ratio, zero, path, on, before, step, centre, bend)

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """[2, width] of a byte's bits, once they are shifted down."""
        return (1 << self.bits) - 1


def row_bytes(bands: Sequence[Band]) -> int:
    """Bytes of a head's row: the scale and all planes."""
    return 1 + sum(n * bits // 8 for n, bits, _ in bands)
