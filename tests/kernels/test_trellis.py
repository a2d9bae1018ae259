"""Rows coded by a trellis (kernels/ref/trellis.cpp) against numpy, brute force and what such codes must be."""

from __future__ import annotations

import ctypes as ct
import itertools
from typing import Any

import layouts
import numpy as np
import ops as o
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LEAST = 24
DOUBLE, TRIPLE = {2: 2, 3: 5, 4: 9, 5: 19, 6: 37}, {2: 4, 3: 6, 4: 12, 5: 25, 6: 50}
STEP = {2: 0.4098, 3: 0.2361, 4: 0.1200, 5: 0.0665, 6: 0.0343}
# squared error of a unit Gaussian at STEP, and that of the best quantizer of as many levels (Lloyd, Max)
DISTORTION = {2: 0.0884, 3: 0.02445, 4: 0.00672, 5: 0.00182, 6: 0.00050}
SCALAR = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.000642}
CODED = set(DISTORTION)


@pytest.fixture(scope="module")
def lib() -> Any:
    found = o.load_library()
    found.subkv_trellis_encode_rows.restype = ct.c_int64
    found.subkv_trellis_encode_rows.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_int64, ct.c_void_p]
    found.subkv_trellis_decode_rows.restype = None
    found.subkv_trellis_decode_rows.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_int64, ct.c_void_p]
    found.subkv_trellis_path.restype = ct.c_float
    found.subkv_trellis_path.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_float, ct.c_void_p]
    return found


def head_of(layout: o.Layout, seed: int = 0) -> o.Head:
    rank = sum(n for n, _ in layout)
    return o.make_head(layout, rank, np.random.default_rng(seed), orthonormal=True)


def encoded(lib: Any, head: o.Head, c: o.F32) -> tuple[o.U8, int]:
    rows = np.full((len(c) + 1, head.row_bytes), 7, np.uint8)
    n_bad = lib.subkv_trellis_encode_rows(head.ref(), o.ptr(np.ascontiguousarray(c)), len(c), o.ptr(rows))
    assert np.all(rows[-1] == 7)
    return rows[:-1], n_bad


def decoded(lib: Any, head: o.Head, rows: o.U8) -> o.F32:
    c = np.full((len(rows) + 1, head.rank), 7.0, np.float32)
    lib.subkv_trellis_decode_rows(head.ref(), o.ptr(np.ascontiguousarray(rows)), len(rows), o.ptr(c))
    assert np.all(c[-1] == 7.0)
    return c[:-1]


def values(bits: int) -> o.F64:
    """The alphabet of a band, by subkv/trellis.h, in steps."""
    magnitude = np.arange(2**bits, dtype=np.float64)
    far = np.maximum(magnitude - DOUBLE[bits], 0) + np.maximum(magnitude - TRIPLE[bits], 0)
    upper = magnitude + far + 0.5
    return np.concatenate([-upper[::-1], upper])


def path_of(layout: o.Layout) -> list[tuple[int, int]]:
    """(coefficient, bits) of the places of a row's path; none of a short row."""
    bits = [b for n, b in layout for _ in range(n)]
    places = [(j, bits[j]) for lane in range(8) for j in range(lane, len(bits), 8) if bits[j] in CODED]
    return places if len(places) >= LEAST else []


def expected(head: o.Head, rows: o.U8) -> o.F64:
    """Coefficients of rows by the definition, in double."""
    out, codes = o.dequantize(head, rows), o.codes_of(head, rows).astype(np.int64)
    path, scale = path_of(head.layout), o.SCALES[rows[:, 0]].astype(np.float64)
    for t, (j, bits) in enumerate(path):
        one, two = (codes[:, path[t - back][0]] & 1 for back in (1, 2))
        index = 2 * codes[:, j] ^ 2 * two ^ one
        out[:, j] = scale * float(head.coefficient_ratio[j]) * values(bits)[index]
    out[rows[:, 0] == 0] = 0
    return out


@pytest.mark.parametrize("bits", DISTORTION)
def test_levels(lib: Any, bits: int) -> None:
    """Ascending, odd about 0, and a byte each: products stay integers."""
    found = np.array([lib.subkv_trellis_level(bits, i) for i in range(2 ** (bits + 1))])
    assert np.all(found + 0.5 == values(bits))
    assert np.all(np.diff(found) > 0) and np.all(found + found[::-1] == -1)
    assert found[0] >= -128 and found[-1] <= 127


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=layouts.name)
def test_rows_of_any_bytes_decode_by_the_definition(lib: Any, layout: o.Layout) -> None:
    """Damaged rows among them: every byte is a code, and every coefficient finite."""
    head = head_of(layout)
    rows = o.random_rows(head, 50, np.random.default_rng(3))
    got, want = decoded(lib, head, rows), expected(head, rows)
    assert np.all(np.isfinite(got))
    assert np.all(np.abs(got - want) <= 3 * o.EPS * np.abs(want))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts.layouts(), seed=st.integers(0, 2**32 - 1))
def test_every_path_is_found_again(lib: Any, layout: o.Layout, seed: int) -> None:
    """Any codes are a path of no error: coefficients that are exact at some scale are found without one."""
    rng = np.random.default_rng(seed)
    head = head_of(layout, seed % 1000)
    rows = o.random_rows(head, 3, rng)
    path = {j for j, _ in path_of(layout)}
    for row in rows:
        row[0] = 160
        c = decoded(lib, head, row[None])
        code = np.full(head.rank, 255, np.uint8)
        error = lib.subkv_trellis_path(head.ref(), o.ptr(c), 1.0, o.ptr(code))
        assert error <= 1e-9 * float((c.astype(np.float64) ** 2).sum())
        kept = [j for j in range(head.rank) if j in path]
        assert np.array_equal(code[kept], o.codes_of(head, row[None])[0][kept].astype(np.uint8))
        assert np.all(code[[j for j in range(head.rank) if j not in path]] == 255)


def test_no_path_is_better(lib: Any) -> None:
    """Of four free places all codes are tried, the others at their exact levels."""
    layout = ((24, 2),)
    head = head_of(layout)
    rng = np.random.default_rng(5)
    path, alphabet, ratio = path_of(layout), values(2), float(head.ratio[0])
    for _ in range(6):
        c = (rng.standard_normal((1, 24)) * ratio / STEP[2]).astype(np.float32)
        code = np.zeros(24, np.uint8)
        least = lib.subkv_trellis_path(head.ref(), o.ptr(c), 1.0, o.ptr(code))
        order = [j for j, _ in path]
        y, found = c[0, order].astype(np.float64) / ratio, code[order].astype(np.int64)

        def error(codes: Any, y: o.F64 = y) -> float:
            one, two = np.roll(codes, 1) & 1, np.roll(codes, 2) & 1
            return float(((y - alphabet[2 * codes ^ 2 * two ^ one]) ** 2).sum()) * ratio**2

        assert error(found) == pytest.approx(least, rel=1e-4)
        for at in range(0, 24, 5):
            for tried in itertools.product(range(4), repeat=4):
                codes = found.copy()
                codes[np.arange(at, at + 4) % 24] = tried
                assert error(codes) >= least * (1 - 1e-5)


@pytest.mark.parametrize("bits", DISTORTION)
def test_gaussians(lib: Any, bits: int) -> None:
    """The path alone is worth a fifth to a quarter of a bit; the search of the scale comes on top."""
    head = head_of(((64, bits),))
    ratio = float(head.ratio[0])
    c = (np.random.default_rng(bits).standard_normal((3000, 64)) * ratio / STEP[bits]).astype(np.float32)
    path = sum(lib.subkv_trellis_path(head.ref(), o.ptr(row), 1.0, 0) for row in np.ascontiguousarray(c))
    energy = float((c.astype(np.float64) ** 2).sum())
    assert path / energy == pytest.approx(DISTORTION[bits], rel=0.05)
    c = c[:300]
    energy = float((c.astype(np.float64) ** 2).sum())
    rows, n_bad = encoded(lib, head, c)
    error = float(((decoded(lib, head, rows).astype(np.float64) - c) ** 2).sum())
    assert n_bad == 0 and error / energy < 0.98 * DISTORTION[bits] < 0.85 * SCALAR[bits]


@pytest.mark.parametrize("layout", layouts.MIXED, ids=layouts.name)
def test_mixed_bands(lib: Any, layout: o.Layout) -> None:
    """Where there is a path the error is smaller than that of the same bytes without; a short row is the same bytes."""
    head = head_of(layout)
    plain = head_of(layout)
    uniform = {2: 2.430, 3: 2.482, 4: 2.792, 5: 2.829, 6: 3.036}
    for band in plain.codec.bands[: plain.codec.n_bands]:
        band.ratio *= uniform.get(band.bits, 1.0) if path_of(layout) else 1.0
    spread = np.repeat([band.ratio for band in plain.codec.bands[: len(layout)]], [n for n, _ in layout])
    c = (np.random.default_rng(1).standard_normal((100, head.rank)) * spread).astype(np.float32)
    rows, _ = encoded(lib, head, c)
    error = ((decoded(lib, head, rows).astype(np.float64) - c) ** 2).sum()
    other = np.zeros_like(rows)
    lib.subkv_ops_encode_rows(lib.subkv_ops_table(0), plain.ref(), o.ptr(c), c.shape[1], len(c), o.ptr(other))
    if path_of(layout):
        assert error < 0.9 * ((o.dequantize(plain, other) - c) ** 2).sum()
    else:
        assert np.array_equal(rows, other)


def test_rows_that_cannot_be_coded(lib: Any) -> None:
    head = head_of(((32, 3),))
    c = np.ones((4, 32), np.float32)
    c[0] = 0
    c[1, 3], c[2, 5] = np.nan, -np.inf
    rows, n_bad = encoded(lib, head, c)
    assert n_bad == 2 and np.all(rows[:3] == 0) and np.any(rows[3] != 0)
    assert np.all(decoded(lib, head, rows[:3]) == 0)
