"""attend_exact of every version against softmax in double (cases.py), and one state through both ops."""

from __future__ import annotations

import numpy as np
import ops as o
from cases import LENGTHS, ROWS, Case, Fenced, make_bias
from each import each

SIZES = [(64, 64), (8, 8), (40, 24), (80, 128), (256, 256)]


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


@each("n", LENGTHS)
@each("rows", ROWS)
def test_exact_lengths(table: o.Ops, n: int, rows: tuple[int, int]) -> None:
    check_exact(table, n, rows, (64, 64), 0.0)


@each("d", SIZES)
@each("rows", [(1, 4), (7, 2)])
@each("softcap", [0.0, 2.0])
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
    """One state through both ops. E is the identity, so coefficients equal values."""
    rng = np.random.default_rng(0)
    k_head, v_head = (o.make_head(((64, 16),), 64, rng, orthonormal=True, value=value) for value in (False, True))
    for rows in ((1, 3), (9, 3)):
        case, k, v = exact_case(200, rows, (64, 64), 3, 0.0)
        coded = np.zeros((100, 129), np.uint8)
        coded_v = coded.copy()
        coded[:, 0] = coded_v[:, 0] = o.SCALE_ONE
        coded[:, 1:] = np.array(k[:100], np.uint16).view(np.uint8).reshape(100, 128)
        coded_v[:, 1:] = np.array(v[:100], np.uint16).view(np.uint8).reshape(100, 128)
        state = o.State.start(len(case.q), 64)
        o.attend(table, k_head, v_head, coded, coded_v, case.q, case.bias, case.slope, 0.0, state)
        keys, values = [o.ptr(h) for h in k[100:]], [o.ptr(h) for h in v[100:]]
        o.attend_exact(table, keys, values, 64, 64, case.q, case.bias[:, 100:], case.slope, 0.0, state)
        case.check(state)


@each("rows", [(2, 3), (9, 4), (40, 1)])
def test_other_rows_of_a_call_and_hidden_pages_change_no_bit(table: o.Ops, rows: tuple[int, int]) -> None:
    n, n_group = 330, rows[1]
    case, k, v = exact_case(n, rows, (64, 40), 5, 0.0)
    for t in range(rows[0]):  # keys that begin and end in different pages
        case.bias[t, : 90 * (t % 3)] = -np.inf
        case.bias[t, n - 30 * (t % 4) : n] = -np.inf
    together = o.State.start(len(case.q), 40)
    o.attend_exact(
        table, [o.ptr(h) for h in k], [o.ptr(h) for h in v], 64, 40, case.q, case.bias, case.slope, 0.0, together
    )
    for t in range(rows[0]):
        own = slice(t * n_group, (t + 1) * n_group)
        first = 90 * (t % 3) // 128 * 128
        hidden = np.isneginf(case.bias[t])
        last = n - 30 * (t % 4)
        keys, values = ([0 if hidden[i] else o.ptr(x[i]) for i in range(first, last)] for x in (k, v))
        alone = o.State.start(n_group, 40)
        bias = case.bias[t : t + 1, first:].copy()
        o.attend_exact(table, keys, values, 64, 40, case.q[own].copy(), bias, case.slope, 0.0, alone)
        assert np.array_equal(alone.m, together.m[own])
        assert np.array_equal(alone.z, together.z[own])
        assert np.array_equal(alone.acc, together.acc[own])
