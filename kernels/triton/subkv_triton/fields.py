"""The bits and bytes of each coefficient's code in a row: all that Python kernels need of bands and bit planes.

The constants of this page are those of kernels/include/subkv/format.h, which Python cannot include; tests compare them
with libsubkv. Those of widths are in widths.py. This module needs only numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from subkv_triton.widths import BENDS, PLANES, SHARES

SCALE_ONE = 160
"""Scale code of a scale of 1: scales are 2^((code - SCALE_ONE)/8), 0 for code 0."""
SCALE_MOST, SCALE_NAN = 254, 255
"""Scale codes of the largest scale, and of a row that could not be coded: its coefficients are NaN."""
SCALE_CANDIDATES_BELOW = 10
"""Number of scale codes tried below the smallest one without clipping."""
HALF_MAX = 65504.0
"""Coefficients in half precision are clamped to +-HALF_MAX."""

# Paths through a trellis (kernels/include/subkv/trellis.h)
PATH_LEAST = 24
"""Minimum number of coefficients in bands of at most 6 bits for the codes of a row to be a path."""
PATH_BELOW, PATH_TRIED = 2, 4
"""The search tries PATH_TRIED scale codes; the first is PATH_BELOW below the best one without a path."""
LINE_FACTORS = np.array([2 / 3, 1 / 2, 2 / 5, 1 / 3], np.float32)
"""Factors a of the lines that map a value to its level: |level + 1/2| = min(|y|, a |y| + b), y in steps."""
STRAIGHT = 1e9
"""Bends of a coefficient that is not on the path: larger than every level."""

PADDING, CODED, HALF = 0, 1, 2
"""Kinds of a coefficient: beyond the head's rank, quantized, or a half."""

Band = tuple[int, int, float]
"""(n coefficients, bits, ratio)"""


def line_constants(bits: int) -> npt.NDArray[np.float32]:
    """Constants b [4] of the lines of LINE_FACTORS for a band."""
    double, triple = (bend + 0.5 for bend in BENDS[bits])
    bends = np.array([double - 2, *sorted((double + 2, triple - 2)), triple + 2])
    return (0.5 * np.cumsum(bends)).astype(np.float32) * LINE_FACTORS


@dataclass(frozen=True)
class Path:
    """A head's path: [n] int32, the coefficient of each place and the bits of its band. n = 0: no path."""

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
        """[n] the coefficients `back` places before; the last places precede the first one."""
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
    table[0], table[SCALE_NAN] = 0, np.nan
    return table


@dataclass(frozen=True)
class Fields:
    """A head's row, K or V. A coefficient's code is the sum over i of (row[byte[i]] >> shift[i] & mask[i]) << lift[i].

    byte, shift, bits, lift: [2, width] int32, for the low and the high bits of codes; bits: their number, or 0. kind:
    [width] int32. ratio, zero: [width] float32. ratio: step of the coefficient's band relative to the row's scale; 1
    for halves and padding. zero: the code of 0, (2^bits - 1)/2; 0 for halves and padding.

    Decoding: the index is the code; on the path (on = 1) it is 2 code ^ 2 (lowest bit of the code of coefficient
    before[1]) ^ (lowest bit of the code of before[0]). With y = index - centre the value, in units of the row's scale,
    is step * sign(y) (|y| + max(|y| - bend[0], 0) + max(|y| - bend[1], 0)).
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
        """Fields of these bands, padded to `width` coefficients."""
        byte, shift, bits, lift = np.zeros((4, 2, width), np.int32)
        kind = np.full(width, PADDING, np.int32)
        ratio, zero = np.ones(width, np.float32), np.zeros(width, np.float32)
        first, at = 0, 1  # byte 0 is the scale
        for n, n_bits, rho in bands:
            here, j = slice(first, first + n), np.arange(n)
            first += n
            if n_bits == 16:  # a half, low byte first
                kind[here], bits[:, here], lift[1, here] = HALF, 8, 8
                byte[:, here] = at + 2 * j, at + 2 * j + 1
                at += 2 * n
                continue
            kind[here], ratio[here], zero[here] = CODED, rho, (2**n_bits - 1) / 2
            below = 0
            for part, plane in enumerate(PLANES[n_bits]):
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
        step[places] *= np.array([SHARES[int(b)] for b in path.bits], np.float32)
        centre[places], bend[:, places] = 2.0**path.bits - 0.5, path.bends + 0.5
        return cls(byte, shift, bits, lift, kind, ratio, zero, path, on, before, step, centre, bend)

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """[2, width] mask of the bits after the shift."""
        return (1 << self.bits) - 1


PIECES = {**PLANES, 8: (4, 4)}
"""Bits of a band: widths of its codes' pieces in Words, low bits first."""


@dataclass(frozen=True)
class Words:
    """A head's row in words of 32 bits, in which a shift and a mask give one part of the codes of an octet.

    An octet is eight adjacent coefficients. A piece is 1, 2 or 4 bits of each of its codes; those of coefficient i
    begin at bit 4 i + below of one word. Wide pieces precede narrow ones, so none is divided. Halves come first.

    word, below, size: [2, width / 8] int32, of the octets' low and high pieces; size 0: none. half: [width] int32, the
    number of a coefficient among the halves. n_bytes: a multiple of 4. byte, shift, bits, lift: as in Fields.
    """

    word: npt.NDArray[np.int32]
    below: npt.NDArray[np.int32]
    size: npt.NDArray[np.int32]
    half: npt.NDArray[np.int32]
    n_bytes: int
    byte: npt.NDArray[np.int32]
    shift: npt.NDArray[np.int32]
    bits: npt.NDArray[np.int32]
    lift: npt.NDArray[np.int32]

    @classmethod
    def of(cls, bands: Sequence[Band], width: int) -> Words:
        octets = [bits for n, bits, _ in bands for _ in range(n // 8)]
        word, below, size = np.zeros((3, 2, width // 8), np.int32)
        half = np.zeros((width // 8, 8), np.int32)
        byte, shift, bits, lift = np.zeros((4, 2, width // 8, 8), np.int32)
        i = np.arange(8)
        stored = [octet for octet, n_bits in enumerate(octets) if n_bits == 16]
        for n, octet in enumerate(stored):
            half[octet] = 8 * n + i
            byte[:, octet] = 2 * half[octet], 2 * half[octet] + 1
            bits[:, octet], lift[1, octet] = 8, 8
        pieces = [
            (n_bits, part, octet) for octet, of in enumerate(octets) for part, n_bits in enumerate(PIECES.get(of, ()))
        ]
        at = 16 * len(stored)  # in eights of bits: a word has four
        for n_bits, part, octet in sorted(pieces, key=lambda piece: -piece[0]):
            word[part, octet], below[part, octet], size[part, octet] = at // 4, at % 4, n_bits
            byte[part, octet], shift[part, octet] = at // 4 * 4 + i // 2, 4 * (i % 2) + at % 4
            bits[part, octet], lift[part, octet] = n_bits, part * PIECES[octets[octet]][0]
            at += n_bits
        of_coefficients = (x.reshape(2, width) for x in (byte, shift, bits, lift))
        return cls(word, below, size, half.ravel(), -(-at // 4) * 4, *of_coefficients)


def bits_of_codes(of: Fields | Words) -> npt.NDArray[np.int64]:
    """[width, 16] the bit of the row in which a bit of a coefficient's code is, -1 beyond its width."""
    out = np.full((of.bits.shape[1], 16), -1, np.int64)
    for bit in range(8):
        part, j = np.nonzero(of.bits > bit)
        out[j, of.lift[part, j] + bit] = 8 * of.byte[part, j] + of.shift[part, j] + bit
    return out


def row_bytes(bands: Sequence[Band]) -> int:
    """Bytes of a head's row: the scale and all planes."""
    return 1 + sum(n * bits // 8 for n, bits, _ in bands)
