"""Rows coded by a trellis (kernels/ref/trellis.cpp) against numpy, brute force and required properties.

Versions: test_rows.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import cases
import codec_numpy
import layouts
import numpy as np
import ops as o
import pytest
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trellis_numpy import Path

from subkv.plan.quantizer import distortion

# step of a unit Gaussian, and the squared error of the best quantizer of as many levels (Lloyd, Max)
STEP = {2: 0.4098, 3: 0.2361, 4: 0.1200, 5: 0.0665, 6: 0.0343}
SCALAR = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.000642}


@pytest.fixture(scope="module")
def lib() -> Any:
    return o.load_library()


def head_of(layout: o.Layout, seed: int = 0, latent: bool = False) -> o.Head:
    rank = sum(n for n, _ in layout)
    return o.make_head(layout, rank, np.random.default_rng(seed), orthonormal=True, latent=latent)


def encoded(head: o.Head, c: o.F32) -> tuple[o.U8, int]:
    """Rows of coefficients by the reference, and the number of non-finite rows."""
    rows = np.zeros((len(c), head.row_bytes), np.uint8)
    n_bad = o.encode(o.versions()["ref"], head, np.ascontiguousarray(c), list(range(len(c))), rows)
    return rows, n_bad


def decoded(lib: Any, head: o.Head, rows: o.U8) -> o.F32:
    c = np.full((len(rows) + 1, head.rank), 7.0, np.float32)
    lib.dequantize_rows(lib.subkv_ops_table(0), head.ref(), o.ptr(np.ascontiguousarray(rows)), len(rows), o.ptr(c))
    assert np.all(c[-1] == 7.0)
    return c[:-1]


@each("bits", STEP)
def test_levels(lib: Any, bits: int) -> None:
    """Levels are ascending, symmetric about 0, and fit a byte."""
    levels = np.array([lib.trellis_level(bits, i) for i in range(2 ** (bits + 1))])
    assert np.all(levels + 0.5 == o.alphabet(bits))
    assert np.all(np.diff(levels) > 0) and np.all(levels + levels[::-1] == -1)
    assert levels[0] >= -128 and levels[-1] <= 127


@each("layout", layouts.LAYOUTS)
def test_rows_of_any_bytes_decode_by_the_definition(lib: Any, layout: o.Layout) -> None:
    """Also damaged rows: every byte is a valid code, and every coefficient is finite."""
    head = head_of(layout)
    rows = o.random_rows(head, 50, np.random.default_rng(3))
    got, want = decoded(lib, head, rows), o.dequantize(head, rows)
    assert np.all(np.isfinite(got))
    assert np.all(np.abs(got - want) <= 3 * o.EPS * np.abs(want))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts.layouts(), seed=st.integers(0, 2**32 - 1))
def test_every_path_is_recovered(lib: Any, layout: o.Layout, seed: int) -> None:
    """Any codes are a path: coefficients that are exact at some scale are encoded without error."""
    rng = np.random.default_rng(seed)
    head = head_of(layout, seed % 1000)
    rows = o.random_rows(head, 3, rng)
    path = {j for j, _ in o.path_of(head)}
    for row in rows:
        row[0] = 160
        c = decoded(lib, head, row[None])
        code = np.full(head.rank, 255, np.uint8)
        error = lib.find_path(head.ref(), o.ptr(c), 1.0, o.ptr(code))
        assert error <= 1e-9 * float((c.astype(np.float64) ** 2).sum())
        on_path = [j for j in range(head.rank) if j in path]
        assert np.array_equal(code[on_path], o.codes_of(head, row[None])[0][on_path].astype(np.uint8))
        assert np.all(code[[j for j in range(head.rank) if j not in path]] == 255)


def test_no_path_is_better(lib: Any) -> None:
    """Compare with all codes of four free places; the other places have exact levels."""
    layout = ((24, 2),)
    head = head_of(layout)
    rng = np.random.default_rng(5)
    path, alphabet, ratio = o.path_of(head), o.alphabet(2), float(head.coefficient_step[0])
    for _ in range(6):
        c = (rng.standard_normal((1, 24)) * ratio / STEP[2]).astype(np.float32)
        code = np.zeros(24, np.uint8)
        least = lib.find_path(head.ref(), o.ptr(c), 1.0, o.ptr(code))
        order = [j for j, _ in path]
        y, best = c[0, order].astype(np.float64) / ratio, code[order].astype(np.int64)

        def error(codes: Any, y: o.F64 = y) -> float:
            one, two = np.roll(codes, 1) & 1, np.roll(codes, 2) & 1
            return float(((y - alphabet[2 * codes ^ 2 * two ^ one]) ** 2).sum()) * ratio**2

        assert error(best) == pytest.approx(least, rel=1e-4)
        for at in range(0, 24, 5):
            for tried in itertools.product(range(4), repeat=4):
                codes = best.copy()
                codes[np.arange(at, at + 4) % 24] = tried
                assert error(codes) >= least * (1 - 1e-5)


@each("bits", STEP)
def test_gaussians(lib: Any, bits: int) -> None:
    """The path saves a fifth to a quarter of a bit; the search of the scale saves more."""
    head = head_of(((64, bits),))
    ratio = float(head.coefficient_step[0])
    c = (np.random.default_rng(bits).standard_normal((3000, 64)) * ratio / STEP[bits]).astype(np.float32)
    code = np.zeros(64, np.uint8)
    path = sum(lib.find_path(head.ref(), o.ptr(row), 1.0, o.ptr(code)) for row in c)
    energy = float((c.astype(np.float64) ** 2).sum())
    assert path / energy == pytest.approx(distortion(bits), rel=0.05)
    c = c[:300]
    energy = float((c.astype(np.float64) ** 2).sum())
    rows, n_bad = encoded(head, c)
    error = float(((decoded(lib, head, rows).astype(np.float64) - c) ** 2).sum())
    assert n_bad == 0 and error / energy < 0.98 * distortion(bits) < 0.85 * SCALAR[bits]


@each("latent", [False, True])
@each("layout", layouts.MIXED)
def test_mixed_bands(lib: Any, layout: o.Layout, latent: bool) -> None:
    """On a path the error is smaller than without one at equal size; off the path the bytes are equal."""
    head, plain = head_of(layout, latent=latent), head_of(layout)
    plain.codec.path = o.PATH_NONE
    c = (np.random.default_rng(1).standard_normal((100, head.rank)) * 2 * plain.coefficient_step).astype(np.float32)
    (rows, _), (other, _) = encoded(head, c), encoded(plain, c)
    error = ((decoded(lib, head, rows).astype(np.float64) - c) ** 2).sum()
    if o.path_of(head):
        assert error < 0.95 * ((decoded(lib, plain, other).astype(np.float64) - c) ** 2).sum()
    else:
        assert np.array_equal(rows, other)


def test_rows_that_cannot_be_coded(lib: Any) -> None:
    head = head_of(((32, 3),))
    c = np.ones((4, 32), np.float32)
    c[0] = 0
    c[1, 3], c[2, 5] = np.nan, -np.inf
    rows, n_bad = encoded(head, c)
    assert n_bad == 2 and np.all(rows[0] == 0) and np.any(rows[3] != 0)
    assert np.all(rows[1:3, 0] == o.SCALE_NAN) and np.all(rows[1:3, 1:] == 0)
    assert np.all(decoded(lib, head, rows[:1]) == 0) and np.isnan(decoded(lib, head, rows[1:3])).all()


LATENT = [((128, 3),), ((64, 4), (128, 3), (64, 2)), ((8, 8), (16, 6), (72, 5), (480, 3)), ((8, 16), (64, 4))]
PATHS = each("latent", [False, True])
SIDES = each("value", [False, True])


@PATHS
@SIDES
@each("layout", [*LATENT, *layouts.MIXED])
def test_versions_write_the_same_bytes(table: o.Ops, ref: o.Ops, layout: o.Layout, value: bool, latent: bool) -> None:
    """Rows of all sizes, constant ones, and scales at both ends of their range."""
    rng = np.random.default_rng(len(layout))
    rank = sum(n for n, _ in layout)
    head = o.make_head(layout, rank, rng, orthonormal=True, value=value, latent=latent)
    head.codec.encode = o.Matrix()
    c = rng.standard_normal((67, rank)) * np.exp(4 * rng.standard_normal((67, 1)))
    c[3], c[4] = 1.0, 0.0
    c[5], c[6], c[7] = 1e-30, c[7] * 1e6, 3e38 * rng.uniform(-1, 1, rank)
    cells = list(range(67))
    rows, want = (np.zeros((67, head.row_bytes), np.uint8) for _ in range(2))
    for of, out in ((table, rows), (ref, want)):
        assert o.encode(of, head, c.astype(np.float32), cells, out) == 0
    assert np.array_equal(rows, want)


def test_ties_go_to_the_smaller_scale(table: o.Ops) -> None:
    """Multiples of one row around a change of the best scale code; some have equal errors at both codes."""
    layout = ((24, 3),)
    head = head_of(layout)
    head.codec.encode = o.Matrix()
    path, scales = Path.of(layout, head.ratio, False), codec_numpy.scale_table()
    assert path is not None
    direction = np.random.default_rng(0).standard_normal(24).astype(np.float32)

    def row(sizes: o.F64) -> o.F32:
        return (sizes[:, None] * direction).astype(np.float32)

    def scale_codes(c: o.F32) -> o.U8:
        return codec_numpy.encode(c, layout, head.ratio)[:, 0]

    low, high = 1.0, 1.2
    first = scale_codes(row(np.array([low])))[0]
    assert scale_codes(row(np.array([high])))[0] != first
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if scale_codes(row(np.array([middle])))[0] == first else (low, middle)
    c = row(np.linspace(low - 1e-5, high + 1e-5, 4000))
    costs = np.array([path.free_cost(c, np.full(len(c), scales[first + i], np.float32)) for i in (0, 1)])
    equal = costs[0] == costs[1]
    assert np.any(equal)
    rows = np.zeros((len(c), head.row_bytes), np.uint8)
    assert o.encode(table, head, c, list(range(len(c))), rows) == 0
    assert np.array_equal(rows, codec_numpy.encode(c, layout, head.ratio))
    assert np.all(rows[equal, 0] == first)


@PATHS
@each("layout", LATENT)
@each("rows", [(1, 1), (1, 4), (2, 8)])
def test_attend(table: o.Ops, layout: o.Layout, latent: bool, rows: tuple[int, int]) -> None:
    rng = np.random.default_rng(7)
    rank = sum(n for n, _ in layout)
    k, v = (o.make_head(layout, rank, rng, value=value, latent=latent) for value in (False, True))
    case, k_rows, v_rows = cases.make_case(k, v, 300, rows, seed=3)
    state = o.State.start(len(case.q), v.rank)
    o.attend(table, k, v, k_rows, v_rows, case.q, case.bias, case.slope, 0.0, state)
    case.check(state, table.rounding)


@each("n_bands", [1, 2, 3])
def test_values_of_a_latent_row_decode_separately(n_bands: int) -> None:
    """In rows whose lanes are separate paths, decoding only the first bands gives the same numbers."""
    layout = ((64, 4), (128, 3), (64, 2))
    keys = head_of(layout, latent=True)
    values = o.make_head(layout[:n_bands], 256, np.random.default_rng(0), value=True, latent=True)
    values.codec.path = keys.codec.path
    for mine, theirs in zip(values.codec.bands, keys.codec.bands[:n_bands], strict=False):
        mine.ratio = theirs.ratio
    rows = o.random_rows(keys, 64, np.random.default_rng(1))
    tile, value_tile = o.to_tiles(keys, rows), np.zeros((1, o.TILE * values.row_bytes), np.uint8)
    lib = o.load_library()
    lib.keys_to_values(values.ref(), o.ptr(tile), o.ptr(value_tile))
    got = np.zeros((64, values.rank), np.float32)
    cells = np.arange(64)
    o.versions()["ref"].dequantize(values.ref(), o.ptr(value_tile), value_tile.strides[0], 64, o.ptr(cells), o.ptr(got))
    want = o.dequantize(keys, rows)[:, : values.rank]
    assert np.all(np.abs(got - want) <= 3 * o.EPS * np.abs(want))
