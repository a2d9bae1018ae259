"""attend and attend_exact of every version against softmax in double over numpy's own dequantization.

Tolerance of a logit: 16 eps (sum |q_j||k_j| + |bias| + softcap); of z and acc: that, plus 16 eps, times their
magnitude (sum of weights, sum of weight * |v|). Versions with integer products also round queries and weights, by their
table's `rounding`: errors of half that step, times what they are multiplied with (Rounded).
"""

from __future__ import annotations

import ctypes as ct
import mmap
from dataclasses import dataclass, replace

import layouts
import numpy as np
import numpy.typing as npt
import ops as o
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MIXED = layouts.MIXED
LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 300]
ROWS = [(1, 1), (1, 3), (1, 8), (2, 3), (3, 5), (5, 1), (1, 16), (17, 3)]  # (n_tok, n_group)
EXACT_SIZES = [(64, 64), (8, 8), (40, 24), (80, 128), (256, 256)]


@dataclass
class Rounded:
    """Coded cells as an integer product sees them: centred codes without scale, and what goes into the other factor.

    16-bit bands are not part of it.
    """

    ratio_k: o.F64  # [rank], of the queries' coefficients
    keys: o.F64  # [n], largest sum of |scale * centred code| of a cell's key
    scale_v: o.F64  # [n], of the weights
    values: o.F64  # [n][rank], |ratio * centred code|

    @classmethod
    def of(cls, k: o.Head, v: o.Head, keys: o.F64, values: o.F64, v_rows: o.U8) -> Rounded:
        rounded_k, rounded_v = (np.repeat([b != 16 for _, b in x.layout], [n for n, _ in x.layout]) for x in (k, v))
        ratio = np.where(rounded_k, k.coefficient_ratio, 0.0)
        units = np.abs(keys[:, rounded_k]) / ratio[rounded_k]
        scale = o.SCALES[v_rows[:, 0]].astype(np.float64)
        bare = np.abs(values) * rounded_v / np.where(scale > 0, scale, 1.0)[:, None]
        return cls(ratio, units.sum(axis=1), scale, bare)

    def logits(self, q: o.F32, seen: npt.NDArray[np.bool_]) -> o.F64:
        """Largest error [rows] of a visible logit for a rounding of 1."""
        return 0.5 * np.abs(q * self.ratio_k).max(axis=1) * (seen * self.keys).max(axis=1, initial=0.0)

    def sums(self, weights: o.F64) -> o.F64:
        """Largest error [rows][rank] of acc for a rounding of 1."""
        seen = (weights > 0).any(axis=0)
        heaviest = weights.max(axis=1, initial=0.0) * (self.scale_v * seen).max(initial=0.0)
        return 0.5 * heaviest[:, None] * ((weights > 0) @ self.values)


@dataclass
class Case:
    """Inputs of one call; `k`, `v` are the vectors in double."""

    q: o.F32
    bias: o.F32
    slope: o.F32
    softcap: float
    k: o.F64
    v: o.F64
    shift: o.F32 | None = None
    rounded: Rounded | None = None  # of coded cells

    def check(self, state: o.State, rounding: float = 0.0) -> None:
        """rounding: of the table that made the state."""
        m, z, acc, size, weight_v, weights = o.attention(
            self.q, self.k, self.v, self.bias, self.slope, self.softcap, self.shift
        )
        dv = self.v.shape[1]
        dead = np.isneginf(m)
        assert np.all(np.isneginf(state.m[dead]))
        assert np.all(state.z[dead] == 0)
        assert np.all(state.acc[dead, :dv] == 0)
        assert np.all(state.acc[:, dv:] == 12345.0)
        live = ~dead
        tol = 16 * o.EPS * size[live]
        extra = np.zeros_like(acc)
        if rounding > 0:
            assert self.rounded is not None
            tol += 1.01 * rounding * self.rounded.logits(self.q, weights > 0)[live]
            extra = 1.01 * rounding * self.rounded.sums(weights)
        assert np.all(np.abs(state.m[live] - m[live]) <= tol)
        shift = np.exp(state.m[live].astype(np.float64) - m[live])
        rel = 2 * tol + 16 * o.EPS
        assert np.all(np.abs(state.z[live] * shift - z[live]) <= rel * z[live])
        error = np.abs(state.acc[live, :dv] * shift[:, None] - acc[live])
        assert np.all(error <= rel[:, None] * (weight_v + extra)[live] + extra[live] + 1e-30)


def make_bias(n_tok: int, n: int, rng: np.random.Generator, extra: int) -> o.F32:
    """Causal-looking mask with random holes; the columns beyond n are NaN: nobody may read them."""
    bias = rng.uniform(-2, 0, (n_tok, n + extra)).astype(np.float32)
    bias[:, :n][rng.random((n_tok, n)) < 0.2] = -np.inf
    for t in range(n_tok):
        bias[t, max(1, n - n_tok + t + 1) : n] = -np.inf
    bias[:, n:] = np.nan
    return bias


def make_case(
    k: o.Head,
    v: o.Head,
    n: int,
    rows: tuple[int, int],
    seed: int,
    softcap: float = 0.0,
    extra: int = 3,
    shift: float = 0.0,
) -> tuple[Case, o.U8, o.U8]:
    rng = np.random.default_rng(seed)
    n_tok, n_group = rows
    k_rows = o.random_rows(k, n, rng, k.row_bytes + extra)
    v_rows = o.random_rows(v, n, rng, v.row_bytes + 2 * extra)
    keys, values = o.dequantize(k, k_rows), o.dequantize(v, v_rows)
    q = rng.standard_normal((n_tok * n_group, k.rank)).astype(np.float32)
    if n > 0:  # logits of a few units
        q *= np.float32(4 / max(1e-3, float((keys @ q.T).std())))
    bias = make_bias(n_tok, n, rng, extra)
    slope = rng.uniform(0, 1.5, n_group).astype(np.float32)
    slope[0] = 0
    hidden = np.isneginf(bias[:, :n]).all(axis=0)
    k_rows[hidden] = rng.choice(np.array([0, 1, 255], np.uint8), (int(hidden.sum()), k_rows.shape[1]))
    v_rows[hidden] = 255
    shifts = (shift * rng.standard_normal(len(q))).astype(np.float32) if shift else None
    rounded = Rounded.of(k, v, keys, values, v_rows)
    return Case(q, bias, slope, softcap, keys, values, shifts, rounded), k_rows, v_rows


def run(table: o.Ops, k: o.Head, v: o.Head, case: Case, k_rows: o.U8, v_rows: o.U8, state: o.State) -> None:
    o.attend(table, k, v, k_rows, v_rows, case.q, case.bias, case.slope, case.softcap, state, shift=case.shift)


def pair(layout_k: o.Layout, layout_v: o.Layout) -> tuple[o.Head, o.Head]:
    rng = np.random.default_rng(1)
    k = o.make_head(layout_k, layouts.head_size(layout_k), rng)
    return k, o.make_head(layout_v, layouts.head_size(layout_v), rng)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths_and_row_counts(table: o.Ops, n: int, rows: tuple[int, int]) -> None:
    k, v = pair(MIXED[0], MIXED[1])
    case, k_rows, v_rows = make_case(k, v, n, rows, seed=n)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=layouts.name)
@pytest.mark.parametrize("rows", [(1, 3), (6, 3)], ids=str)
def test_every_layout(table: o.Ops, layout: o.Layout, rows: tuple[int, int]) -> None:
    for first, second in ((layout, MIXED[1]), (MIXED[3], layout)):
        k, v = pair(first, second)
        case, k_rows, v_rows = make_case(k, v, 71, rows, seed=4)
        state = o.State.start(len(case.q), v.rank)
        run(table, k, v, case, k_rows, v_rows, state)
        case.check(state, table.rounding)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout_k=layouts.layouts(),
    layout_v=layouts.layouts(),
    n=st.integers(0, 140),
    rows=st.tuples(st.integers(1, 7), st.integers(1, 5)),
    softcap=st.sampled_from([0.0, 5.0, 50.0]),
    extra=st.sampled_from([0, 1, 16]),
    shift=st.sampled_from([0.0, 3.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_call(
    table: o.Ops,
    layout_k: o.Layout,
    layout_v: o.Layout,
    n: int,
    rows: tuple[int, int],
    softcap: float,
    extra: int,
    shift: float,
    seed: int,
) -> None:
    k, v = pair(layout_k, layout_v)
    case, k_rows, v_rows = make_case(k, v, n, rows, seed, softcap, extra, shift)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@pytest.mark.parametrize("rows", [(1, 3), (4, 4)], ids=str)
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap(table: o.Ops, rows: tuple[int, int], softcap: float) -> None:
    k, v = pair(MIXED[0], MIXED[2])
    case, k_rows, v_rows = make_case(k, v, 200, rows, 8, softcap)
    case.q *= 20  # deep into saturation
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 8.0])
@pytest.mark.parametrize("layout", [MIXED[0], MIXED[4]], ids=layouts.name)
def test_shift_is_added_before_the_cap(table: o.Ops, layout: o.Layout, softcap: float, rows: tuple[int, int]) -> None:
    k, v = pair(layout, MIXED[2])
    case, k_rows, v_rows = make_case(k, v, 150, rows, 21, softcap, shift=5.0)
    state, zeros, none = (o.State.start(len(case.q), v.rank) for _ in range(3))
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)
    assert case.shift is not None
    case.shift = np.zeros_like(case.shift)
    run(table, k, v, case, k_rows, v_rows, zeros)
    case.shift = None
    run(table, k, v, case, k_rows, v_rows, none)
    assert np.array_equal(zeros.m, none.m) and np.array_equal(zeros.z, none.z) and np.array_equal(zeros.acc, none.acc)
    assert np.any(state.m != none.m)


@pytest.mark.parametrize("rows", [(1, 3), (6, 3)], ids=str)
@pytest.mark.parametrize("layout", [MIXED[0], MIXED[4]], ids=layouts.name)
def test_nothing_visible_keeps_the_state(table: o.Ops, layout: o.Layout, rows: tuple[int, int]) -> None:
    k, v = pair(layout, layout)
    case, k_rows, v_rows = make_case(k, v, 150, rows, 6)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    kept = state.copy()
    fresh = o.State.start(len(case.q), v.rank)
    case.bias[:] = -np.inf
    k_rows[:], v_rows[:] = 255, 255
    run(table, k, v, case, k_rows, v_rows, state)
    run(table, k, v, case, k_rows, v_rows, fresh)
    for got, want in ((state, kept), (fresh, o.State.start(len(case.q), v.rank))):
        assert np.array_equal(got.m, want.m)
        assert np.array_equal(got.z, want.z)
        assert np.array_equal(got.acc, want.acc)


@pytest.mark.parametrize("rows", [(1, 3), (6, 3)], ids=str)
@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 70, 200), (128, 129)], ids=str)
def test_pieces_continue_the_state(table: o.Ops, rows: tuple[int, int], cuts: tuple[int, ...]) -> None:
    k, v = pair(MIXED[0], MIXED[2])
    n = 260
    case, k_rows, v_rows = make_case(k, v, n, rows, 9)
    state = o.State.start(len(case.q), v.rank)
    edges = [0, *cuts, n]
    for first, last in zip(edges, edges[1:], strict=False):
        bias = case.bias[:, first:]
        o.attend(table, k, v, k_rows[first:last], v_rows[first:last], case.q, bias, case.slope, 0.0, state)
    case.check(state, table.rounding)


@pytest.mark.parametrize("rows", [(1, 3), (6, 3)], ids=str)
def test_query_rows_are_independent(table: o.Ops, rows: tuple[int, int]) -> None:
    """A query row sees the same numbers, within rounding, whichever rows share the call."""
    k, v = pair(MIXED[0], MIXED[2])
    case, k_rows, v_rows = make_case(k, v, 100, rows, 10)
    state = o.State.start(len(case.q), v.rank)
    for t in range(rows[0]):
        part = slice(t * rows[1], (t + 1) * rows[1])
        own = o.State(state.m[part], state.z[part], state.acc[part])
        o.attend(table, k, v, k_rows, v_rows, case.q[part], case.bias[t : t + 1], case.slope, 0.0, own)
    case.check(state, table.rounding)


class Fenced:
    """`data` placed right before a page that may not be touched."""

    def __init__(self, data: bytes) -> None:
        page = mmap.PAGESIZE
        size = (len(data) + page - 1) // page * page
        self.map = mmap.mmap(-1, size + page)
        self.base = ct.addressof(ct.c_char.from_buffer(self.map))
        self.at = self.base + size - len(data)
        ct.memmove(self.at, data, len(data))
        libc = ct.CDLL(None, use_errno=True)
        assert libc.mprotect(ct.c_void_p(self.base + size), page, 0) == 0  # PROT_NONE

    def rows(self, n: int, stride: int, row_bytes: int) -> o.U8:
        """[n][stride] view; the last row's padding lies beyond the fence."""
        flat = (ct.c_uint8 * ((n - 1) * stride + row_bytes)).from_address(self.at)
        return np.lib.stride_tricks.as_strided(np.frombuffer(memoryview(flat), np.uint8), (n, row_bytes), (stride, 1))


@pytest.mark.parametrize("layout", layouts.LAYOUTS, ids=layouts.name)
@pytest.mark.parametrize("rows", [(1, 3), (6, 3)], ids=str)
def test_nothing_is_read_beyond_the_last_row(table: o.Ops, layout: o.Layout, rows: tuple[int, int]) -> None:
    k, v = pair(layout, layout)
    n = 66
    case, k_rows, v_rows = make_case(k, v, n, rows, 12, extra=0)
    fence_k, fence_v = Fenced(k_rows.tobytes()), Fenced(v_rows.tobytes())
    safe_k, safe_v = fence_k.rows(n, k.row_bytes, k.row_bytes), fence_v.rows(n, v.row_bytes, v.row_bytes)
    fence_b = Fenced(np.ascontiguousarray(case.bias).tobytes())
    flat = np.frombuffer(memoryview((ct.c_float * case.bias.size).from_address(fence_b.at)), np.float32)
    fenced = replace(case, bias=flat.reshape(case.bias.shape))
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, fenced, safe_k, safe_v, state)
    case.check(state, table.rounding)
    out = np.empty((n, k.rank), np.float32)
    table.dequantize_rows(k.ref(), o.ptr(safe_k), k.row_bytes, n, o.ptr(out))


def exact_case(
    n: int, rows: tuple[int, int], d: tuple[int, int], seed: int, softcap: float
) -> tuple[Case, list[o.U16], list[o.U16]]:
    rng = np.random.default_rng(seed)
    n_tok, n_group = rows
    k = rng.standard_normal((n, d[0])).astype(np.float16)
    v = rng.standard_normal((n, d[1])).astype(np.float16)
    q = (rng.standard_normal((n_tok * n_group, d[0])) * 3 / np.sqrt(d[0])).astype(np.float32)
    bias = make_bias(n_tok, n, rng, 2)
    slope = rng.uniform(0, 1, n_group).astype(np.float32)
    case = Case(q, bias, slope, softcap, k.astype(np.float64), v.astype(np.float64))
    hidden = np.isneginf(bias[:, :n]).all(axis=0)
    k[hidden], v[hidden] = np.nan, np.inf
    halves = [list(x.view(np.uint16)) for x in (k, v)]
    return case, halves[0], halves[1]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_exact_lengths(table: o.Ops, n: int, rows: tuple[int, int]) -> None:
    check_exact(table, n, rows, (64, 64), 0.0)


@pytest.mark.parametrize("d", EXACT_SIZES, ids=str)
@pytest.mark.parametrize("rows", [(1, 4), (7, 2)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_exact_sizes(table: o.Ops, rows: tuple[int, int], d: tuple[int, int], softcap: float) -> None:
    check_exact(table, 133, rows, d, softcap)


def check_exact(table: o.Ops, n: int, rows: tuple[int, int], d: tuple[int, int], softcap: float) -> None:
    case, k, v = exact_case(n, rows, d, n, softcap)
    fences = [Fenced(h.tobytes()) for h in k[-1:] + v[-1:]]  # the last key and value: no byte beyond is read
    keys, values = [o.ptr(h) for h in k], [o.ptr(h) for h in v]
    if n > 0:
        keys[-1], values[-1] = fences[0].at, fences[1].at
    state = o.State.start(len(case.q), d[1])
    o.attend_exact(table, keys, values, *d, case.q, case.bias, case.slope, softcap, state)
    case.check(state)


def test_exact_and_coded_states_merge(table: o.Ops) -> None:
    """One state through both ops: the coefficients are the values when E is the identity."""
    rng = np.random.default_rng(0)
    head = o.make_head(((64, 16),), 64, rng, orthonormal=True)
    for rows in ((1, 3), (9, 3)):
        case, k, v = exact_case(200, rows, (64, 64), 3, 0.0)
        coded = np.zeros((100, 129), np.uint8)
        coded_v = coded.copy()
        coded[:, 0] = coded_v[:, 0] = o.SCALE_ONE
        coded[:, 1:] = np.array(k[:100], np.uint16).view(np.uint8).reshape(100, 128)
        coded_v[:, 1:] = np.array(v[:100], np.uint16).view(np.uint8).reshape(100, 128)
        state = o.State.start(len(case.q), 64)
        o.attend(table, head, head, coded, coded_v, case.q, case.bias, case.slope, 0.0, state)
        keys, values = [o.ptr(h) for h in k[100:]], [o.ptr(h) for h in v[100:]]
        o.attend_exact(table, keys, values, 64, 64, case.q, case.bias[:, 100:], case.slope, 0.0, state)
        case.check(state)
