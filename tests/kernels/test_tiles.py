"""Tiles: the library's conversions of rows, against numpy's table of bit positions (tiles.py)."""

from __future__ import annotations

import ctypes as ct
import functools
from dataclasses import dataclass

import codec_numpy
import layouts
import numpy as np
import ops as o
import pytest
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops import TILE
from tiles import places

SEEDS = st.integers(0, 2**32 - 1)
ANY = given(layout=layouts.layouts(max_rank=256), value=st.booleans(), seed=SEEDS)
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NARROW = [((8, bits),) for bits in layouts.BITS]
SIDES = each("value", [False, True])


@pytest.fixture
def lib(tables: dict[str, o.Ops]) -> ct.CDLL:
    return o.load_library()


def any_head(layout: o.Layout, value: bool, rng: np.random.Generator, latent: bool = False) -> o.Head:
    return o.make_head(layout, sum(n for n, _ in layout), rng, orthonormal=True, value=value, latent=latent)


def any_bytes(rng: np.random.Generator, *shape: int) -> o.U8:
    return rng.integers(0, 256, shape, np.uint8)


@each("layout", [*NARROW, *layouts.LAYOUTS])
@SIDES
def test_every_bit_of_a_tile_is_one_of_a_row(layout: o.Layout, value: bool) -> None:
    at = places(layout, value)
    assert np.array_equal(np.sort(at, axis=None), np.arange(at.size))


@each("narrow", [*NARROW, None])
@EXAMPLES
@ANY
def test_a_row_becomes_a_cell_and_a_row(
    lib: ct.CDLL, narrow: o.Layout | None, layout: o.Layout, value: bool, seed: int
) -> None:
    """Every bit is at the position that numpy computes; other cells stay unchanged."""
    rng = np.random.default_rng(seed)
    head = any_head(narrow or layout, value, rng)
    tile, row, cell = any_bytes(rng, TILE * head.row_bytes), any_bytes(rng, head.row_bytes), int(rng.integers(TILE))
    rows = o.to_rows(head, tile[None])
    rows[cell] = row
    lib.row_to_tile(head.ref(), o.ptr(row), o.ptr(tile), cell)
    assert np.array_equal(tile, o.to_tiles(head, rows)[0])
    before = tile.copy()
    for c in {0, cell, TILE - 1}:
        back = any_bytes(rng, head.row_bytes + 1)
        guard = back[-1]
        lib.tile_to_row(head.ref(), o.ptr(tile), c, o.ptr(back))
        assert np.array_equal(back[:-1], rows[c]) and back[-1] == guard
    assert np.array_equal(tile, before)


@each("layout", [*NARROW, *layouts.LAYOUTS])
def test_values_are_the_first_bands_of_keys(lib: ct.CDLL, layout: o.Layout) -> None:
    rng = np.random.default_rng(4)
    keys, values = any_head((*layout, (8, 5))[:8], False, rng), any_head(layout, True, rng)
    tile, out = any_bytes(rng, TILE * keys.row_bytes), any_bytes(rng, TILE * values.row_bytes + 1)
    guard = out[-1]
    lib.keys_to_values(values.ref(), o.ptr(tile), o.ptr(out))
    expected = o.to_tiles(values, o.to_rows(keys, tile[None])[:, : values.row_bytes])
    assert np.array_equal(out[:-1], expected[0]) and out[-1] == guard


@each("narrow", [*NARROW, None])
@EXAMPLES
@ANY
def test_gathered_cells_are_their_rows(
    lib: ct.CDLL, narrow: o.Layout | None, layout: o.Layout, value: bool, seed: int
) -> None:
    """In the order of the list, from tiles and from rows with gaps; -1 and missing cells become zero rows."""
    rng = np.random.default_rng(seed)
    head = any_head(narrow or layout, value, rng)
    size, n = TILE * head.row_bytes, int(rng.integers(1, 2 * TILE))
    tiles = any_bytes(rng, 3, size + 64)
    cells = rng.integers(-1, 3 * TILE, n).astype(np.int32)
    out = any_bytes(rng, -(-n // TILE) * size + 1)
    guard = out[-1]
    lib.gather_cells(head.ref(), o.ptr(tiles), size + 64, o.ptr(cells), n, o.ptr(out))
    rows = o.to_rows(head, np.ascontiguousarray(tiles[:, :size]))
    gathered = o.to_rows(head, out[:-1].reshape(-1, size))
    assert np.array_equal(gathered[:n][cells >= 0], rows[cells[cells >= 0]]) and out[-1] == guard
    assert not gathered[:n][cells < 0].any() and not gathered[n:].any()

    apart = any_bytes(rng, 3 * TILE, head.row_bytes + 3)
    apart[:, : head.row_bytes] = rows
    from_rows = any_bytes(rng, len(out))
    guard = from_rows[-1]
    lib.rows_to_tiles(head.ref(), o.ptr(apart), head.row_bytes + 3, o.ptr(cells), n, o.ptr(from_rows))
    assert np.array_equal(from_rows[:-1], out[:-1]) and from_rows[-1] == guard
    lib.rows_to_tiles(
        head.ref(), o.ptr(apart), head.row_bytes + 3, None, 3 * TILE, o.ptr(whole := any_bytes(rng, 3, size))
    )
    assert np.array_equal(o.to_rows(head, whole), rows)


@EXAMPLES
@ANY
def test_a_tile_contains_only_its_rows(lib: ct.CDLL, layout: o.Layout, value: bool, seed: int) -> None:
    """All rows of one tile into another give the same bytes."""
    rng = np.random.default_rng(seed)
    head = any_head(layout, value, rng)
    one, other = any_bytes(rng, 2, TILE * head.row_bytes)
    row = np.empty(head.row_bytes, np.uint8)
    for c in range(TILE):
        lib.tile_to_row(head.ref(), o.ptr(one), c, o.ptr(row))
        lib.row_to_tile(head.ref(), o.ptr(row), o.ptr(other), c)
    assert np.array_equal(one, other)


@EXAMPLES
@ANY
def test_sides_differ_only_in_order(lib: ct.CDLL, layout: o.Layout, value: bool, seed: int) -> None:
    """The same rows are laid out as keys and as values by the library and by numpy."""
    rng = np.random.default_rng(seed)
    heads = any_head(layout, False, rng), any_head(layout, True, rng)
    rows = any_bytes(rng, TILE, heads[0].row_bytes)
    both = []
    for head in heads:
        tile = any_bytes(rng, TILE * head.row_bytes)
        for c, row in enumerate(rows):
            lib.row_to_tile(head.ref(), o.ptr(row), o.ptr(tile), c)
        assert np.array_equal(tile, o.to_tiles(head, rows)[0])
        assert np.array_equal(o.to_rows(head, tile[None]), rows)
        both.append(tile)
    only_halves = all(bits == 16 for _, bits in layout)
    assert np.array_equal(*both) == only_halves
    for part in [slice(0, TILE), *(slice(b.offset * TILE, (b.offset + b.n * b.bits // 8) * TILE)
                                   for b in heads[0].codec.bands[: len(layout)])]:  # fmt: skip
        counts = [np.unpackbits(tile[part]).sum() for tile in both]
        assert counts[0] == counts[1]


def coefficients(head: o.Head, n: int, rng: np.random.Generator) -> o.F32:
    """[n][rank] of very different sizes; some rows are zero, tiny, huge or not finite."""
    c = rng.standard_normal((n, head.rank)) * np.exp(3 * rng.standard_normal((n, 1)))
    kind = rng.integers(0, 12, n)
    c[kind == 0] = 0
    c[kind == 1] = 1e-30
    c[kind == 2] *= 1e5
    bad = np.flatnonzero(kind == 3)
    c[bad, rng.integers(0, head.rank, len(bad))] = rng.choice([np.nan, np.inf, -np.inf], len(bad))
    return c.astype(np.float32)


@EXAMPLES
@given(
    layout=layouts.layouts(),
    value=st.booleans(),
    latent=st.booleans(),
    n=st.integers(0, 150),
    extra=st.integers(0, 70),
    seed=SEEDS,
)
def test_encode_writes_the_rows_of_the_format(
    table: o.Ops, layout: o.Layout, value: bool, latent: bool, n: int, extra: int, seed: int
) -> None:
    """Into any cells of three tiles. Coefficients are the inputs, so every version writes the same bytes."""
    rng = np.random.default_rng(seed)
    head = any_head(layout, value, rng, latent)
    head.codec.encode = o.Matrix()
    c = coefficients(head, n, rng)
    cells = [int(i) for i in rng.permutation(3 * TILE)[:n]]
    rows = any_bytes(rng, 3 * TILE, head.row_bytes)
    want = rows.copy()
    want[cells] = codec_numpy.encode(c, layout, head.ratio, latent)
    assert o.encode(table, head, c, cells, rows, extra=extra) == np.count_nonzero(~np.isfinite(c).all(axis=1))
    assert np.array_equal(rows, want)


N_ROWS, SEED = 130, 5  # three tiles


@dataclass(frozen=True)
class Coded:
    """Coefficients [N_ROWS][rank] and their codes by numpy; `clean`: with zeros in non-finite rows."""

    c: o.F32
    rows: o.U8
    clean: o.F32
    clean_rows: o.U8
    clean_decoded: o.F32


@functools.cache  # numpy's encoder is slow, and every version of the kernels is compared with it
def coded_by_numpy(layout: o.Layout, value: bool, latent: bool) -> Coded:
    rng = np.random.default_rng(SEED)
    head = any_head(layout, value, rng, latent)
    c = coefficients(head, N_ROWS, rng)
    clean = np.where(np.isfinite(c).all(axis=1)[:, None], c, np.float32(0))  # NaN * 0 would spread through E
    rows = codec_numpy.encode(c, layout, head.ratio, latent)
    clean_rows = np.where(rows[:, :1] == o.SCALE_NAN, np.uint8(0), rows)
    return Coded(c, rows, clean, clean_rows, codec_numpy.decode(clean_rows, layout, head.ratio, latent))


@each("layout", layouts.LAYOUTS)
@SIDES
@each("latent", [False, True])
@each("n", [0, 1, 64, 65, N_ROWS])
def test_rows_through_tiles(lib: ct.CDLL, table: o.Ops, layout: o.Layout, value: bool, latent: bool, n: int) -> None:
    """encode_rows and dequantize_rows of ops.h with every version's ops, on inputs with gaps."""
    want = coded_by_numpy(layout, value, latent)
    head = any_head(layout, value, np.random.default_rng(SEED), latent)
    x = np.full((n, head.rank + 3), np.nan, np.float32)
    x[:, :-3] = want.clean[:n]
    rows = any_bytes(np.random.default_rng(n + 1), n + 1, head.row_bytes)
    guard = rows[n].copy()
    of, codec = ct.addressof(table), ct.addressof(head.codec)
    assert lib.encode_rows(of, codec, o.ptr(x), x.shape[1], n, o.ptr(rows)) == 0
    assert np.array_equal(rows[:n], want.clean_rows[:n])
    back = np.full((n + 1, head.rank), 7, np.float32)
    lib.dequantize_rows(of, codec, o.ptr(rows), n, o.ptr(back))
    np.testing.assert_allclose(back[:n], want.clean_decoded[:n], rtol=3e-7, atol=1e-30)
    assert np.array_equal(rows[n], guard) and np.all(back[n] == 7)
    head.codec.encode = o.Matrix()
    c = want.c[:n].copy()
    assert lib.encode_rows(of, codec, o.ptr(c), head.rank, n, o.ptr(rows)) == np.count_nonzero(
        ~np.isfinite(c).all(axis=1)
    )
    assert np.array_equal(rows[:n], want.rows[:n])
