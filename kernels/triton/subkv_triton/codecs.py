"""Tables of one layer's K or V heads, which the kernels read.

Only these tables describe bit planes: a coefficient's entry names the one or two bytes with its code, a byte's entry
the up to eight coefficients with bits in it. So kernels need no case per width of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from subkv_triton.fields import HALF, LINE_FACTORS, Band, Fields, row_bytes
from subkv_triton.widths import PLANES

# Rows of Codecs.coefficients. A coefficient's index is the exclusive or of four parts, LOW, HIGH, ONE and TWO, each
# (byte AT >> FROM & BITS) << TO, packed into one word. LOW and HIGH are its code. ONE and TWO are the lowest bits of
# the codes one and two places before on a path (fields.Fields), with BITS 0 without a path.
LOW, HIGH, ONE, TWO, LEVELS, KIND, ON = range(7)
N_ROWS = 7
FROM, TO, BITS = 16, 19, 23
"""Lowest bits of the fields of a part's word; AT is below FROM."""
# The value of index i, with y = i - centre, is step sign(y) (|y| + max(|y| - double, 0) + max(|y| - triple, 0)). The
# lowest three bytes of LEVELS are twice the centre, double and triple.
# Rows of Codecs.places (coefficient, 2^bits) and of Codecs.place_numbers (step, bends, constants of lines)
PLACE, N_LEVELS = range(2)
PLACE_STEP, PLACE_DOUBLE, PLACE_TRIPLE, LINES = range(4)
N_PLACE_NUMBERS = LINES + len(LINE_FACTORS)
# Rows of Codecs.packing for a slot of a byte, which is (code of coefficient SOURCE >> DROP & MASK) << LIFT
SOURCE, DROP, MASK, LIFT = range(4)
SLOTS = 8

MIN_WIDTH = 16
"""Minimum size of a matrix for tensor cores."""


@dataclass(frozen=True)
class Codecs:
    """Tables of one layer's K or V: H KV heads of size d. R: largest rank, padded to a power of two of at least 16."""

    d: int
    ranks: tuple[int, ...]
    row_bytes: int
    """Bytes of one cell: the contiguous rows of all heads."""
    any_half: bool
    """Whether a band of 16 bits exists."""
    offsets: torch.Tensor
    """I32 [H]: byte at which a head's row begins."""
    lengths: torch.Tensor
    """I32 [H]: bytes of a head's row."""
    coefficients: torch.Tensor
    """I32 [H, N_ROWS, R]: positions of codes (rows LOW to ON), in bytes from the start of the head's row."""
    steps: torch.Tensor
    """F32 [H, R]: distance of adjacent levels, relative to the row's scale; 1 for halves and padding."""
    path_lengths: torch.Tensor
    """I32 [H]: places of the head's path, 0 without a path."""
    places: torch.Tensor
    """I32 [H, 2, T]: PLACE and N_LEVELS of each place; T: places of the longest path."""
    place_numbers: torch.Tensor
    """F32 [H, N_PLACE_NUMBERS, T]: rows PLACE_STEP to LINES, then the other lines."""
    packing: torch.Tensor
    """I32 [H, 4, SLOTS, B]: coefficients and bits of each byte (rows SOURCE to LIFT); zero for byte 0, the scale."""
    ratios: torch.Tensor
    """F32 [H, R]: ratio of the coefficient's band; 1 for halves and padding."""
    zeros: torch.Tensor
    """F32 [H, R]: the code of 0 without a path, (2^bits - 1)/2; 0 for halves and padding."""
    encode: torch.Tensor
    """F16 [H, R, d]: E, with zero rows beyond the rank."""
    decode: torch.Tensor
    """F16 [H, R, d]: D, with zero rows beyond the rank."""
    subtracted: torch.Tensor | None
    """F32 [H, R]: E mean, subtracted from coefficients before coding."""

    @property
    def n_head(self) -> int:
        return len(self.ranks)

    @property
    def width(self) -> int:
        """R, the padded rank."""
        return int(self.ratios.shape[1])

    @property
    def n_place(self) -> int:
        """T, the places of the longest path; 0 without paths."""
        return int(self.places.shape[2])

    @classmethod
    def make(
        cls,
        bands: Sequence[Sequence[Band]],
        encode: Sequence[npt.NDArray[np.float16]],
        decode: Sequence[npt.NDArray[np.float16]],
        subtracted: Sequence[npt.NDArray[np.float32]] | None = None,
        device: torch.device | str = "cpu",
    ) -> Codecs:
        """Tables from each KV head's bands, E and D [rank][d], and E mean [rank] if a mean is subtracted from rows.

        Raises ValueError if bands violate FORMAT.md or do not fit the matrices.
        """
        ranks = tuple(sum(n for n, _, _ in head) for head in bands)
        for h, (head, rank, e, d) in enumerate(zip(bands, ranks, encode, decode, strict=True)):
            for n, bits, ratio in head:
                if n <= 0 or n % 8 != 0 or bits not in (*PLANES, 16) or not 0 < ratio < np.inf:
                    raise ValueError(
                        f"head {h}: bands of 8 k coefficients, {', '.join(map(str, PLANES))} or 16 bits "
                        f"and a positive ratio expected, {n} of {bits} bits and ratio {ratio} found"
                    )
            if e.shape != d.shape or e.shape != (rank, encode[0].shape[1]):
                raise ValueError(
                    f"head {h}: E and D of shape ({rank}, {encode[0].shape[1]}) expected, {e.shape} and {d.shape} found"
                )
        width = triton.next_power_of_2(max(MIN_WIDTH, *ranks))
        lengths = [row_bytes(head) for head in bands]
        fields = [Fields.of(head, width) for head in bands]
        n_place = max(len(of.path.bits) for of in fields)

        def stacked(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(np.stack(arrays))).to(device)

        def padded(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
            return stacked([np.concatenate([a, np.zeros((width - len(a), *a.shape[1:]), a.dtype)]) for a in arrays])

        return cls(
            d=int(encode[0].shape[1]),
            ranks=ranks,
            row_bytes=sum(lengths),
            any_half=any(HALF in of.kind for of in fields),
            offsets=torch.tensor([sum(lengths[:h]) for h in range(len(bands))], dtype=torch.int32, device=device),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            coefficients=stacked([_coefficients(of) for of in fields]),
            steps=stacked([of.step for of in fields]),
            path_lengths=torch.tensor([len(of.path.bits) for of in fields], dtype=torch.int32, device=device),
            places=stacked([np.pad(_places(of), ((0, 0), (0, n_place - len(of.path.bits)))) for of in fields]),
            place_numbers=stacked([np.pad(_numbers(of), ((0, 0), (0, n_place - len(of.path.bits)))) for of in fields]),
            packing=stacked([_packing(of, max(lengths)) for of in fields]),
            ratios=stacked([of.ratio for of in fields]),
            zeros=stacked([of.zero for of in fields]),
            encode=padded(encode),
            decode=padded(decode),
            subtracted=None if subtracted is None else padded(subtracted),
        )


def _coefficients(of: Fields) -> npt.NDArray[np.int32]:
    """Codecs.coefficients of one head."""
    j = np.arange(len(of.kind))
    at = np.stack([of.byte[0], of.byte[1], *of.byte[0, of.before]])
    shift = np.stack([of.shift[0], of.shift[1], *of.shift[0, of.before]])
    bits = np.stack([*of.mask, of.on, of.on])
    to = np.stack([of.on, of.lift[1] + of.on, 0 * j, 0 * j + 1])
    parts = at | shift << FROM | to << TO | bits << BITS
    centre, double, triple = (np.minimum(2 * x, 255).astype(np.int32) for x in (of.centre, *of.bend))
    return np.stack([*parts, centre | double << 8 | triple << 16, of.kind, of.on]).astype(np.int32)


def _places(of: Fields) -> npt.NDArray[np.int32]:
    """Codecs.places of one head, with the length of its path."""
    return np.stack([of.path.coefficient, 1 << of.path.bits]).astype(np.int32)


def _numbers(of: Fields) -> npt.NDArray[np.float32]:
    """Codecs.place_numbers of one head, with the length of its path."""
    j = of.path.coefficient
    return np.concatenate([of.step[j][None], of.bend[:, j], of.path.lines]).astype(np.float32)


def _packing(of: Fields, n_bytes: int) -> npt.NDArray[np.int32]:
    """Codecs.packing of one head: the fields of `of`, indexed by byte."""
    packing = np.zeros((4, SLOTS, n_bytes), np.int32)
    part, j = np.nonzero(of.bits)
    slot = of.shift[part, j] // of.bits[part, j]
    packing[:, slot, of.byte[part, j]] = j, of.lift[part, j], of.mask[part, j], of.shift[part, j]
    return packing
