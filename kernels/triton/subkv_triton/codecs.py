"""The heads of one layer, K or V, as tables that the kernels read.

Bit planes are a matter of these tables alone: a coefficient knows the one or two bytes that hold its code, a byte knows
the up to eight coefficients that it is made of. Kernels have no case for a width of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
"""Widths of the bit planes of a band by its bits, low bits first (converter/FORMAT.md)."""

PADDING, CODED, HALF = 0, 1, 2
"""Kinds of a coefficient: beyond the head's rank, quantized, or stored as a half."""

# Rows of Codecs.coefficients, and of Codecs.packing per slot. A coefficient's code is
#   (byte[LOW] >> LOW_SHIFT & LOW_MASK) | (byte[HIGH] >> HIGH_SHIFT & HIGH_MASK) << UP
LOW, LOW_SHIFT, LOW_MASK, HIGH, HIGH_SHIFT, HIGH_MASK, UP, KIND = range(8)
# and of a byte's slot: (code of coefficient SOURCE >> DROP & MASK) << LIFT
SOURCE, DROP, MASK, LIFT = range(4)
SLOTS = 8

MIN_WIDTH = 16
"""Least extent of a matrix that tensor cores multiply."""

Band = tuple[int, int, float]
"""(n coefficients, bits, ratio)"""


@dataclass(frozen=True)
class Codecs:
    """K or V of one layer. H KV heads of size d; R: the largest rank, padded to a power of two of at least 16."""

    d: int
    ranks: tuple[int, ...]
    row_bytes: int
    """Bytes of one cell, all heads: their rows follow each other."""
    any_half: bool
    """Whether a band of 16 bits exists."""
    offsets: torch.Tensor
    """I32 [H]: byte where a head's row begins."""
    lengths: torch.Tensor
    """I32 [H]: bytes of a head's row."""
    coefficients: torch.Tensor
    """I32 [H, 8, R]: where codes are (LOW to KIND); bytes count from the head's row."""
    packing: torch.Tensor
    """I32 [H, 4, SLOTS, B]: what bytes are made of (SOURCE to LIFT); byte 0, the scale, of nothing."""
    ratios: torch.Tensor
    """F32 [H, R]: step of the coefficient's band relative to the row's scale; 1 where nothing is quantized."""
    zeros: torch.Tensor
    """F32 [H, R]: the code that stands for 0, (2^bits - 1)/2; 0 where nothing is quantized."""
    encode: torch.Tensor
    """F16 [H, R, d]: E, zero rows beyond the rank."""
    decode: torch.Tensor
    """F16 [H, R, d]: D, likewise."""
    subtracted: torch.Tensor | None
    """F32 [H, R]: what coefficients are coded less of, E mean."""

    @property
    def n_head(self) -> int:
        return len(self.ranks)

    @property
    def width(self) -> int:
        """R"""
        return int(self.ratios.shape[1])

    @classmethod
    def make(
        cls,
        bands: Sequence[Sequence[Band]],
        encode: Sequence[npt.NDArray[np.float16]],
        decode: Sequence[npt.NDArray[np.float16]],
        subtracted: Sequence[npt.NDArray[np.float32]] | None = None,
        device: torch.device | str = "cpu",
    ) -> Codecs:
        """Of every KV head: its bands, E and D [rank][d] and, where rows are coded less their mean, E mean [rank].

        Raises ValueError where the bands are not those of FORMAT.md or do not fit the matrices.
        """
        ranks = tuple(sum(n for n, _, _ in head) for head in bands)
        for h, (head, rank, e, d) in enumerate(zip(bands, ranks, encode, decode, strict=True)):
            for n, bits, ratio in head:
                if n <= 0 or n % 8 != 0 or bits not in (*PLANES, 16) or not 0 < ratio < np.inf:
                    raise ValueError(
                        f"head {h}: bands of 8 k coefficients, 2, 3, 4, 5, 6, 8 or 16 bits and a positive ratio "
                        f"expected, {n} of {bits} bits and ratio {ratio} found"
                    )
            if e.shape != d.shape or e.shape != (rank, encode[0].shape[1]):
                raise ValueError(
                    f"head {h}: E and D of shape ({rank}, {encode[0].shape[1]}) expected, {e.shape} and {d.shape} found"
                )
        width = triton.next_power_of_2(max(MIN_WIDTH, *ranks))
        lengths = [1 + sum(n * bits // 8 for n, bits, _ in head) for head in bands]
        tables = [_tables(head, width, max(lengths)) for head in bands]

        def stacked(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
            return torch.from_numpy(np.stack(arrays)).to(device)

        def padded(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
            return stacked([np.concatenate([a, np.zeros((width - len(a), *a.shape[1:]), a.dtype)]) for a in arrays])

        return cls(
            d=int(encode[0].shape[1]),
            ranks=ranks,
            row_bytes=sum(lengths),
            any_half=any(bits == 16 for head in bands for _, bits, _ in head),
            offsets=torch.tensor([sum(lengths[:h]) for h in range(len(bands))], dtype=torch.int32, device=device),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            coefficients=stacked([t.coefficients for t in tables]),
            packing=stacked([t.packing for t in tables]),
            ratios=stacked([t.ratios for t in tables]),
            zeros=stacked([t.zeros for t in tables]),
            encode=padded(encode),
            decode=padded(decode),
            subtracted=None if subtracted is None else padded(subtracted),
        )


@dataclass
class _Tables:
    """The part of one head in Codecs' tensors of the same names."""

    coefficients: npt.NDArray[np.int32]
    packing: npt.NDArray[np.int32]
    ratios: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.float32]

    def plane(self, first: int, n: int, bits: int, at: int, up: int, high: bool) -> None:
        """`bits` bits, from bit `up` of the codes on, of n coefficients from number `first` on; its bytes: `at` on."""
        size = n * bits // 8
        for j in range(n):
            byte, slot = at + j % size, j // size
            self.coefficients[(HIGH, HIGH_SHIFT, HIGH_MASK) if high else (LOW, LOW_SHIFT, LOW_MASK), first + j] = (
                byte,
                bits * slot,
                2**bits - 1,
            )
            if high:
                self.coefficients[UP, first + j] = up
            self.packing[:, slot, byte] = first + j, up, 2**bits - 1, bits * slot

    def halves(self, first: int, n: int, at: int) -> None:
        """n little-endian halves: their bits are a code of 16."""
        for j in range(n):
            self.coefficients[:, first + j] = at + 2 * j, 0, 255, at + 2 * j + 1, 0, 255, 8, HALF
            self.packing[:, 0, at + 2 * j] = first + j, 0, 255, 0
            self.packing[:, 0, at + 2 * j + 1] = first + j, 8, 255, 0


def _tables(bands: Sequence[Band], width: int, n_bytes: int) -> _Tables:
    tables = _Tables(
        np.zeros((8, width), np.int32),
        np.zeros((4, SLOTS, n_bytes), np.int32),
        np.ones(width, np.float32),
        np.zeros(width, np.float32),
    )
    first, at = 0, 1
    for n, bits, ratio in bands:
        if bits == 16:
            tables.halves(first, n, at)
        else:
            tables.coefficients[KIND, first : first + n] = CODED
            tables.ratios[first : first + n] = ratio
            tables.zeros[first : first + n] = (2**bits - 1) / 2
            up = 0
            for i, plane in enumerate(PLANES[bits]):
                tables.plane(first, n, plane, at + n * up // 8, up, high=i > 0)
                up += plane
        first, at = first + n, at + n * bits // 8
    return tables
