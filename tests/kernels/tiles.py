"""Tables of bit positions in rows and tiles (ops.h and tiles.h): numpy moves bits of rows into tiles and back.

A tile has TILE rows of one head in another order of bits. This file computes nothing with codes.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from subkv_triton.widths import PLANES

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Layout = tuple[tuple[int, int], ...]  # (n, bits) of every band

TILE = LINE = 64
# An octet's lines: the contents of their bytes' bits, lowest first. "rb" is bit b of a code of register r.
LINES = {
    2: ["00 01 10 11 20 21 30 31", "40 41 50 51 60 61 70 71"],
    3: ["00 01 02 40 41 42 30 31", "10 11 12 50 51 52 70 71", "20 21 22 60 61 62 32 72"],
    4: ["00 01 02 03 40 41 42 43", "10 11 12 13 50 51 52 53", "20 21 22 23 60 61 62 63", "30 31 32 33 70 71 72 73"],
    5: [
        "00 01 02 03 04 50 51 52",
        "10 11 12 13 14 53 54 73",
        "20 21 22 23 24 60 61 62",
        "30 31 32 33 34 63 64 74",
        "40 41 42 43 44 70 71 72",
    ],
    6: [
        "00 01 02 03 04 05 30 31",
        "10 11 12 13 14 15 32 33",
        "20 21 22 23 24 25 34 35",
        "40 41 42 43 44 45 70 71",
        "50 51 52 53 54 55 72 73",
        "60 61 62 63 64 65 74 75",
    ],
    8: [" ".join(f"{register}{bit}" for bit in range(8)) for register in range(8)],
}


def row_bytes(layout: Layout) -> int:
    return 1 + sum(n * bits // 8 for n, bits in layout)


@functools.cache
def band_in_row(n: int, bits: int) -> I64:
    """[n][bits]: position of bit b of the code of coefficient j in the band's bytes of a row."""
    if bits == 16:
        return np.arange(n * bits).reshape(n, bits)
    out = np.empty((n, bits), np.int64)
    at = first = 0
    for width in PLANES[bits]:
        m = n * width // 8  # bytes of the plane
        for j in range(n):
            out[j, first : first + width] = 8 * (at + j % m) + width * (j // m) + np.arange(width)
        at, first = at + m, first + width
    return out


@functools.cache
def octet_in_tile(bits: int, value: bool) -> I64:
    """[TILE][8][bits]: position of bit b of the code of coefficient j and cell c in the octet's lines."""
    if bits == 16:
        c, j, b = np.ogrid[:TILE, :8, :16]
        return 8 * (128 * j + 2 * c) + b
    out = np.full((TILE, 8, bits), -1)
    byte = np.arange(LINE)
    for line, content in enumerate(LINES[bits]):
        for bit_of_byte, (register, b) in enumerate(content.split()):
            rho = int(register)
            if value:
                c, j = 8 * rho + byte % 8, byte // 8
            else:
                c, j = 16 * (rho % 4) + byte // 4, 4 * (rho // 4) + byte % 4
            out[c, j, int(b)] = 8 * (LINE * line + byte) + bit_of_byte
    return out


@functools.lru_cache(64)
def places(layout: Layout, value: bool) -> I64:
    """[TILE][8 * row_bytes]: position in the tile of a bit of a cell's row."""
    out = np.full((TILE, 8 * row_bytes(layout)), -1)
    out[:, :8] = 8 * np.arange(TILE)[:, None] + np.arange(8)  # scale codes
    at = 1
    for n, bits in layout:
        in_row = 8 * at + band_in_row(n, bits)
        for first in range(0, n, 8):
            octet = 8 * (TILE * at + first // 8 * bits * LINE)
            out[:, in_row[first : first + 8]] = octet + octet_in_tile(bits, value)
        at += n * bits // 8
    return out


def of_rows(layout: Layout, value: bool, rows: U8) -> U8:
    """Rows [n_tiles * TILE][row_bytes] -> tiles [n_tiles][TILE * row_bytes]."""
    bits = np.unpackbits(rows, axis=1, bitorder="little").reshape(-1, TILE, 8 * row_bytes(layout))
    out = np.zeros((len(bits), 8 * TILE * row_bytes(layout)), np.uint8)
    out[:, places(layout, value)] = bits
    return np.packbits(out, axis=1, bitorder="little")


def to_rows(layout: Layout, value: bool, tiles: U8) -> U8:
    """Tiles [n_tiles][TILE * row_bytes] -> rows [n_tiles * TILE][row_bytes]."""
    bits = np.unpackbits(tiles, axis=1, bitorder="little")[:, places(layout, value)]
    return np.packbits(bits.reshape(len(tiles) * TILE, -1), axis=1, bitorder="little")
