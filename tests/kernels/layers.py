"""Layers of several KV heads with different bands, as in planned layouts; a cell's row has the rows of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import layouts
import numpy as np
import ops as o

WIDE = layouts.MIXED[4]  # every width of codes
LAYERS: dict[str, tuple[Sequence[o.Layout], Sequence[o.Layout]]] = {
    "planned": ([layouts.MIXED[0], layouts.MIXED[2], WIDE], [layouts.MIXED[1], WIDE, ((8, 2),)]),
    "one_head": ([((64, 8),)], [((64, 4),)]),
    **{f"{b}_bits": ([((24, b),), ((8, b), (16, 4))], [((16, 3), (24, b)), ((8, b),)]) for b in layouts.BITS},
    "large": ([layouts.MIXED[8]], [((128, 4),)]),
    "widest": ([((256, 8),)], [((256, 8),)]),
}
"""Bands of every head's keys and values, by name."""

WIDE_HEADS: dict[str, tuple[Sequence[o.Layout], Sequence[o.Layout]]] = {
    "above_256": ([((320, 4), (152, 3), (40, 16))], [((512, 5),)]),
}
"""The same for heads that CUDA's decode kernel does not support."""

LATENT: dict[str, tuple[o.Layout, int, int, int]] = {
    "latent": (((320, 4), (64, 8), (48, 3)), 2, 448, 400),
    "latent_small": (((16, 16), (16, 6), (16, 2)), 1, 48, 32),
    "latent_plain": (((8, 8), (16, 4), (8, 8)), 2, 40, 24),
}
"""Latent layers: bands of keys, the number of leading bands that are values, and the sizes of keys and values."""


@dataclass
class Side:
    """K or V of a layer: a codec per head."""

    heads: list[o.Head]
    d: int

    @classmethod
    def make(
        cls,
        bands: Sequence[o.Layout],
        d: int,
        seed: int,
        orthonormal: bool = False,
        centred: bool = False,
        value: bool = False,
        latent: bool = False,
    ) -> Side:
        rng = np.random.default_rng(seed)
        means = [rng.standard_normal(sum(n for n, _ in b)).astype(np.float32) if centred else None for b in bands]
        heads = [o.make_head(b, d, rng, orthonormal, mean, value, latent) for b, mean in zip(bands, means, strict=True)]
        return cls(heads, d)

    @classmethod
    def latent(cls, name: str, seed: int, orthonormal: bool = False) -> tuple[Side, Side]:
        """Keys of a latent layer, and values with the same codes and the first elements of the same basis."""
        bands, n_bands, d_k, d_v = LATENT[name]
        keys = cls.make([bands], d_k, seed, orthonormal, latent=True)
        values = cls.make([bands[:n_bands]], d_v, seed, value=True, latent=True)
        (key,), (value,) = keys.heads, values.heads
        value.encode = np.ascontiguousarray(key.encode[: value.rank, :d_v])
        value.ratio = key.ratio[:n_bands]
        for band, of_key in zip(value.codec.bands[:n_bands], key.codec.bands[:n_bands], strict=True):
            band.ratio = of_key.ratio
        value.codec.path = key.codec.path
        return keys, values

    @property
    def row_bytes(self) -> int:
        return sum(head.row_bytes for head in self.heads)

    def parts(self) -> list[slice]:
        """The bytes of every head in a cell's row."""
        ends = np.cumsum([head.row_bytes for head in self.heads])
        return [slice(int(end) - head.row_bytes, int(end)) for end, head in zip(ends, self.heads, strict=True)]

    def random_rows(self, n: int, rng: np.random.Generator, extra: int) -> o.U8:
        """U8 [n][row_bytes + extra]"""
        rows = rng.integers(0, 256, (n, self.row_bytes + extra), np.uint8)
        for head, part in zip(self.heads, self.parts(), strict=True):
            rows[:, part] = o.random_rows(head, n, rng)
        return rows

    def to_tiles(self, rows: o.U8) -> o.U8:
        """Tiles of all heads [n_tiles][TILE * (row_bytes + extra)] of rows [n][row_bytes + extra].

        Cells beyond n and bytes of no head are random.
        """
        shape = (-(-len(rows) // o.TILE), o.TILE * rows.shape[1])
        out = np.random.default_rng(len(rows)).integers(0, 256, shape, np.uint8)
        for head, part in zip(self.heads, self.parts(), strict=True):
            out[:, o.TILE * part.start : o.TILE * part.stop] = o.to_tiles(head, rows[:, part])
        return out

    def to_rows(self, tiles: o.U8) -> o.U8:
        """Rows [n_tiles * TILE][row_bytes] of such tiles."""
        parts = [tiles[:, o.TILE * part.start : o.TILE * part.stop] for part in self.parts()]
        return np.concatenate([o.to_rows(head, part) for head, part in zip(self.heads, parts, strict=True)], axis=1)


def head_size(bands: Sequence[o.Layout]) -> int:
    return layouts.head_size(max(bands, key=lambda b: sum(n for n, _ in b)))


def encode_with(table: o.Ops, side: Side, x: o.F32, cells: list[int], n_cells: int, extra: int) -> tuple[o.U8, int]:
    """x [n][H][d] encoded head by head -> rows [n_cells][row_bytes + extra], 0xAA where not written; bad rows."""
    rows = np.full((n_cells, side.row_bytes + extra), 0xAA, np.uint8)
    bad = 0
    for h, (head, part) in enumerate(zip(side.heads, side.parts(), strict=True)):
        bad += o.encode(table, head, x[:, h], cells, rows[:, part], ldx=x.shape[1] * side.d)
    return rows, bad


def inputs_to_encode(n: int, n_head: int, d: int, rng: np.random.Generator) -> o.F32:
    """Rows of all magnitudes: tiny, huge, zero and not finite."""
    x = (rng.standard_normal((n, n_head, d)) * 10.0 ** rng.uniform(-7, 6, (n, n_head, 1))).astype(np.float32)
    x[0, 0] = np.float32(1e30)
    x[1, 0] = 0
    x[2, :, 1:] = 0
    x[3, 0, 0] = np.nan
    x[4, 0, -1] = np.inf
    return x
