"""encode_rows, dequantize_rows and to_half of every version, against numpy and against the reference."""

from __future__ import annotations

import ctypes as ct

import layouts
import numpy as np
import ops as o
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SWEEP = pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=layouts.name)


def encode(table: o.Ops, head: o.Head, x: o.F32, cells: list[int], rows: o.U8, ldx: int | None = None) -> int:
    index = np.array(cells, np.int64)
    n = len(cells)
    bad = table.encode_rows(head.ref(), o.ptr(x), ldx or x.shape[1], n, o.ptr(index), o.ptr(rows), rows.strides[0])
    return int(bad)


def check_dequantize(table: o.Ops, layout: o.Layout, n: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head = o.make_head(layout, layouts.head_size(layout), rng)
    rows = o.random_rows(head, n, rng, head.row_bytes + extra)
    got = np.full((n + 1, head.rank), 7.0, np.float32)
    table.dequantize_rows(head.ref(), o.ptr(rows), rows.strides[0], n, o.ptr(got))
    want = o.dequantize(head, rows)
    # two roundings: scale * ratio, times the centred code
    assert np.all(np.abs(got[:n] - want) <= 2 * o.EPS * np.abs(want))
    assert np.all(got[n] == 7.0)


@SWEEP
@pytest.mark.parametrize("extra", [0, 5])
def test_dequantize_follows_the_format(table: o.Ops, layout: o.Layout, extra: int) -> None:
    for n in (0, 1, 9):
        check_dequantize(table, layout, n, extra, seed=n)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts.layouts(), seed=st.integers(0, 2**32 - 1))
def test_dequantize_any_layout(table: o.Ops, layout: o.Layout, seed: int) -> None:
    check_dequantize(table, layout, 4, 0, seed)


@SWEEP
def test_bytes_depend_on_the_coefficients_alone(table: o.Ops, ref: o.Ops, layout: o.Layout) -> None:
    rng = np.random.default_rng(11)
    head = o.make_head(layout, layouts.head_size(layout), rng, orthonormal=True)
    n = 67
    x = (rng.standard_normal((n, head.codec.d)) * 10.0 ** rng.uniform(-7, 6, (n, 1))).astype(np.float32)
    x[3] = np.float32(1e30)
    x[4, 1:] = 0
    x[5] = 1e-30
    x[6, ::2] = 0
    got, want = (np.zeros((n, head.row_bytes), np.uint8) for _ in range(2))
    assert encode(table, head, x, list(range(n)), got) == 0
    assert encode(ref, head, x, list(range(n)), want) == 0
    assert np.array_equal(got, want)
    head.codec.d, head.codec.encode = head.rank, None  # coefficients themselves, out of longer rows
    got[:] = 0xAA
    assert encode(table, head, x, list(range(n)), got) == 0
    assert np.array_equal(got, want)


@SWEEP
def test_offset_is_subtracted_from_the_coefficients(table: o.Ops, ref: o.Ops, layout: o.Layout) -> None:
    """c = E x − offset gives the bytes of the coefficients themselves; a row that becomes zero is a zero row."""
    rng = np.random.default_rng(13)
    d, n = layouts.head_size(layout), 40
    offset = rng.standard_normal(sum(m for m, _ in layout)).astype(np.float32)
    plain = o.make_head(layout, d, np.random.default_rng(0), orthonormal=True)
    shifted = o.make_head(layout, d, np.random.default_rng(0), orthonormal=True, subtracted=offset)
    x = (rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-3, 4, (n, 1))).astype(np.float32)
    x[3, : len(offset)] = offset
    x[4] = 0
    x[5, 0] = np.nan
    c = x.copy()
    c[:, : len(offset)] -= offset
    got, want = (np.full((n, plain.row_bytes), 0xAA, np.uint8) for _ in range(2))
    assert encode(table, shifted, x, list(range(n)), got) == 1
    assert encode(ref, plain, c, list(range(n)), want) == 1
    assert np.array_equal(got, want)
    assert not got[3].any() and got[4, 0] != 0 and not got[5].any()


def candidate_errors(head: o.Head, c: o.F64) -> dict[int, float]:
    """Squared error of every scale code that encode may choose, in double."""
    bits = np.repeat([b for _, b in head.layout], [n for n, _ in head.layout])
    coded = bits != 16
    half = (2.0 ** bits[coded] - 1) / 2
    ratio = head.coefficient_ratio[coded].astype(np.float64)
    c = c[coded]
    reach = np.float32((np.abs(c) / (ratio * half)).max())
    k0 = next((k for k in range(1, 255) if o.SCALES[k] >= reach), 255)
    out = {}
    for k in range(k0, max(0, k0 - 11), -1):
        step = float(o.SCALES[k]) * ratio
        u = np.clip(np.rint(c / step + half), 0, 2 * half)
        out[k] = float(((c - step * (u - half)) ** 2).sum())
    return out


@SWEEP
def test_scale_is_the_best_candidate(table: o.Ops, layout: o.Layout) -> None:
    rng = np.random.default_rng(5)
    head = o.make_head(layout, layouts.head_size(layout), rng)
    n = 24
    x = (rng.standard_normal((n, head.codec.d)) * 10.0 ** rng.uniform(-3, 3, (n, 1))).astype(np.float32)
    rows = np.zeros((n, head.row_bytes), np.uint8)
    assert encode(table, head, x, list(range(n)), rows) == 0
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
    encode(table, head, x, [0], rows)
    assert rows[0].tolist() == [160, 255, 255]


@SWEEP
def test_zero_and_nonfinite_rows(table: o.Ops, layout: o.Layout) -> None:
    rng = np.random.default_rng(2)
    head = o.make_head(layout, layouts.head_size(layout), rng)
    x = rng.standard_normal((6, head.codec.d)).astype(np.float32)
    x[0] = 0
    x[1, 0] = np.nan
    x[2, -1] = np.inf
    x[3, 1] = -np.inf
    x[4] = -0.0
    rows = np.full((6, head.row_bytes), 0xAA, np.uint8)
    assert encode(table, head, x, list(range(6)), rows) == 3
    assert np.all(rows[:5] == 0)
    assert rows[5, 0] != 0
    assert np.all(o.dequantize(head, rows)[:5] == 0)


@SWEEP
def test_encode_stays_inside_its_row(table: o.Ops, layout: o.Layout) -> None:
    rng = np.random.default_rng(3)
    head = o.make_head(layout, layouts.head_size(layout), rng)
    ldx = head.codec.d + 3
    x = rng.standard_normal((40, ldx)).astype(np.float32)
    x[:, head.codec.d :] = np.nan  # padding of the input is not read
    cells = rng.permutation(60)[:40].tolist()
    rows = np.full((60, head.row_bytes + 7), 0xAA, np.uint8)
    assert encode(table, head, x, cells, rows, ldx) == 0
    assert np.all(rows[:, head.row_bytes :] == 0xAA)
    assert np.all(rows[sorted(set(range(60)) - set(cells))] == 0xAA)
    assert encode(table, head, x, [], rows, ldx) == 0
    single = np.zeros((1, head.row_bytes), np.uint8)
    for t, cell in enumerate(cells):
        encode(table, head, x[t : t + 1], [0], single, ldx)
        want = o.dequantize(head, single)
        # one token at a time may round a coefficient differently, which moves a code by at most one step
        step = float(o.SCALES[single[0, 0]]) * head.coefficient_ratio
        tie = np.where(np.repeat([b for _, b in layout], [n for n, _ in layout]) == 16, 0.01, 1.01 * step)
        if rows[cell, 0] == single[0, 0]:
            assert np.all(np.abs(o.dequantize(head, rows[cell : cell + 1]) - want) <= tie)


def test_half_band_saturates(table: o.Ops) -> None:
    head = o.make_head(((8, 16),), 8, np.random.default_rng(0), orthonormal=True)
    x = np.array([[1e6, -1e6, 65504, 65519.9, 65520, 6e-8, 1, -0.0]], np.float32)
    rows = np.zeros((1, head.row_bytes), np.uint8)
    assert encode(table, head, x, [0], rows) == 0
    want = [65504, -65504, 65504, 65504, 65504, 2.0**-24, 1, 0]
    assert o.dequantize(head, rows)[0].tolist() == want
    assert rows[0, 0] == o.SCALE_ONE


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 65536])
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
    assert ct.sizeof(o.HeadCodec) == 16 + 8 * 20 + 24
    assert ct.sizeof(o.AttendArgs) == 19 * 8
    assert ct.sizeof(o.ExactArgs) == 16 * 8
    assert ct.sizeof(o.Ops) == 10 * 8
