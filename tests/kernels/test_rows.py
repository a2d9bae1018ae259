"""encode, dequantize and to_half of every version, against numpy and against the reference; tiles: test_tiles.py."""

from __future__ import annotations

import ctypes as ct

import layouts
import numpy as np
import ops as o
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SWEEP = each("layout", layouts.LAYOUTS)
SIDES = each("value", [False, True])


def check_dequantize(table: o.Ops, head: o.Head, n: int, cells: list[int], extra: int, seed: int) -> None:
    """Compare the cells `cells` of n."""
    rows = o.random_rows(head, n, np.random.default_rng(seed))
    laid_out, index = o.to_tiles(head, rows, extra), np.array(cells, np.int64)
    got = np.full((len(cells) + 1, head.rank), 7.0, np.float32)
    table.dequantize(head.ref(), o.ptr(laid_out), laid_out.strides[0], len(cells), o.ptr(index), o.ptr(got))
    want = o.dequantize(head, rows[cells])
    # two roundings: scale * ratio, times the centred code
    assert np.all(np.abs(got[:-1] - want) <= 2 * o.EPS * np.abs(want))
    assert np.all(got[-1] == 7.0)


@SWEEP
@SIDES
@each("extra", [0, 5])
def test_dequantize_follows_the_format(table: o.Ops, layout: o.Layout, value: bool, extra: int) -> None:
    rng = np.random.default_rng(extra)
    head = o.make_head(layout, layouts.head_size(layout), rng, value=value)
    for cells in ([], [0], list(range(9)), list(range(130)), [int(c) for c in rng.integers(0, 130, 40)]):
        check_dequantize(table, head, 130, cells, extra, seed=len(cells))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=layouts.layouts(),
    value=st.booleans(),
    cells=st.lists(st.integers(0, 199), max_size=80),
    extra=st.sampled_from([0, 1, 64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dequantize_any_cells(
    table: o.Ops, layout: o.Layout, value: bool, cells: list[int], extra: int, seed: int
) -> None:
    head = o.make_head(layout, layouts.head_size(layout), np.random.default_rng(seed), value=value)
    check_dequantize(table, head, 200, cells, extra, seed)


@SWEEP
@SIDES
def test_bytes_depend_on_the_coefficients_alone(table: o.Ops, ref: o.Ops, layout: o.Layout, value: bool) -> None:
    rng = np.random.default_rng(11)
    head = o.make_head(layout, layouts.head_size(layout), rng, orthonormal=True, value=value)
    n = 67
    x = (rng.standard_normal((n, head.codec.d)) * 10.0 ** rng.uniform(-7, 6, (n, 1))).astype(np.float32)
    x[3] = np.float32(1e30)
    x[4, 1:] = 0
    x[5] = 1e-30
    x[6, ::2] = 0
    got, want = (np.zeros((n, head.row_bytes), np.uint8) for _ in range(2))
    assert o.encode(table, head, x, list(range(n)), got) == 0
    assert o.encode(ref, head, x, list(range(n)), want) == 0
    assert np.array_equal(got, want)
    head.codec.d, head.codec.encode = head.rank, o.Matrix()  # coefficients themselves, out of longer rows
    got[:] = 0xAA
    assert o.encode(table, head, x, list(range(n)), got) == 0
    assert np.array_equal(got, want)


@SWEEP
@SIDES
def test_offset_is_subtracted_from_the_coefficients(table: o.Ops, ref: o.Ops, layout: o.Layout, value: bool) -> None:
    """c = E x − offset gives the same bytes as the coefficients c as input; a row that becomes zero is a zero row."""
    rng = np.random.default_rng(13)
    d, n = layouts.head_size(layout), 40
    offset = rng.standard_normal(sum(m for m, _ in layout)).astype(np.float32)
    plain = o.make_head(layout, d, np.random.default_rng(0), orthonormal=True, value=value)
    shifted = o.make_head(layout, d, np.random.default_rng(0), orthonormal=True, subtracted=offset, value=value)
    x = (rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-3, 4, (n, 1))).astype(np.float32)
    x[3, : len(offset)] = offset
    x[4] = 0
    x[5, 0] = np.nan
    c = x.copy()
    c[:, : len(offset)] -= offset
    got, want = (np.full((n, plain.row_bytes), 0xAA, np.uint8) for _ in range(2))
    assert o.encode(table, shifted, x, list(range(n)), got) == 1
    assert o.encode(ref, plain, c, list(range(n)), want) == 1
    assert np.array_equal(got, want)
    assert not got[3].any() and got[4, 0] != 0 and got[5, 0] == o.SCALE_NAN and not got[5, 1:].any()


def candidate_errors(head: o.Head, c: o.F64) -> dict[int, float]:
    """Squared error of every scale code that encode may choose, in double."""
    bits = np.repeat([b for _, b in head.layout], [n for n, _ in head.layout])
    coded = bits != 16
    half = (2.0 ** bits[coded] - 1) / 2
    ratio = head.coefficient_step[coded].astype(np.float64)
    c = c[coded]
    reach = np.float32((np.abs(c) / (ratio * half)).max())
    k0 = next((k for k in range(1, o.SCALE_MOST) if o.SCALES[k] >= reach), o.SCALE_MOST)
    out = {}
    for k in range(k0, max(0, k0 - 11), -1):
        step = float(o.SCALES[k]) * ratio
        u = np.clip(np.rint(c / step + half), 0, 2 * half)
        out[k] = float(((c - step * (u - half)) ** 2).sum())
    return out


@SWEEP
@SIDES
def test_scale_is_the_best_candidate(table: o.Ops, layout: o.Layout, value: bool) -> None:
    rng = np.random.default_rng(5)
    head = o.make_head(layout, layouts.head_size(layout), rng, value=value)
    head.codec.path = o.PATH_NONE
    n = 24
    x = (rng.standard_normal((n, head.codec.d)) * 10.0 ** rng.uniform(-3, 3, (n, 1))).astype(np.float32)
    rows = np.zeros((n, head.row_bytes), np.uint8)
    assert o.encode(table, head, x, list(range(n)), rows) == 0
    c = x.astype(np.float64) @ head.encode.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(head.encode).astype(np.float64).T
    back = o.dequantize(head, rows)
    for t in range(n):
        noise = 16 * o.EPS * size[t]
        bits = np.repeat([b for _, b in head.layout], [n for n, _ in head.layout])
        half = np.abs(c[t] - back[t])[bits == 16]
        assert np.all(half <= (noise + 2.0**-11 * np.abs(c[t]) + 2.0**-25)[bits == 16])
        if not (bits != 16).any():
            assert rows[t, 0] == o.SCALE_ONE
            continue
        errors = candidate_errors(head, c[t])
        error = float((((c[t] - back[t])[bits != 16]) ** 2).sum())
        # rounding of the coefficients moves the root of the error by at most the norm of the noise
        assert np.sqrt(error) <= np.sqrt(min(errors.values())) * (1 + 1e-4) + 2 * np.linalg.norm(noise)


def test_ties_go_to_the_larger_scale(table: o.Ops) -> None:
    head = o.make_head(((8, 2),), 8, np.random.default_rng(0), orthonormal=True)
    x = np.zeros((1, 8), np.float32)
    x[0] = 1.5 * float(head.ratio[0])  # exact with s = 1, code 3 everywhere
    rows = np.zeros((1, head.row_bytes), np.uint8)
    o.encode(table, head, x, [0], rows)
    assert rows[0].tolist() == [160, 255, 255]


@SWEEP
@SIDES
def test_zero_and_nonfinite_rows(table: o.Ops, layout: o.Layout, value: bool) -> None:
    rng = np.random.default_rng(2)
    head = o.make_head(layout, layouts.head_size(layout), rng, value=value)
    x = rng.standard_normal((6, head.codec.d)).astype(np.float32)
    x[0] = 0
    x[1, 0] = np.nan
    x[2, -1] = np.inf
    x[3, 1] = -np.inf
    x[4] = -0.0
    rows = np.full((6, head.row_bytes), 0xAA, np.uint8)
    assert o.encode(table, head, x, list(range(6)), rows) == 3
    assert np.all(rows[[0, 4]] == 0) and 0 < rows[5, 0] <= o.SCALE_MOST
    assert np.all(rows[1:4, 0] == o.SCALE_NAN) and np.all(rows[1:4, 1:] == 0)
    back = np.full((6, head.rank), 7, np.float32)
    tiles, cells = o.to_tiles(head, rows), np.arange(6)
    table.dequantize(head.ref(), o.ptr(tiles), tiles.strides[0], 6, o.ptr(cells), o.ptr(back))
    for c in (back, o.dequantize(head, rows)):
        assert np.all(c[[0, 4]] == 0) and np.isnan(c[1:4]).all() and np.isfinite(c[5]).all()


N_STORED = 12  # tokens, which lie in three tiles


@SWEEP
@SIDES
@each("extra", [0, 7, 64])
def test_encode_stays_inside_its_cells(table: o.Ops, layout: o.Layout, value: bool, extra: int) -> None:
    rng = np.random.default_rng(3)
    head = o.make_head(layout, layouts.head_size(layout), rng, value=value)
    ldx = head.codec.d + 3
    x = rng.standard_normal((N_STORED, ldx)).astype(np.float32)
    x[:, head.codec.d :] = np.nan  # padding of the input is not read
    cells = rng.permutation(150)[:N_STORED].tolist()
    rows = np.full((150, head.row_bytes), 0xAA, np.uint8)
    assert o.encode(table, head, x, cells, rows, ldx, extra) == 0
    assert np.all(rows[sorted(set(range(150)) - set(cells))] == 0xAA)
    assert o.encode(table, head, x, [], rows, ldx, extra) == 0
    laid_out = o.to_tiles(head, np.zeros((N_STORED, head.row_bytes), np.uint8))
    for token in range(N_STORED):
        cell = np.array([token])
        one = (o.ptr(x[token : token + 1]), ldx, 1, o.ptr(cell), o.ptr(laid_out), laid_out.strides[0])
        assert table.encode(head.ref(), *one) == 0
    alone = o.to_rows(head, laid_out)[:N_STORED]
    got, want = (o.dequantize(head, coded) for coded in (rows[cells], alone))
    # one token at a time may round a coefficient differently, which moves a code by at most one step
    step = o.SCALES[alone[:, 0], None] * head.coefficient_step
    tie = np.where(np.repeat([b for _, b in layout], [n for n, _ in layout]) == 16, 0.01, 1.01 * step)
    same = rows[cells, 0] == alone[:, 0]
    assert same.any() and np.all((np.abs(got - want) <= tie)[same])


def test_half_band_saturates(table: o.Ops) -> None:
    head = o.make_head(((8, 16),), 8, np.random.default_rng(0), orthonormal=True)
    x = np.array([[1e6, -1e6, 65504, 65519.9, 65520, 6e-8, 1, -0.0]], np.float32)
    rows = np.zeros((1, head.row_bytes), np.uint8)
    assert o.encode(table, head, x, [0], rows) == 0
    want = [65504, -65504, 65504, 65504, 65504, 2.0**-24, 1, 0]
    assert o.dequantize(head, rows)[0].tolist() == want
    assert rows[0, 0] == o.SCALE_ONE


@each("n", [0, 1, 7, 8, 9, 65536])
def test_to_half_is_ieee(table: o.Ops, n: int) -> None:
    rng = np.random.default_rng(n)
    bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    if n == 65536:  # every half, and the middle between it and the next
        bits[::2] = np.arange(0, 65536, 2, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        bits[1::2] = bits[::2] + 0x1000
    x = bits.view(np.float32)
    got = np.full(n + 1, 0xABCD, np.uint16)
    table.to_half(o.ptr(x), o.ptr(got), n)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    nan = np.isnan(x)
    assert np.array_equal(got[:n][~nan], want.view(np.uint16)[~nan])
    assert np.all(np.isnan(got[:n].view(np.float16)[nan]))
    assert got[n] == 0xABCD


def test_struct_sizes() -> None:
    """The ctypes mirror has the layout that a 64-bit C++ compiler gives the structs."""
    assert ct.sizeof(o.Band) == 20
    assert ct.sizeof(o.HeadCodec) == 20 + 8 * 20 + 4 + 72  # 4 of padding
    assert ct.sizeof(o.AttendArgs) == 19 * 8
    assert ct.sizeof(o.ExactArgs) == 16 * 8
    assert ct.sizeof(o.Ops) == 12 * 8
