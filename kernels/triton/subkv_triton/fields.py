"""Rows by coefficient: which bits of which bytes hold a code. All that kernels in Python know of bands and bit planes.

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
"""Scale codes tried below the smallest one that clips nothing."""
HALF_MAX = 65504.0
"""Where coefficients that are stored as halves saturate."""

PADDING, CODED, HALF = 0, 1, 2
"""Kinds of a coefficient: beyond the head's rank, quantized, or stored as a half."""

Band = tuple[int, int, float]
"""(n coefficients, bits, ratio)"""


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
    """

    byte: npt.NDArray[np.int32]
    shift: npt.NDArray[np.int32]
    bits: npt.NDArray[np.int32]
    lift: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int32]
    ratio: npt.NDArray[np.float32]
    zero: npt.NDArray[np.float32]

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
        return cls(byte, shift, bits, lift, kind, ratio, zero)

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """[2, width] of a byte's bits, once they are shifted down."""
        return (1 << self.bits) - 1


def row_bytes(bands: Sequence[Band]) -> int:
    """Bytes of a head's row: the scale and all planes."""
    return 1 + sum(n * bits // 8 for n, bits, _ in bands)
