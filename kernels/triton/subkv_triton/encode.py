"""encode: c = E x - offset, quantized into rows. The bytes are those of kernels/ref/encode.cpp for the same c."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from subkv_triton.codecs import DROP, KIND, LIFT, MASK, SLOTS, SOURCE, Codecs
from subkv_triton.fields import CODED, HALF, HALF_MAX, SCALE_CANDIDATES_BELOW, SCALE_ONE, scale_table

_CANDIDATES = tl.constexpr(triton.next_power_of_2(1 + SCALE_CANDIDATES_BELOW))
_SCALE_ONE, _BELOW = tl.constexpr(SCALE_ONE), tl.constexpr(SCALE_CANDIDATES_BELOW)
_SOURCE, _DROP, _MASK, _LIFT, _SLOTS = (tl.constexpr(i) for i in (SOURCE, DROP, MASK, LIFT, SLOTS))
_KIND, _CODED, _HALF = (tl.constexpr(i) for i in (KIND, CODED, HALF))
_HALF_MAX = tl.constexpr(HALF_MAX)


@functools.cache
def scales(device: torch.device) -> torch.Tensor:
    """F32 [256]: the scale of every scale code, copied to a device once."""
    return torch.from_numpy(scale_table()).to(device)


@triton.jit
def _quantize(c, inverse, zero):
    """Nearest code, ties to even: beyond 2^22 floats have no room for a fraction."""
    u = tl.minimum(tl.maximum(tl.fma(c, inverse, zero), -1.0), 2.0 * zero + 1.0)
    u = (u + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(u, 0.0), 2.0 * zero)


@triton.jit
def _encode(
    c_ptr,
    cells_ptr,
    rows_ptr,
    row_stride,
    scales_ptr,
    offsets_ptr,
    lengths_ptr,
    kinds_ptr,
    ratios_ptr,
    zeros_ptr,
    packing_ptr,
    bad_ptr,
    n_bytes,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """One row: token program_id(0), head program_id(1). c [n, H, R], bad [n, H]; B >= n_bytes bytes are packed."""
    token, head, n_head = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    c_row = c_ptr + (token.to(tl.int64) * n_head + head) * R
    kinds = kinds_ptr + (head * 8 + _KIND) * R
    ratios, zeros = ratios_ptr + head * R, zeros_ptr + head * R

    j = tl.arange(0, R)
    c = tl.load(c_row + j)
    coded = tl.load(kinds + j) == _CODED
    size = tl.abs(c)
    finite = tl.sum((size < float("inf")).to(tl.int32), axis=0) == R
    live = finite & (tl.max(size, axis=0) > 0)
    tl.store(bad_ptr + token * n_head + head, (~finite).to(tl.int32))

    # k0: the smallest scale code that clips nothing
    full = tl.where(coded, tl.load(ratios + j) * tl.load(zeros + j), 1.0)
    reach = tl.max(tl.where(coded & live, tl.div_rn(size, full), 0.0), axis=0)
    every = tl.arange(0, 256)
    small = (every >= 1) & (every < 255) & (tl.load(scales_ptr + every) < reach)
    k0 = 1 + tl.sum(small.to(tl.int32), axis=0)

    # squared errors of the candidates, coefficient j in lane j % 8, in the order that the reference fixes
    below = tl.arange(0, _CANDIDATES)
    candidate = k0 - below
    tried = (below <= _BELOW) & (candidate >= 1)
    s = tl.load(scales_ptr + candidate, mask=tried, other=1.0)[:, None]
    lane = tl.arange(0, 8)
    error = tl.zeros((_CANDIDATES, 8), tl.float32)
    for i in range(0, R, 8):
        x = tl.load(c_row + i + lane)[None, :]
        zero = tl.load(zeros + i + lane)[None, :]
        step = s * tl.load(ratios + i + lane)[None, :]
        u = _quantize(x, tl.div_rn(1.0, step), zero)
        e = tl.fma(-step, u - zero, x)
        error = tl.where((tl.load(kinds + i + lane) == _CODED)[None, :], tl.fma(e, e, error), error)
    pairs = tl.sum(tl.reshape(error, (_CANDIDATES, 2, 2, 2)), axis=1)
    total = tl.sum(tl.sum(pairs, axis=1), axis=1)
    total = tl.where(tried & live, total, float("inf"))
    least = tl.min(total, axis=0)
    best = k0 - tl.min(tl.where(total == least, below, _CANDIDATES), axis=0)  # ties to the larger scale
    best = tl.where(tl.max(coded.to(tl.int32), axis=0) > 0, best, _SCALE_ONE)
    s_best = tl.load(scales_ptr + best)

    b = tl.arange(0, B)
    inside = b < n_bytes
    out = tl.where(b == 0, best, 0)
    for slot in range(_SLOTS):
        entry = packing_ptr + (head * 4 * _SLOTS + slot) * n_bytes + b
        source = tl.load(entry + _SOURCE * _SLOTS * n_bytes, mask=inside, other=0)
        mask = tl.load(entry + _MASK * _SLOTS * n_bytes, mask=inside, other=0)
        x = tl.load(c_row + source)
        step = s_best * tl.load(ratios + source)
        u = _quantize(x, tl.div_rn(1.0, step), tl.load(zeros + source)).to(tl.int32)
        half = tl.minimum(tl.maximum(x, -_HALF_MAX), _HALF_MAX).to(tl.float16).to(tl.int16, bitcast=True)
        u = tl.where(tl.load(kinds + source) == _HALF, half.to(tl.int32) & 0xFFFF, u)
        drop = tl.load(entry + _DROP * _SLOTS * n_bytes, mask=inside, other=0)
        lift = tl.load(entry + _LIFT * _SLOTS * n_bytes, mask=inside, other=0)
        out = out | ((u >> drop) & mask) << lift
    row = rows_ptr + tl.load(cells_ptr + token) * row_stride + tl.load(offsets_ptr + head)
    tl.store(row + b, tl.where(live, out, 0).to(tl.uint8), mask=b < tl.load(lengths_ptr + head))


def encode_rows(codecs: Codecs, x: torch.Tensor, cells: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Writes x [n, H, d], of any float type, to rows U8 [n_cells, >= row_bytes] at cells I64 [n].

    Returns I32 [n, H]: 1 for a row with a coefficient that is not finite, which becomes a zero row.
    """
    c = torch.einsum("hrd,nhd->nhr", codecs.encode.float(), x.float())
    if codecs.subtracted is not None:
        c = c - codecs.subtracted
    c = c.contiguous()
    n, n_head, width = c.shape
    bad = torch.zeros((n, n_head), dtype=torch.int32, device=x.device)
    n_bytes = codecs.packing.shape[3]
    if n > 0:
        _encode[(n, n_head)](
            c,
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
            bad,
            n_bytes,
            R=width,
            B=triton.next_power_of_2(n_bytes),
        )
    return bad
