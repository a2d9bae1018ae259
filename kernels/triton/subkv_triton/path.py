"""Trellis search: the codes of bands of 2 to 6 bits, with the costs of kernels/ref/trellis.cpp.

A program searches BLOCK rows of one head: forward at all candidate scales, forward at the best scale with each of the
four states as start and end, then backward along the best path. State w is x_{t-1} + 2 x_{t-2}, with x the lowest bit
of a code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from subkv_triton.codecs import (
    LINES,
    N_LEVELS,
    N_PLACE_NUMBERS,
    PLACE,
    PLACE_DOUBLE,
    PLACE_STEP,
    PLACE_TRIPLE,
    Codecs,
)
from subkv_triton.fields import LINE_FACTORS, PATH_BELOW, PATH_TRIED, SCALE_MOST

BLOCK = 32
_PLACE, _LEVELS, _STEP, _DOUBLE, _TRIPLE, _LINES, _NUMBERS, _TRIED, _BELOW = (
    tl.constexpr(i)
    for i in (
        PLACE,
        N_LEVELS,
        PLACE_STEP,
        PLACE_DOUBLE,
        PLACE_TRIPLE,
        LINES,
        N_PLACE_NUMBERS,
        PATH_TRIED,
        PATH_BELOW,
    )
)
_SCALE_MOST = tl.constexpr(SCALE_MOST)
_A1, _A2, _A3, _A4 = (tl.constexpr(float(a)) for a in LINE_FACTORS)


@triton.jit
def _quarter(c, step, numbers, T):
    """A quarter of c's position among the levels, from the middle. numbers: Codecs.place_numbers of the place."""
    y = c * tl.div_rn(1.0, step)
    size = tl.abs(y)
    line = numbers + _LINES * T
    level = tl.minimum(size, tl.fma(size, _A1, tl.load(line)))
    level = tl.minimum(level, tl.fma(size, _A2, tl.load(line + T)))
    level = tl.minimum(level, tl.fma(size, _A3, tl.load(line + 2 * T)))
    level = tl.minimum(level, tl.fma(size, _A4, tl.load(line + 3 * T)))
    return tl.where(y < 0, -level, level) * 0.25


@triton.jit
def _index(quarter, n_codes, q):
    """Index of the nearest level with index % 4 = q. n_codes: 2^bits. Ties go to even groups of four."""
    group = tl.minimum(tl.maximum(quarter + 0.25 * (n_codes - 0.5 - q), -1.0), 0.5 * n_codes)
    group = (group + 12582912.0) - 12582912.0
    return 4.0 * tl.minimum(tl.maximum(group, 0.0), 0.5 * n_codes - 1.0) + q


@triton.jit
def _error(c, step, quarter, n_codes, double, triple, q):
    y = _index(quarter, n_codes, q) - (n_codes - 0.5)
    size = tl.abs(y)
    far = tl.maximum(size - double, 0.0) + tl.maximum(size - triple, 0.0)
    return tl.fma(-step, tl.where(y < 0, y - far, y + far), c)


@triton.jit
def _extend(c, s, n_codes, numbers, T, w0, w1, w2, w3):
    """Costs of the states after one place, and decisions: bit w is 1 if the branch from the larger state is cheaper."""
    step = s * tl.load(numbers + _STEP * T)
    double, triple = tl.load(numbers + _DOUBLE * T), tl.load(numbers + _TRIPLE * T)
    quarter = _quarter(c, step, numbers, T)
    e0 = _error(c, step, quarter, n_codes, double, triple, 0.0)
    e1 = _error(c, step, quarter, n_codes, double, triple, 1.0)
    e2 = _error(c, step, quarter, n_codes, double, triple, 2.0)
    e3 = _error(c, step, quarter, n_codes, double, triple, 3.0)
    a0, b0 = tl.fma(e0, e0, w0), tl.fma(e2, e2, w2)
    a1, b1 = tl.fma(e2, e2, w0), tl.fma(e0, e0, w2)
    a2, b2 = tl.fma(e1, e1, w1), tl.fma(e3, e3, w3)
    a3, b3 = tl.fma(e3, e3, w1), tl.fma(e1, e1, w3)
    decisions = (b0 < a0).to(tl.int32) | (b1 < a1).to(tl.int32) << 1
    decisions = decisions | (b2 < a2).to(tl.int32) << 2 | (b3 < a3).to(tl.int32) << 3
    return tl.minimum(a0, b0), tl.minimum(a1, b1), tl.minimum(a2, b2), tl.minimum(a3, b3), decisions


@triton.jit
def _find(
    c_ptr,
    chosen_ptr,
    off_path_ptr,
    codes_ptr,
    decisions_ptr,
    scales_ptr,
    lengths_ptr,
    places_ptr,
    numbers_ptr,
    n,
    T,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Rows of block program_id(0), head program_id(1). decisions I32 [H, T, n]: four bits per start state."""
    head, n_head = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * B + tl.arange(0, B)
    length = tl.load(lengths_ptr + head)
    inside = row < tl.where(length > 0, n, 0)
    at = row.to(tl.int64) * n_head + head
    places, all_numbers = places_ptr + head * 2 * T, numbers_ptr + head * _NUMBERS * T
    middle = tl.load(chosen_ptr + at, mask=inside, other=0)
    live = inside & (middle > 0)
    c_rows = c_ptr + at * R

    # The search of the scale allows any start and end state.
    tried = tl.arange(0, _TRIED)[None, :]
    k = middle[:, None] - _BELOW + tried
    s = tl.load(scales_ptr + tl.minimum(tl.maximum(k, 1), _SCALE_MOST))
    w0 = tl.zeros((B, _TRIED), tl.float32)
    w1, w2, w3 = w0, w0, w0
    for t in range(length):
        c = tl.load(c_rows + tl.load(places + _PLACE * T + t), mask=live, other=0.0)[:, None]
        n_codes = tl.load(places + _LEVELS * T + t).to(tl.float32)
        w0, w1, w2, w3, _ = _extend(c, s, n_codes, all_numbers + t, T, w0, w1, w2, w3)
    cost = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
    cost += tl.load(off_path_ptr + at[:, None] * _TRIED + tried, mask=live[:, None], other=0.0)
    cost = tl.where((k >= 1) & (k <= _SCALE_MOST), cost, float("inf"))
    least = tl.min(cost, axis=1)
    first = tl.min(tl.where(cost == least[:, None], tried, _TRIED), axis=1)
    best = tl.where(least < float("inf"), middle - _BELOW + first, middle)
    tl.store(chosen_ptr + at, best, mask=live)

    # The path starts and ends in the same state.
    s_best = tl.load(scales_ptr + tl.where(live, best, 1))
    end = tl.arange(0, 4)[None, :]
    zero = tl.zeros((B, 4), tl.float32)
    w0 = tl.where(end == 0, zero, float("inf"))
    w1 = tl.where(end == 1, zero, float("inf"))
    w2 = tl.where(end == 2, zero, float("inf"))
    w3 = tl.where(end == 3, zero, float("inf"))
    decisions_row = decisions_ptr + head.to(tl.int64) * T * n + row
    for t in range(length):
        c = tl.load(c_rows + tl.load(places + _PLACE * T + t), mask=live, other=0.0)[:, None]
        n_codes = tl.load(places + _LEVELS * T + t).to(tl.float32)
        w0, w1, w2, w3, decisions = _extend(c, s_best[:, None], n_codes, all_numbers + t, T, w0, w1, w2, w3)
        tl.store(decisions_row, tl.sum(decisions << (4 * end), axis=1), mask=live)
        decisions_row += n
    cost = tl.where(end == 0, w0, tl.where(end == 1, w1, tl.where(end == 2, w2, w3)))
    least = tl.min(cost, axis=1)
    state = tl.min(tl.where(cost == least[:, None], end, 4), axis=1)

    tl.debug_barrier()  # Threads read bits that other threads have written.
    shift = 4 * state
    for i in range(length):
        t = length - 1 - i
        decisions_row -= n
        place = tl.load(places + _PLACE * T + t)
        c = tl.load(c_rows + place, mask=live, other=0.0)
        n_codes = tl.load(places + _LEVELS * T + t).to(tl.float32)
        bits = tl.load(decisions_row, mask=live, other=0)
        x, low = state & 1, state >> 1
        high = (bits >> (shift + state)) & 1
        step = s_best * tl.load(all_numbers + t + _STEP * T)
        q = 2 * (x ^ high) + low
        index = _index(_quarter(c, step, all_numbers + t, T), n_codes, q.to(tl.float32)).to(tl.int32)
        state = 2 * high + low
        tl.store(codes_ptr + at * R + place, ((index ^ state) >> 1).to(tl.uint8), mask=live)


def find_paths(
    codecs: Codecs, c: torch.Tensor, chosen: torch.Tensor, off_path: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Codes U8 [n, H, R] of coefficients c [n, H, R] on their paths; undefined elsewhere.

    chosen I32 [n, H]: in: the best scale codes without a path (0: skip the row); out: those of the paths. off_path F32
    [n, H, PATH_TRIED]: squared errors of coefficients outside paths at the candidate scale codes.
    """
    n, n_head, width = c.shape
    codes = torch.empty((n, n_head, width), dtype=torch.uint8, device=c.device)
    decisions = torch.empty((n_head, codecs.n_place, n), dtype=torch.int32, device=c.device)
    _find[(triton.cdiv(n, BLOCK), n_head)](
        c,
        chosen,
        off_path,
        codes,
        decisions,
        scales,
        codecs.path_lengths,
        codecs.places,
        codecs.place_numbers,
        n,
        codecs.n_place,
        R=width,
        B=BLOCK,
    )
    return codes
