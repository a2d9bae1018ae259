"""Tables of one layer's K or V heads, which the kernels read.

Only these tables describe the bits of rows: an octet's entry names the words with its codes, a byte's entry the up to
eight coefficients with bits in it. So kernels need no case per width of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from subkv_triton.fields import HALF, LINE_FACTORS, Band, Fields, Words, bits_of_codes, row_bytes
from subkv_triton.widths import BENDS, PLANES

# Rows of Codecs.coefficients. STORED: a 16-bit coefficient's number among those of the head
KIND, ON, STORED = range(3)
N_ROWS = 3
# Rows of Codecs.octets. The four parts of an octet's indices are each (word AT >> RIGHT) & BITS, eight numbers of four
# bits. ONE and TWO are then turned to the left, by adding their multiples by 2^TURN and 2^-BACK. On a path they are the
# lowest bits of the codes one and two places before. An index, of which coefficient i has bits 4 i to 4 i + 3, is
# 2 (LOW ^ TWO) | ONE | 32 HIGH
LOW, HIGH, ONE, TWO = (3 * part for part in range(4))
AT, RIGHT, BITS = range(3)
ONE_TURN, ONE_BACK, TWO_TURN, TWO_BACK = range(12, 16)
# Bytes, four of each in a word, from which attend computes levels (attend._levels)
FOLD, FILL, DOUBLE, TRIPLE = range(16, 20)
N_OCTET_ROWS = 20
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
    """Bytes of one cell, a multiple of 4: the words of all heads (fields.Words), then a byte with each head's scale."""
    scales_at: int
    """The first head's scale byte."""
    any_half: bool
    """Whether a band of 16 bits exists."""
    any_high: bool
    """Whether a code has two parts, LOW and HIGH."""
    offsets: torch.Tensor
    """I32 [H]: byte at which a head's words begin."""
    lengths: torch.Tensor
    """I32 [H]: bytes of a head's words."""
    coefficients: torch.Tensor
    """I32 [H, N_ROWS, R]: kinds of coefficients and places of halves (rows KIND to STORED)."""
    octets: torch.Tensor
    """I32 [H, N_OCTET_ROWS, R / 8]: words with codes, and numbers from which their levels follow."""
    order: torch.Tensor
    """I64 [8 * row_bytes]: one more than the bit of FORMAT.md's row at each bit of a cell's; 0 where there is none."""
    steps: torch.Tensor
    """F32 [H, R]: distance of adjacent levels, relative to the row's scale; 1 for halves and padding."""
    path_lengths: torch.Tensor
    """I32 [H]: places of the head's path, 0 without a path."""
    places: torch.Tensor
    """I32 [H, 2, T]: PLACE and N_LEVELS of each place; T: places of the longest path."""
    place_numbers: torch.Tensor
    """F32 [H, N_PLACE_NUMBERS, T]: rows PLACE_STEP to LINES, then the other lines."""
    packing: torch.Tensor
    """I32 [H, 4, SLOTS, B]: coefficients and bits of each byte (rows SOURCE to LIFT)."""
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

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows U8 [..., bytes of FORMAT.md's rows] in this package's order, [..., row_bytes]."""
        bits = _bits(rows)
        return _bytes(torch.cat([torch.zeros_like(bits[..., :1]), bits], -1)[..., self.order])

    def to_rows(self, cells: torch.Tensor) -> torch.Tensor:
        """The inverse of from_rows."""
        out = cells.new_zeros((*cells.shape[:-1], 1 + int(self.order.max())))
        out[..., self.order] = _bits(cells[..., : self.row_bytes])
        return _bytes(out[..., 1:])

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
        fields = [Fields.of(head, width) for head in bands]
        words = [Words.of(head, width) for head in bands]
        lengths = [of.n_bytes for of in words]
        n_place = max(len(of.path.bits) for of in fields)

        def stacked(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(np.stack(arrays))).to(device)

        def padded(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
            return stacked([np.concatenate([a, np.zeros((width - len(a), *a.shape[1:]), a.dtype)]) for a in arrays])

        return cls(
            d=int(encode[0].shape[1]),
            ranks=ranks,
            row_bytes=-(-(sum(lengths) + len(bands)) // 4) * 4,
            scales_at=sum(lengths),
            any_half=any(HALF in of.kind for of in fields),
            any_high=bool(any(of.size[1].any() for of in words)),
            offsets=torch.tensor([sum(lengths[:h]) for h in range(len(bands))], dtype=torch.int32, device=device),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            coefficients=stacked([np.stack([f.kind, f.on, w.half]) for f, w in zip(fields, words, strict=True)]),
            octets=stacked([_octets(*of) for of in zip(bands, fields, words, strict=True)]),
            order=torch.from_numpy(_order(bands, fields, words)).to(device),
            steps=stacked([of.step for of in fields]),
            path_lengths=torch.tensor([len(of.path.bits) for of in fields], dtype=torch.int32, device=device),
            places=stacked([np.pad(_places(of), ((0, 0), (0, n_place - len(of.path.bits)))) for of in fields]),
            place_numbers=stacked([np.pad(_numbers(of), ((0, 0), (0, n_place - len(of.path.bits)))) for of in fields]),
            packing=stacked([_packing(of, max(lengths)) for of in words]),
            ratios=stacked([of.ratio for of in fields]),
            zeros=stacked([of.zero for of in fields]),
            encode=padded(encode),
            decode=padded(decode),
            subtracted=None if subtracted is None else padded(subtracted),
        )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return ((x[..., None] >> torch.arange(8, dtype=torch.uint8, device=x.device)) & 1).flatten(-2)


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.uint8)


def _octets(bands: Sequence[Band], of: Fields, words: Words) -> npt.NDArray[np.int32]:
    """Codecs.octets of one head."""
    table = np.zeros((N_OCTET_ROWS, len(words.word[0])), np.int64)
    table[[ONE_BACK, TWO_BACK]], table[[DOUBLE, TRIPLE]] = 31, 127  # no turn, no bends

    def take(part: int, octet: int, piece: int, source: int, bits: int, skipped: int = 0) -> None:
        """Part `part` is `bits` bits of a piece of octet `source`, without its lowest `skipped` ones."""
        table[part + AT, octet] = words.word[piece, source]
        table[part + RIGHT, octet] = words.below[piece, source] + skipped
        table[part + BITS, octet] = 0x11111111 * ((1 << bits) - 1)

    def turn(rows: list[int], octet: int, bits: int) -> None:
        """A turn to the left; what leaves the word at its end enters at its start if `bits` is 4."""
        table[rows, octet] = bits, 28 if bits == 4 else 31

    octets = [bits for n, bits, _ in bands for _ in range(n // 8)]
    path = [octet for octet, bits in enumerate(octets) if bits in BENDS and len(of.path.bits)]
    for octet, bits in enumerate(octets):
        if bits == 16:
            continue
        low, high = (int(size) for size in words.size[:, octet])
        if octet in path:
            place = path.index(octet)
            take(LOW, octet, 0, octet, low)
            take(HIGH, octet, 1, octet, high)
            for part, rows, back in ((ONE, [ONE_TURN, ONE_BACK], 1), (TWO, [TWO_TURN, TWO_BACK], 2)):
                take(part, octet, 0, path[place - back], 1)
                turn(rows, octet, 4 if place < back else 0)  # the last places of the lane before
            table[[DOUBLE, TRIPLE], octet] = 255 - np.array(BENDS[bits])
        else:  # the index is the code
            take(LOW, octet, 0, octet, low - 1, 1)
            take(ONE, octet, 0, octet, 1)
            if bits == 3:
                take(HIGH, octet, 1, octet, 1)
            elif high:
                take(TWO, octet, 1, octet, 1)
                turn([TWO_TURN, TWO_BACK], octet, 3)
                take(HIGH, octet, 1, octet, high - 1, 1)
        largest = bits if octet in path else bits - 1  # bit of the index that is 1 for positive levels
        table[FOLD, octet] = 127 + (1 << largest)
        if bits == 3:  # that bit is bit 5
            table[FILL, octet] = 128 - (1 << largest)
    table[FOLD:] *= 0x01010101
    return table.astype(np.uint32).view(np.int32)


def _order(bands: Sequence[Sequence[Band]], fields: Sequence[Fields], words: Sequence[Words]) -> npt.NDArray[np.int64]:
    """Codecs.order."""
    order, first = [], 0  # of the head's row
    scales = []
    for head, of, laid_out in zip(bands, fields, words, strict=True):
        from_bits, to_bits = bits_of_codes(of), bits_of_codes(laid_out)
        of_head = np.zeros(8 * laid_out.n_bytes, np.int64)
        of_head[to_bits[to_bits >= 0]] = 1 + 8 * first + from_bits[to_bits >= 0]
        order.append(of_head)
        scales.append(1 + 8 * first + np.arange(8))
        first += row_bytes(head)
    every = np.concatenate(order + scales)
    return np.pad(every, (0, -len(every) % 32))


def _places(of: Fields) -> npt.NDArray[np.int32]:
    """Codecs.places of one head, with the length of its path."""
    return np.stack([of.path.coefficient, 1 << of.path.bits]).astype(np.int32)


def _numbers(of: Fields) -> npt.NDArray[np.float32]:
    """Codecs.place_numbers of one head, with the length of its path."""
    j = of.path.coefficient
    return np.concatenate([of.step[j][None], of.bend[:, j], of.path.lines]).astype(np.float32)


def _packing(of: Words, n_bytes: int) -> npt.NDArray[np.int32]:
    """Codecs.packing of one head: the bits of `of`, indexed by byte."""
    packing = np.zeros((4, SLOTS, n_bytes), np.int32)
    part, j = np.nonzero(of.bits)
    mask = (1 << of.bits[part, j]) - 1
    packing[:, of.shift[part, j], of.byte[part, j]] = j, of.lift[part, j], mask, of.shift[part, j]
    return packing
