"""attend of every version against softmax in double over numpy's own dequantization (cases.py)."""

from __future__ import annotations

import ctypes as ct

import layouts
import numpy as np
import ops as o
import tiles
from cases import LENGTHS, ROWS, Case, Fenced, Rounded, make_case, pair, run
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MIXED = layouts.MIXED


@each("rows", ROWS)
@each("n", LENGTHS)
def test_lengths_and_row_counts(table: o.Ops, n: int, rows: tuple[int, int]) -> None:
    k, v = pair(MIXED[0], MIXED[1])
    case, k_rows, v_rows = make_case(k, v, n, rows, seed=n)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@each("layout", layouts.LAYOUTS)
@each("rows", [(1, 3), (6, 3)])
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
    extra=st.sampled_from([0, 1, 16, 64, 4032]),
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
    case, k_rows, v_rows = make_case(k, v, n, rows, seed, softcap, shift)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state, extra)
    case.check(state, table.rounding)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from([*MIXED[:6], ((64, 4),)]),
    n=st.integers(1, 300),
    rows=st.sampled_from([1, 2, 3, 4, 5, 8, 16, 64]).flatmap(
        lambda group: st.tuples(st.integers(1, max(1, 70 // group)), st.just(group))
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_number_of_query_rows(table: o.Ops, layout: o.Layout, n: int, rows: tuple[int, int], seed: int) -> None:
    """Up to 128 query rows, in groups of up to 128."""
    k, v = pair(layout, MIXED[1])
    case, k_rows, v_rows = make_case(k, v, n, rows, seed)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@each("rows", [(1, 3), (4, 4)])
@each("softcap", [1.0, 30.0])
def test_softcap(table: o.Ops, rows: tuple[int, int], softcap: float) -> None:
    k, v = pair(MIXED[0], MIXED[2])
    case, k_rows, v_rows = make_case(k, v, 200, rows, 8, softcap)
    case.q *= 20  # deep into saturation
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@each("rows", ROWS)
@each("softcap", [0.0, 8.0])
@each("layout", [MIXED[0], MIXED[4]])
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


@each("rows", [(1, 3), (6, 3)])
@each("layout", [MIXED[0], MIXED[4]])
def test_without_visible_cells_the_state_stays(table: o.Ops, layout: o.Layout, rows: tuple[int, int]) -> None:
    k, v = pair(layout, layout)
    case, k_rows, v_rows = make_case(k, v, 150, rows, 6)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    before = state.copy()
    fresh = o.State.start(len(case.q), v.rank)
    case.bias[:] = -np.inf
    k_rows[:], v_rows[:] = 255, 255
    run(table, k, v, case, k_rows, v_rows, state)
    run(table, k, v, case, k_rows, v_rows, fresh)
    for after, expected in ((state, before), (fresh, o.State.start(len(case.q), v.rank))):
        assert np.array_equal(after.m, expected.m)
        assert np.array_equal(after.z, expected.z)
        assert np.array_equal(after.acc, expected.acc)


@each("rows", [(4, 3), (7, 2), (20, 1)])
@each("layout", [MIXED[0], MIXED[4]])
def test_tokens_of_several_sequences(table: o.Ops, layout: o.Layout, rows: tuple[int, int]) -> None:
    """Each token sees different tiles, like sequences that share a cache; every fifth token sees none."""
    k, v = pair(layout, MIXED[2])
    case, k_rows, v_rows = make_case(k, v, 600, rows, 17)
    tile = np.arange(600) // 64
    for t in range(rows[0]):
        case.bias[t, :600][(tile % 4 != t % 4) | (t % 5 == 4)] = -np.inf
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)
    asleep = np.repeat(np.isneginf(case.bias[:, :600]).all(axis=1), rows[1])
    assert (np.isneginf(state.m) == asleep).all() and not state.acc[asleep, : v.rank].any()


@each("rows", [(2, 3), (5, 3), (9, 4), (20, 1)])
@each("layout", [MIXED[0], MIXED[4]])
def test_other_rows_of_a_call_and_hidden_steps_change_no_bit(
    table: o.Ops, layout: o.Layout, rows: tuple[int, int]
) -> None:
    k, v = pair(layout, MIXED[2])
    n, n_group = 700, rows[1]
    case, k_rows, v_rows = make_case(k, v, n, rows, 23, softcap=8.0, shift=2.0)
    assert case.shift is not None
    for t in range(rows[0]):  # cells of the tokens begin and end in different steps, and have different scales
        case.bias[t, : 100 * (t % 5)] = -np.inf
        case.bias[t, n - 40 * (t % 4) : n] = -np.inf
    together = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, together)
    for t in range(rows[0]):
        own = slice(t * n_group, (t + 1) * n_group)
        first = 100 * (t % 5) // 256 * 256
        alone = o.State.start(n_group, v.rank)
        part = slice(first, n - 40 * (t % 4))
        bias = case.bias[t : t + 1, first:].copy()
        shift = case.shift[own].copy()
        o.attend(
            table, k, v, k_rows[part], v_rows[part], case.q[own].copy(), bias, case.slope, 8.0, alone, shift, extra=64
        )
        assert np.array_equal(alone.m, together.m[own])
        assert np.array_equal(alone.z, together.z[own])
        assert np.array_equal(alone.acc, together.acc[own])


@each("rows", [(1, 3), (6, 3), (1, 8)])
@each("cuts", [(64,), (128,), (64, 128, 192, 256), (192,)])
def test_pieces_continue_the_state(table: o.Ops, rows: tuple[int, int], cuts: tuple[int, ...]) -> None:
    check_pieces(table, rows, cuts)


@each("rows", [(1, 3), (6, 3)])
@each("cuts", [(1,), (3, 70, 200), (128, 129), (63, 65), (40, 50)])
def test_pieces_of_tiles_continue_the_state(table: o.Ops, rows: tuple[int, int], cuts: tuple[int, ...]) -> None:
    """A piece that begins inside a tile passes the whole tile and masks its earlier cells."""
    check_pieces(table, rows, cuts)


def check_pieces(table: o.Ops, rows: tuple[int, int], cuts: tuple[int, ...]) -> None:
    k, v = pair(MIXED[0], MIXED[2])
    n = 260
    case, k_rows, v_rows = make_case(k, v, n, rows, 9)
    state = o.State.start(len(case.q), v.rank)
    edges = [0, *cuts, n]
    for first, last in zip(edges, edges[1:], strict=False):
        start = first // o.TILE * o.TILE
        bias = case.bias[:, start:].copy()
        bias[:, : first - start] = -np.inf
        bias[:, last - start :] = np.nan
        o.attend(table, k, v, k_rows[start:last], v_rows[start:last], case.q, bias, case.slope, 0.0, state)
    case.check(state, table.rounding)


EXTREMES: list[o.Layout] = [
    *(((256, bits),) for bits in (8, 6, 5, 4, 3, 2)),
    *(((n, 8),) for n in (128, 512, 576)),
    ((8, 8), (8, 16)),
]


@each("layout", EXTREMES)
@each("codes", ["largest", "smallest", "signs"])
def test_sums_do_not_overflow(table: o.Ops, layout: o.Layout, codes: str) -> None:
    """Thousands of equal weights, and products of the largest codes with equal signs."""
    k, v = (o.make_head(layout, 576, np.random.default_rng(2), value=value) for value in (False, True))
    n = 2113
    k_rows, v_rows = (np.tile(extreme_row(head, codes), (n, 1)) for head in (k, v))
    keys, values = (np.tile(o.dequantize(head, rows[:1]), (n, 1)) for head, rows in ((k, k_rows), (v, v_rows)))
    rounded = Rounded.of(k, v, keys, values, v_rows)
    laid_out = o.to_tiles(k, k_rows), o.to_tiles(v, v_rows)
    # every query coefficient is as large as its rounding has room for, and their products add up
    q = (np.where(keys[0] < 0, -1.0, 1.0) / k.coefficient_step).astype(np.float32)
    q *= np.float32(5 / float(keys[0] @ q))
    # in float, as the reference, the sums of a row do not depend on the other rows
    for n_tok, n_group in [(1, 1), (1, 3), (1, 8), (5, 3)] if table.rounding > 0 else [(1, 3)]:
        queries = np.tile(q, (n_tok * n_group, 1))
        queries[1::2] *= -1
        hidden = np.random.default_rng(3).random((n_tok, n)) >= 0.5
        for bias in (np.zeros((n_tok, n), np.float32), np.where(hidden, -np.inf, 0).astype(np.float32)):
            case = Case(queries, bias, np.zeros(n_group, np.float32), 0.0, keys, values, rounded=rounded)
            state = o.State.start(len(queries), v.rank)
            o.attend_tiles(table, k, v, *laid_out, n, case.q, case.bias, case.slope, case.softcap, state)
            case.check(state, table.rounding)


def extreme_row(head: o.Head, codes: str) -> o.U8:
    """Scale 1; all codes at one end of their range, or half of them at each end; 16-bit bands hold ones."""
    row = np.full(head.row_bytes, 255 if codes == "largest" else 0, np.uint8)
    row[0] = o.SCALE_ONE
    for band in head.codec.bands[: head.codec.n_bands]:
        part = row[band.offset : band.offset + band.n * band.bits // 8]
        if band.bits == 16:
            part[:] = np.ones(band.n, "<f2").view(np.uint8)
        elif codes == "signs":  # every other coefficient has all bits of its code set
            bits = np.zeros(8 * len(part), np.uint8)
            bits[tiles.band_in_row(band.n, band.bits)[::2]] = 1
            part[:] = np.packbits(bits, bitorder="little")
    return row


@each("rows", [(1, 1), (1, 3), (1, 8), (9, 3)])
@each("ascending", [False, True])
@each("layout", [MIXED[0], MIXED[4], ((64, 8),)])
def test_weights_of_very_different_size(table: o.Ops, layout: o.Layout, ascending: bool, rows: tuple[int, int]) -> None:
    """Logits differ by hundreds and scales of values use their whole range; the largest are first or last."""
    k, v = pair(layout, layout)
    n = 300
    case, k_rows, v_rows = make_case(k, v, n, rows, 17)
    rng = np.random.default_rng(18)
    order = np.linspace(-300, 0, n) if ascending else np.linspace(0, -300, n)
    hidden = np.isneginf(case.bias)
    case.bias[:, :n] = order + rng.uniform(-20, 20, (rows[0], n))
    case.bias[hidden] = -np.inf
    case.slope[:] = rng.uniform(0.2, 1, rows[1])
    everyone = hidden[:, :n].all(axis=0)
    v_rows[~everyone, 0] = rng.integers(1, 256, int((~everyone).sum()))
    clean = np.where(everyone[:, None], np.uint8(0), v_rows)
    case.v = o.dequantize(v, clean)
    case.rounded = Rounded.of(k, v, case.k, case.v, clean)
    state = o.State.start(len(case.q), v.rank)
    run(table, k, v, case, k_rows, v_rows, state)
    case.check(state, table.rounding)


@each("rows", [(1, 3), (6, 3)])
def test_query_rows_are_independent(table: o.Ops, rows: tuple[int, int]) -> None:
    """Other rows of the call do not change a query row's result, up to rounding."""
    k, v = pair(MIXED[0], MIXED[2])
    case, k_rows, v_rows = make_case(k, v, 100, rows, 10)
    state = o.State.start(len(case.q), v.rank)
    for t in range(rows[0]):
        part = slice(t * rows[1], (t + 1) * rows[1])
        own = o.State(state.m[part], state.z[part], state.acc[part])
        o.attend(table, k, v, k_rows, v_rows, case.q[part], case.bias[t : t + 1], case.slope, 0.0, own)
    case.check(state, table.rounding)


def fenced_tiles(head: o.Head, rows: o.U8, extra: int = 0) -> tuple[Fenced, o.U8]:
    """The memory and the tiles of these rows; an inaccessible page follows the last tile."""
    laid_out = o.to_tiles(head, rows, extra)
    fence = Fenced(laid_out.tobytes()[: laid_out.size - extra])
    return fence, fence.tiles(laid_out.shape[1], laid_out.shape[1] - extra)


@each("layout", layouts.LAYOUTS)
@each("rows", [(1, 3), (6, 3)])
@each("extra", [0, 128])
def test_nothing_is_read_beyond_the_last_tile(
    table: o.Ops, layout: o.Layout, rows: tuple[int, int], extra: int
) -> None:
    k, v = pair(layout, layout)
    n = 66
    case, k_rows, v_rows = make_case(k, v, n, rows, 12)
    fence_k, k_tiles = fenced_tiles(k, k_rows, extra)
    fence_v, v_tiles = fenced_tiles(v, v_rows, extra)
    fence_b = Fenced(np.ascontiguousarray(case.bias[:, :n]).tobytes())
    flat = np.frombuffer(memoryview((ct.c_float * (rows[0] * n)).from_address(fence_b.at)), np.float32)
    bias = flat.reshape(rows[0], n)
    state = o.State.start(len(case.q), v.rank)
    o.attend_tiles(table, k, v, k_tiles, v_tiles, n, case.q, bias, case.slope, 0.0, state)
    case.check(state, table.rounding)
    cells = np.arange(n)
    for head, fenced, x in ((k, k_tiles, case.k), (v, v_tiles, case.v)):
        out = np.empty((n, head.rank), np.float32)
        table.dequantize(head.ref(), o.ptr(fenced), fenced.strides[0], n, o.ptr(cells), o.ptr(out))
        visible = ~np.isneginf(case.bias[:, :n]).all(axis=0)
        assert np.all(np.abs(out - x)[visible] <= 2 * o.EPS * np.abs(x[visible]))
        inputs = np.random.default_rng(1).standard_normal((n, head.codec.d)).astype(np.float32)
        table.encode(head.ref(), o.ptr(inputs), head.codec.d, n, o.ptr(cells), o.ptr(fenced), fenced.strides[0])
        want = np.zeros((n, head.row_bytes), np.uint8)
        o.encode(table, head, inputs, list(range(n)), want)
        assert np.array_equal(o.to_rows(head, np.ascontiguousarray(fenced))[:n], want)
    del fence_k, fence_v, fence_b
