"""encode: c = E x - offset, quantized into rows. For equal c the codes equal those of kernels/ref/encode.cpp.

Three kernels compute the best scale code without a path, paths if heads have one (path.py), and the rows' bytes.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from subkv_triton.codecs import DROP, KIND, LIFT, MASK, N_ROWS, ON, SLOTS, SOURCE, Codecs
from subkv_triton.fields import (
    CODED,
    HALF,
    HALF_MAX,
    PATH_BELOW,
    PATH_TRIED,
    SCALE_CANDIDATES_BELOW,
    SCALE_MOST,
    SCALE_NAN,
    SCALE_ONE,
    scale_table,
)
from subkv_triton.path import find_paths

_CANDIDATES = tl.constexpr(triton.next_power_of_2(1 + SCALE_CANDIDATES_BELOW))
_SCALE_ONE, _BELOW = tl.constexpr(SCALE_ONE), tl.constexpr(SCALE_CANDIDATES_BELOW)
_SCALE_MOST, _SCALE_NAN = tl.constexpr(SCALE_MOST), tl.constexpr(SCALE_NAN)
_SOURCE, _DROP, _MASK, _LIFT, _SLOTS = (tl.constexpr(i) for i in (SOURCE, DROP, MASK, LIFT, SLOTS))
_KIND, _ON, _ROWS, _CODED, _HALF = (tl.constexpr(i) for i in (KIND, ON, N_ROWS, CODED, HALF))
_PATH_BELOW, _PATH_TRIED = tl.constexpr(PATH_BELOW), tl.constexpr(PATH_TRIED)
_HALF_MAX = tl.constexpr(HALF_MAX)


@functools.cache
def scales(device: torch.device) -> torch.Tensor:
    """F32 [256]: the scale of every scale code; copied to a device once."""
    return torch.from_numpy(scale_table()).to(device)


@triton.jit
def _quantize(c, inverse, zero):
    """Nearest code, ties to even: adding 1.5 * 2^23 rounds to an integer."""
    u = tl.minimum(tl.maximum(tl.fma(c, inverse, zero), -1.0), 2.0 * zero + 1.0)
    u = (u + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(u, 0.0), 2.0 * zero)


@triton.jit
def _squared_errors(c_row, s, kinds, on, ratios, zeros, R: tl.constexpr, N: tl.constexpr, OFF_PATH: tl.constexpr):
    """Squared errors [N] of a row at scales s [N, 1], summed in the reference's order: coefficient j in lane j % 8.

    OFF_PATH: count only coefficients outside the path.
    """
    lane = tl.arange(0, 8)
    error = tl.zeros((N, 8), tl.float32)
    for i in range(0, R, 8):
        x = tl.load(c_row + i + lane)[None, :]
        zero = tl.load(zeros + i + lane)[None, :]
        step = s * tl.load(ratios + i + lane)[None, :]
        u = _quantize(x, tl.div_rn(1.0, step), zero)
        e = tl.fma(-step, u - zero, x)
        counted = tl.load(kinds + i + lane) == _CODED
        if OFF_PATH:
            counted = counted & (tl.load(on + i + lane) == 0)
        error = tl.where(counted[None, :], tl.fma(e, e, error), error)
    pairs = tl.sum(tl.reshape(error, (N, 2, 2, 2)), axis=1)
    return tl.sum(tl.sum(pairs, axis=1), axis=1)


@triton.jit
def _choose(
    c_ptr,
    scales_ptr,
    coefficients_ptr,
    ratios_ptr,
    zeros_ptr,
    chosen_ptr,
    off_path_ptr,
    bad_ptr,
    R: tl.constexpr,
    ANY_PATH: tl.constexpr,
):
    """Writes the scale code of one row, of token program_id(0) and head program_id(1), from c [n, H, R].

    chosen [n, H] receives it, or 0 for a row without codes. bad [n, H] receives whether the row is not finite.

    off_path [n, H, PATH_TRIED]: squared errors of coefficients outside the path at the candidate scale codes.
    """
    token, head, n_head = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = token.to(tl.int64) * n_head + head
    c_row = c_ptr + at * R
    kinds = coefficients_ptr + (head * _ROWS + _KIND) * R
    on = coefficients_ptr + (head * _ROWS + _ON) * R
    ratios, zeros = ratios_ptr + head * R, zeros_ptr + head * R

    j = tl.arange(0, R)
    c = tl.load(c_row + j)
    coded = tl.load(kinds + j) == _CODED
    size = tl.abs(c)
    finite = tl.sum((size < float("inf")).to(tl.int32), axis=0) == R
    live = finite & (tl.max(size, axis=0) > 0)
    tl.store(bad_ptr + at, (~finite).to(tl.int32))

    # k0 is the smallest scale code without clipping.
    full = tl.where(coded, tl.load(ratios + j) * tl.load(zeros + j), 1.0)
    reach = tl.max(tl.where(coded & live, tl.div_rn(size, full), 0.0), axis=0)
    every = tl.arange(0, 256)
    small = (every >= 1) & (every < _SCALE_MOST) & (tl.load(scales_ptr + every) < reach)
    k0 = 1 + tl.sum(small.to(tl.int32), axis=0)

    below = tl.arange(0, _CANDIDATES)
    candidate = k0 - below
    tried = (below <= _BELOW) & (candidate >= 1)
    s = tl.load(scales_ptr + candidate, mask=tried, other=1.0)[:, None]
    total = _squared_errors(c_row, s, kinds, on, ratios, zeros, R, _CANDIDATES, False)
    total = tl.where(tried & live, total, float("inf"))
    least = tl.min(total, axis=0)
    best = k0 - tl.min(tl.where(total == least, below, _CANDIDATES), axis=0)  # Ties go to the larger scale.
    best = tl.where(tl.max(coded.to(tl.int32), axis=0) > 0, best, _SCALE_ONE)
    tl.store(chosen_ptr + at, tl.where(live, best, 0))
    if ANY_PATH:
        tried = tl.arange(0, _PATH_TRIED)
        k = tl.minimum(tl.maximum(best - _PATH_BELOW + tried, 1), _SCALE_MOST)
        s = tl.load(scales_ptr + k)[:, None]
        error = _squared_errors(c_row, s, kinds, on, ratios, zeros, R, _PATH_TRIED, True)
        tl.store(off_path_ptr + at * _PATH_TRIED + tried, error)


@triton.jit
def _pack(
    c_ptr,
    chosen_ptr,
    bad_ptr,
    codes_ptr,
    cells_ptr,
    rows_ptr,
    row_stride,
    scales_ptr,
    offsets_ptr,
    lengths_ptr,
    coefficients_ptr,
    ratios_ptr,
    zeros_ptr,
    packing_ptr,
    n_bytes,
    scales_at,
    R: tl.constexpr,
    B: tl.constexpr,
    ANY_PATH: tl.constexpr,
):
    """The words of one row, and its scale; programs as in _choose.

    codes U8 [n, H, R]: codes on paths; B >= n_bytes: bytes packed.
    """
    token, head, n_head = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = token.to(tl.int64) * n_head + head
    c_row = c_ptr + at * R
    kinds = coefficients_ptr + (head * _ROWS + _KIND) * R
    on = coefficients_ptr + (head * _ROWS + _ON) * R
    ratios, zeros = ratios_ptr + head * R, zeros_ptr + head * R
    chosen = tl.load(chosen_ptr + at)
    live = chosen > 0
    s = tl.load(scales_ptr + tl.where(live, chosen, _SCALE_ONE))

    b = tl.arange(0, B)
    inside = b < n_bytes
    out = tl.zeros((B,), tl.int32)
    for slot in range(_SLOTS):
        entry = packing_ptr + (head * 4 * _SLOTS + slot) * n_bytes + b
        source = tl.load(entry + _SOURCE * _SLOTS * n_bytes, mask=inside, other=0)
        mask = tl.load(entry + _MASK * _SLOTS * n_bytes, mask=inside, other=0)
        x = tl.load(c_row + source)
        step = s * tl.load(ratios + source)
        u = _quantize(x, tl.div_rn(1.0, step), tl.load(zeros + source)).to(tl.int32)
        half = tl.minimum(tl.maximum(x, -_HALF_MAX), _HALF_MAX).to(tl.float16).to(tl.int16, bitcast=True)
        u = tl.where(tl.load(kinds + source) == _HALF, half.to(tl.int32) & 0xFFFF, u)
        if ANY_PATH:
            code = tl.load(codes_ptr + at * R + source).to(tl.int32)
            u = tl.where(tl.load(on + source) > 0, code, u)
        drop = tl.load(entry + _DROP * _SLOTS * n_bytes, mask=inside, other=0)
        lift = tl.load(entry + _LIFT * _SLOTS * n_bytes, mask=inside, other=0)
        out = out | ((u >> drop) & mask) << lift
    cell = rows_ptr + tl.load(cells_ptr + token) * row_stride
    words = cell + tl.load(offsets_ptr + head)
    tl.store(words + b, tl.where(live, out, 0).to(tl.uint8), mask=b < tl.load(lengths_ptr + head))
    empty = tl.where(tl.load(bad_ptr + at) > 0, _SCALE_NAN, 0)
    tl.store(cell + scales_at + head, tl.where(live, chosen, empty).to(tl.uint8))


def encode_rows(codecs: Codecs, x: torch.Tensor, cells: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Encode x [n, H, d] (any float type) into rows U8 [n_cells, >= row_bytes] at cells I64 [n].

    Returns I32 [n, H]: 1 for a row with a non-finite coefficient; its scale is NaN.
    """
    c = torch.einsum("hrd,nhd->nhr", codecs.encode.float(), x.float())
    if codecs.subtracted is not None:
        c = c - codecs.subtracted
    c = c.contiguous()
    n, n_head, width = c.shape
    bad, chosen = (torch.zeros((n, n_head), dtype=torch.int32, device=x.device) for _ in range(2))
    if n == 0:
        return bad
    any_path = codecs.n_place > 0
    off_path = torch.empty((n, n_head, PATH_TRIED if any_path else 0), dtype=torch.float32, device=x.device)
    tables = scales(x.device), codecs.coefficients, codecs.ratios, codecs.zeros
    _choose[(n, n_head)](c, *tables, chosen, off_path, bad, R=width, ANY_PATH=any_path)
    codes = find_paths(codecs, c, chosen, off_path, scales(x.device)) if any_path else bad
    n_bytes = codecs.packing.shape[3]
    _pack[(n, n_head)](
        c,
        chosen,
        bad,
        codes,
        cells,
        rows,
        rows.stride(0),
        scales(x.device),
        codecs.offsets,
        codecs.lengths,
        codecs.coefficients,
        codecs.ratios,
        codecs.zeros,
        codecs.packing,
        n_bytes,
        codecs.scales_at,
        R=width,
        B=triton.next_power_of_2(n_bytes),
        ANY_PATH=any_path,
    )
    return bad
