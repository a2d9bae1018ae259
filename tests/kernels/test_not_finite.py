"""NaN in, NaN out (ops.h): every version of attend and attend_exact with numbers that are not finite, or hardly.

A query row that reaches such a number is lost; the other rows of the call do not change by a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import ops as o
from cases import Case, Rounded, make_case, pair, run
from each import each

HALVES: o.Layout = ((16, 16), (48, 4))  # off a path after 16-bit coefficients
LAYOUTS: list[o.Layout] = [HALVES, ((8, 8), (32, 4), (24, 3)), ((16, 5),), ((32, 16),)]
# (n_tok, n_group): few rows, blocks of rows, and more rows than a block
ROWS = [(2, 1), (2, 3), (5, 2), (30, 1)]
BAD = [np.nan, np.inf, -np.inf]
N = 330  # a step and a part of one
CELL = 71  # the cell with a bad number

Bools = npt.NDArray[np.bool_]


def two_sequences(case: Case) -> Bools:
    """Odd tokens see the first 200 cells, even ones the others; returns the query rows [n] of odd tokens."""
    n_tok, n_group = len(case.bias), len(case.slope)
    odd = np.arange(n_tok) % 2 == 1
    case.bias[:, :N] = np.where((np.arange(N) < 200) == odd[:, None], case.bias[:, :N], -np.inf)
    case.bias[odd, CELL] = 0
    return np.repeat(odd, n_group)


def coded_case(layout: o.Layout, rows: tuple[int, int], softcap: float) -> tuple[o.Head, o.Head, Case, o.U8, o.U8]:
    k, v = pair(layout, layout)
    case, k_rows, v_rows = make_case(k, v, N, rows, 31, softcap, shift=1.0)
    for own in (k_rows, v_rows):  # some tests show hidden cells
        own[np.isneginf(case.bias[:, :N]).all(axis=0)] = 0
    case.k, case.v = o.dequantize(k, k_rows), o.dequantize(v, v_rows)
    case.rounded = Rounded.of(k, v, case.k, case.v, v_rows)
    return k, v, case, k_rows, v_rows


def lost(state: o.State, d: int) -> Bools:
    return (np.isnan(state.z) | ~np.isfinite(state.acc[:, :d]).all(axis=1)) & ~np.isneginf(state.m)


def check_lost(state: o.State, clean: o.State, reached: Bools, d: int) -> None:
    assert np.array_equal(lost(state, d), reached)
    for after, before in ((state.m, clean.m), (state.z, clean.z), (state.acc, clean.acc)):
        assert np.array_equal(after[~reached], before[~reached])


@each("softcap", [0.0, 5.0])
@each("rows", ROWS)
@each("layout", LAYOUTS)
def test_queries(table: o.Ops, layout: o.Layout, rows: tuple[int, int], softcap: float) -> None:
    """A coefficient of any band, and the shift; the row after it and a row without visible cells stay."""
    k, v, case, k_rows, v_rows = coded_case(layout, rows, softcap)
    case.bias[-1, :N] = -np.inf
    clean = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, clean)
    assert case.shift is not None
    for bad in BAD:
        for at in (0, k.rank - 1, None):
            q, shift = case.q.copy(), case.shift.copy()
            for row in (0, len(q) - 1):  # the last one sees nothing
                if at is None:
                    shift[row] = bad
                else:
                    q[row, at] = bad
            state = o.State.start(len(q), v.rank)
            o.attend(table, k, v, k_rows, v_rows, q, case.bias, case.slope, softcap, state, shift)
            check_lost(state, clean, np.arange(len(q)) == 0, v.rank)


@each("softcap", [0.0, 5.0])
@each("rows", ROWS)
@each("layout", LAYOUTS)
def test_cells_that_could_not_be_coded(table: o.Ops, layout: o.Layout, rows: tuple[int, int], softcap: float) -> None:
    k, v, case, k_rows, v_rows = coded_case(layout, rows, softcap)
    odd = two_sequences(case)
    k_rows[CELL, 0] = v_rows[CELL, 0] = 150
    clean = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, clean)
    for side, head in enumerate((k, v)):
        damages: list[Callable[[o.U8], None]] = [scale_nan]
        if layout[0][1] == 16:
            damages += [lambda row, head=head, bad=bad: half(head, row, bad) for bad in BAD]
        for damage in damages:
            both = [k_rows.copy(), v_rows.copy()]
            damage(both[side][CELL])
            state = o.State.start(len(case.q), v.rank)
            run(table, k, v, case, *both, state)
            check_lost(state, clean, odd, v.rank)


def scale_nan(row: o.U8) -> None:
    row[0] = o.SCALE_NAN


def half(head: o.Head, row: o.U8, bad: float) -> None:
    """Damages a half of the row's first band."""
    at = head.codec.bands[0].offset + 2 * 5
    row[at : at + 2] = np.array([bad], "<f2").view(np.uint8)


@each("rows", [(1, 1), (1, 3), (5, 2)])
@each("layout", LAYOUTS)
def test_values_of_weight_zero_add_nothing(table: o.Ops, layout: o.Layout, rows: tuple[int, int]) -> None:
    """Visible, but e^-1000 of the largest weight."""
    k, v, case, k_rows, v_rows = coded_case(layout, rows, 0.0)
    case.slope[:] = 1
    case.bias[:, CELL] = -1000
    v_rows[CELL, 0] = 150
    (half if layout[0][1] == 16 else lambda _, row, bad: scale_nan(row))(v, v_rows[CELL], np.inf)
    case.v = o.dequantize(v, v_rows)
    case.rounded = Rounded.of(k, v, case.k, np.nan_to_num(case.v, posinf=0), v_rows)
    assert not np.isfinite(case.v[CELL]).all()
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    assert not lost(state, v.rank).any()
    case.check(state, table.rounding)


@each("rows", [(1, 3), (5, 2)])
def test_a_lost_row_stays_lost(table: o.Ops, rows: tuple[int, int]) -> None:
    k, v, case, k_rows, v_rows = coded_case(HALVES, rows, 0.0)
    state = o.State.start(len(case.q), v.rank)
    bad = case.q.copy()
    bad[0, 0] = np.nan
    for queries in (case.q, bad, case.q):
        o.attend(table, k, v, k_rows, v_rows, queries, case.bias, case.slope, 0.0, state, case.shift)
    assert np.array_equal(lost(state, v.rank), np.arange(len(bad)) == 0)


@each("bad", [np.nan, np.inf])
@each("rows", ROWS)
def test_masks(table: o.Ops, rows: tuple[int, int], bad: float) -> None:
    """Only minus infinity hides a cell."""
    k, v, case, k_rows, v_rows = coded_case(HALVES, rows, 0.0)
    odd = two_sequences(case)
    case.slope[:] = 1
    clean = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, clean)
    case.bias[1::2, CELL] = bad
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    check_lost(state, clean, odd, v.rank)


@each("least", [np.finfo(np.float32).min, -1e30, -65504.0])
@each("rows", [(1, 3), (5, 2)])
def test_masks_that_are_large_but_finite(table: o.Ops, rows: tuple[int, int], least: float) -> None:
    """They count like any other; the last token has nothing else."""
    k, v, case, k_rows, v_rows = coded_case(HALVES, rows, 0.0)
    case.slope[:] = 1
    case.bias[:, 100:N] = least
    case.bias[-1, :N] = least
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    if least == -65504.0:
        case.check(state, table.rounding)
    assert np.all(np.isfinite(state.z)) and np.all(np.isfinite(state.acc)) and np.all(state.z > 0)


@each("factor", [1e-38, 1e-30])
def test_small_queries(table: o.Ops, factor: float) -> None:
    """Denormal products are small logits, not lost ones."""
    k, v, case, k_rows, v_rows = coded_case(HALVES, (5, 2), 0.0)
    case.q *= np.float32(factor)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


#
# exact keys
#


def exact_case(rows: tuple[int, int], d: int) -> tuple[Case, o.F16, o.F16, Bools]:
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((N, d)).astype(np.float16) for _ in range(2))
    k[9], v[9] = 65504, -65504
    k[10], v[10] = 6e-8, 6e-8  # denormal
    q = (rng.standard_normal((rows[0] * rows[1], d)) / d).astype(np.float32)
    bias = rng.uniform(-2, 0, (rows[0], N)).astype(np.float32)
    bias[:, 9] = -np.inf
    case = Case(q, bias, rng.uniform(0.2, 1, rows[1]).astype(np.float32), 0.0, k.astype(float), v.astype(float))
    return case, k, v, two_sequences(case)


def run_exact(table: o.Ops, case: Case, k: o.F16, v: o.F16, q: o.F32 | None = None, softcap: float = 0.0) -> o.State:
    d = k.shape[1]
    state = o.State.start(len(case.q), d)
    keys, values = ([o.ptr(x) + i * x.strides[0] for i in range(N)] for x in (k, v))
    o.attend_exact(table, keys, values, d, d, case.q if q is None else q, case.bias, case.slope, softcap, state)
    return state


@each("softcap", [0.0, 5.0])
@each("d", [8, 64, 80])
@each("rows", ROWS)
def test_exact_rows(table: o.Ops, rows: tuple[int, int], d: int, softcap: float) -> None:
    case, k, v, odd = exact_case(rows, d)
    clean = run_exact(table, case, k, v, softcap=softcap)
    assert not lost(clean, d).any()
    for bad in BAD:
        for side in range(2):
            both = [k.copy(), v.copy()]
            both[side][CELL, d - 3] = bad
            check_lost(run_exact(table, case, both[0], both[1], softcap=softcap), clean, odd, d)
        q = case.q.copy()
        q[1, 2] = bad
        check_lost(run_exact(table, case, k, v, q, softcap), clean, np.arange(len(q)) == 1, d)


@each("rows", [(1, 1), (1, 6), (2, 3), (5, 2)])
def test_exact_values_of_weight_zero_add_nothing(table: o.Ops, rows: tuple[int, int]) -> None:
    case, k, v, _ = exact_case(rows, 64)
    case.bias[:, :N] = 0
    case.bias[:, 9] = -1e6
    case.bias[:, CELL] = -1000
    case.slope[:] = 1
    v[CELL, 3:] = np.inf
    case.v = v.astype(float)
    state = run_exact(table, case, k, v)
    assert not lost(state, 64).any()
    case.check(state)
