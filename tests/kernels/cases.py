"""Cases of attend and attend_exact, expected results in double, and tolerances.

Tolerance of a logit: 16 eps (sum |q_j||k_j| + |bias| + softcap); of z and acc: that, plus 16 eps, times their
magnitude (sum of weights, sum of weight * |v|). Versions with integer products also round queries and weights, by
their table's `rounding`: errors of half that step, times the other factor (Rounded).
"""

from __future__ import annotations

import ctypes as ct
import mmap
from dataclasses import dataclass

import layouts
import numpy as np
import numpy.typing as npt
import ops as o

LENGTHS = [0, 1, 7, 8, 9, 16, 63, 64, 65, 127, 128, 129, 191, 193, 300]
# (n_tok, n_group)
ROWS = [(1, 1), (1, 3), (1, 8), (2, 3), (3, 5), (5, 1), (1, 16), (17, 3), (8, 8), (1, 64), (1, 128), (70, 1)]


@dataclass
class Rounded:
    """Coded cells in integer products: centred codes without scale; the other factor includes the scale.

    16-bit bands are excluded.
    """

    ratio_k: o.F64  # [rank], of the queries' coefficients
    keys: o.F64  # [n], largest sum of |scale * centred code| of a cell's key
    scale_v: o.F64  # [n], of the weights
    values: o.F64  # [n][rank], |ratio * centred code|

    @classmethod
    def of(cls, k: o.Head, v: o.Head, keys: o.F64, values: o.F64, v_rows: o.U8) -> Rounded:
        rounded_k, rounded_v = (np.repeat([b != 16 for _, b in x.layout], [n for n, _ in x.layout]) for x in (k, v))
        ratio = np.where(rounded_k, k.coefficient_step, 0.0)
        units = np.abs(keys[:, rounded_k]) / ratio[rounded_k]
        scale = np.nan_to_num(o.SCALES[v_rows[:, 0]].astype(np.float64))
        bare = np.abs(values) * rounded_v / np.where(scale > 0, scale, 1.0)[:, None]
        return cls(ratio, units.sum(axis=1), scale, bare)

    def logits(self, q: o.F32, visible: npt.NDArray[np.bool_]) -> o.F64:
        """Largest error [rows] of a visible logit for a rounding of 1."""
        step = 0.5 if q.shape[1] <= 512 else 0.5 * 576 / 512
        return step * np.abs(q * self.ratio_k).max(axis=1) * (visible * self.keys).max(axis=1, initial=0.0)

    def sums(self, weights: o.F64) -> o.F64:
        """Largest error [rows][rank] of acc for a rounding of 1."""
        visible = (weights > 0).any(axis=0)
        heaviest = weights.max(axis=1, initial=0.0) * (self.scale_v * visible).max(initial=0.0)
        return 0.5 * heaviest[:, None] * ((weights > 0).astype(np.float64) @ self.values)


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
        """rounding: of the table that computed the state."""
        m, z, acc, size, weight_v, weights = o.attention(
            self.q, self.k, self.v, self.bias, self.slope, self.softcap, self.shift
        )
        dv = self.v.shape[1]
        lost = np.isnan(z)
        assert np.all(np.isnan(state.z[lost]) | ~np.isfinite(state.acc[lost, :dv]).all(axis=1))
        assert not np.any(np.isneginf(state.m[lost]))
        dead = np.isneginf(m) & ~lost
        assert np.all(np.isneginf(state.m[dead]))
        assert np.all(state.z[dead] == 0)
        assert np.all(state.acc[dead, :dv] == 0)
        assert np.all(state.acc[:, dv:] == 12345.0)
        live = ~dead & ~lost
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
    """Causal-like mask with random holes; columns from n on are NaN, because no kernel may read them."""
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
    shift: float = 0.0,
) -> tuple[Case, o.U8, o.U8]:
    rng = np.random.default_rng(seed)
    n_tok, n_group = rows
    k_rows, v_rows = o.random_rows(k, n, rng), o.random_rows(v, n, rng)
    keys, values = o.dequantize(k, k_rows), o.dequantize(v, v_rows)
    q = rng.standard_normal((n_tok * n_group, k.rank)).astype(np.float32)
    if n > 0:  # logits of a few units
        q *= np.float32(4 / max(1e-3, float((keys @ q.T).std())))
    bias = make_bias(n_tok, n, rng, 3)
    slope = rng.uniform(0, 1.5, n_group).astype(np.float32)
    slope[0] = 0
    hidden = np.isneginf(bias[:, :n]).all(axis=0)
    k_rows[hidden] = rng.choice(np.array([0, 1, 255], np.uint8), (int(hidden.sum()), k_rows.shape[1]))
    v_rows[hidden] = 255
    shifts = (shift * rng.standard_normal(len(q))).astype(np.float32) if shift else None
    rounded = Rounded.of(k, v, keys, values, v_rows)
    return Case(q, bias, slope, softcap, keys, values, shifts, rounded), k_rows, v_rows


def run(
    table: o.Ops, k: o.Head, v: o.Head, case: Case, k_rows: o.U8, v_rows: o.U8, state: o.State, extra: int = 3
) -> None:
    """extra: bytes between tiles."""
    o.attend(table, k, v, k_rows, v_rows, case.q, case.bias, case.slope, case.softcap, state, case.shift, extra)


def pair(layout_k: o.Layout, layout_v: o.Layout) -> tuple[o.Head, o.Head]:
    rng = np.random.default_rng(1)
    k = o.make_head(layout_k, layouts.head_size(layout_k), rng)
    return k, o.make_head(layout_v, layouts.head_size(layout_v), rng, value=True)


class Fenced:
    """`data` directly before an inaccessible page."""

    def __init__(self, data: bytes) -> None:
        page = mmap.PAGESIZE
        self.size = len(data)
        size = (len(data) + page - 1) // page * page
        self.map = mmap.mmap(-1, size + page)
        self.base = ct.addressof(ct.c_char.from_buffer(self.map))
        self.at = self.base + size - len(data)
        ct.memmove(self.at, data, len(data))
        libc = ct.CDLL(None, use_errno=True)
        assert libc.mprotect(ct.c_void_p(self.base + size), page, 0) == 0  # PROT_NONE

    def tiles(self, stride: int, tile_bytes: int) -> o.U8:
        """[n_tiles][tile_bytes] view of tiles that begin `stride` bytes apart, the last one ending at the fence."""
        flat = np.frombuffer(memoryview((ct.c_uint8 * self.size).from_address(self.at)), np.uint8)
        n_tiles = 1 + (self.size - tile_bytes) // stride
        return np.lib.stride_tricks.as_strided(flat, (n_tiles, tile_bytes), (stride, 1))
