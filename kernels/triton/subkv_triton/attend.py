"""attend: partial softmax sums over coded cells, for splits of the cells (split-K) that combine merges.

    logit(t, g, c) = cap(qt[t, g] . k(c) + shift[t, g]) + slope[g] * bias[t, c];  bias = -inf masks the cell

One program handles a block of query rows of one KV head and one split. Each read of a code serves all rows of the
block; in decode these are all G query heads. Levels, and codes minus their zero point, are exact in half precision.
Tensor cores multiply them by queries (times the steps of bands) and by weights (times row scales). Both factors are
rounded to halves, relative to the largest of a query row or tile. Paths are not decoded in sequence: three codes of a
row determine a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from subkv_triton.codecs import BITS, FROM, HIGH, KIND, LEVELS, LOW, N_ROWS, ONE, TO, TWO, Codecs
from subkv_triton.encode import scales
from subkv_triton.fields import CODED, HALF
from subkv_triton.launch import shapes_on

_LOW, _HIGH, _ONE, _TWO, _LEVELS, _KIND, _ROWS = (tl.constexpr(i) for i in (LOW, HIGH, ONE, TWO, LEVELS, KIND, N_ROWS))
_AT, _FROM, _TO, _BITS = (tl.constexpr(i) for i in ((1 << FROM) - 1, FROM, TO, BITS))
_CODED, _HALF = (tl.constexpr(i) for i in (CODED, HALF))


@dataclass
class Partial:
    """Softmax state of S splits: largest logit m, sum of exp(logit - m), that sum weighted by value coefficients."""

    m: torch.Tensor
    """F32 [S, n_stream, n_tok, H, G], -inf if all cells are masked."""
    z: torch.Tensor
    """F32 [S, n_stream, n_tok, H, G], NaN if the row is lost (subkv/ops.h)"""
    acc: torch.Tensor
    """F32 [S, n_stream, n_tok, H, G, R of V]"""


@triton.jit
def _part(base, at, visible, entry):
    """One part of the indices, i32 [C, R]. entry: pointers [R] to its words in the table."""
    word = tl.load(entry)
    bits = word >> _BITS
    here = at[:, None] + (word & _AT)[None, :]
    byte = tl.load(base + here, mask=visible[:, None] & (bits > 0)[None, :], other=0).to(tl.int32)
    return ((byte >> ((word >> _FROM) & 7)[None, :]) & bits[None, :]) << ((word >> _TO) & 15)[None, :]


@triton.jit
def _settle(x):
    """x [C, R] unchanged; the reduction keeps the layout in which x was computed.

    Otherwise Triton moves the layout change for tl.dot's operand up to the loads of bytes. Then _codes computes in the
    operand's layout, in which lanes and warps hold copies of each element and a lane holds whole rows.
    """
    return tl.sum(x[:, :, None], axis=2)


@triton.jit
def _limited(x, size):
    return tl.minimum(tl.maximum(x, -size), size)


@triton.jit
def _codes(base, at, visible, scales_ptr, table, j, R: tl.constexpr, ANY_HALF: tl.constexpr, ANY_PATH: tl.constexpr):
    """Rows of a head at byte offsets at [C] -> scales f32 [C]; values in steps and stored halves, both f16 [C, R]."""
    s = tl.load(scales_ptr + tl.load(base + at, mask=visible, other=0).to(tl.int32))
    index = _part(base, at, visible, table + _LOW * R + j) | _part(base, at, visible, table + _HIGH * R + j)
    levels = tl.load(table + _LEVELS * R + j)
    if ANY_PATH:
        index ^= _part(base, at, visible, table + _ONE * R + j) ^ _part(base, at, visible, table + _TWO * R + j)
    level = (2 * index - (levels & 255)[None, :]).to(tl.float32)  # in halves of a step
    if ANY_PATH:  # beyond each bend, levels lie one step more apart
        double, triple = ((levels >> 8) & 255).to(tl.float32)[None, :], (levels >> 16).to(tl.float32)[None, :]
        level = 3.0 * level - _limited(level, double) - _limited(level, triple)
    level *= 0.5
    if ANY_HALF:
        kind = tl.load(table + _KIND * R + j)
        level = tl.where((kind == _CODED)[None, :], level, 0.0)
        stored = index.to(tl.int16).to(tl.float16, bitcast=True)
        stored = _settle(tl.where((kind == _HALF)[None, :], stored, 0.0))
    centred = _settle(level.to(tl.float16))  # Padding is 0, because its index and centre are 0.
    if not ANY_HALF:
        stored = centred  # not used
    return s, centred, stored


@triton.jit
def _halves(x):
    """x [M, R] as halves relative to the largest of each row, and those [M]."""
    top = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)
    return (x / top[:, None]).to(tl.float16), top


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")  # false for NaN


@triton.jit
def _without_bad(s, halves, ANY_HALF: tl.constexpr):
    """Scales [C] and halves [C, R] with zeros instead of numbers that are not finite, and which cells had one."""
    bad = ~_finite(s)
    if ANY_HALF:
        bad = bad | (tl.max((~_finite(halves)).to(tl.int32), axis=1) > 0)
        halves = tl.where(bad[:, None], 0.0, halves)
    return tl.where(bad, 0.0, s), halves, bad


@triton.jit
def bad_weight_nan(p, bad):
    """NaN for rows of weights p [M, C] that give weight to a bad [C] value, 0 for others: [M]."""
    return tl.where(tl.max((bad[None, :] & (p > 0)).to(tl.int32), axis=1) > 0, float("nan"), 0.0)


@triton.jit
def softmax_step(logit, bias, slope, softcap, m, z, HAS_CAP: tl.constexpr):
    """One step of the online softmax over C keys: logit, bias [M, C] (-inf: masked), slope, m, z [M].

    -> weights [M, C], the factor on earlier sums [M], m, z. A visible logit that is not finite makes z NaN.
    """
    logit = tl.where(_finite(logit), logit, float("nan"))
    if HAS_CAP:
        logit = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logit / softcap) + 1.0))  # tanh
    logit = tl.where(bias != float("-inf"), logit + slope[:, None] * bias, float("-inf"))
    m_new = tl.maximum(m, tl.max(logit, axis=1))
    base = tl.where(m_new > float("-inf"), m_new, 0.0)
    p = tl.exp(logit - base[:, None])
    keep = tl.exp(m - base)
    return p, keep, m_new, z * keep + tl.sum(p, axis=1)


@triton.jit
def _load_queries(qt, at, live, j, steps, table, R: tl.constexpr, ANY_HALF: tl.constexpr):
    """Query rows [M] at `at`: halves for coded bands and their factors [M], and the same for 16-bit bands."""
    q = tl.load(qt + (at[:, None] * R + j[None, :]), mask=live[:, None], other=0.0)
    kinds = tl.load(table + _KIND * R + j)
    scaled = q * tl.load(steps + j)[None, :]
    coded, top = _halves(tl.where((kinds == _CODED)[None, :], scaled, 0.0))
    top += tl.sum(q * 0.0, axis=1)  # NaN if a coefficient is not finite
    half, top_half = coded, top  # not used
    if ANY_HALF:
        half, top_half = _halves(tl.where((kinds == _HALF)[None, :], q, 0.0))
    return coded, top, half, top_half


@triton.jit
def _logits(s, codes, halves, coded, top, half, top_half, shift, ANY_HALF: tl.constexpr, HAS_SHIFT: tl.constexpr):
    """Logits [M, C] of a step's keys: their scales, and what _codes and _load_queries return."""
    logit = tl.dot(coded, tl.trans(codes)) * (top[:, None] * s[None, :])
    if ANY_HALF:
        dot = tl.dot(half, tl.trans(halves)) * top_half[:, None]
        logit += tl.where((s > 0)[None, :], dot, 0.0)
    if HAS_SHIFT:
        logit += shift[:, None]
    return logit


@triton.jit
def _add_values(s, codes, halves, p, keep, z, acc, acc_half, ANY_HALF: tl.constexpr):
    """Adds a step's values of weights p [M, C] to the sums [M, R] of coded and 16-bit bands -> z and both."""
    s, halves, bad = _without_bad(s, halves, ANY_HALF)
    z += bad_weight_nan(p, bad)
    largest = tl.maximum(tl.max(s, axis=0), 1e-30)
    weight = (p * (s / largest)[None, :]).to(tl.float16)
    acc = acc * keep[:, None] + tl.dot(weight, codes) * largest
    if ANY_HALF:
        weight = tl.where((s > 0)[None, :], p, 0.0).to(tl.float16)
        acc_half = acc_half * keep[:, None] + tl.dot(weight, halves)
    return z, acc, acc_half


@triton.jit
def _rows(block, stream, head, n_head, n_tok, G: tl.constexpr, M: tl.constexpr):
    """A block's query rows in [n_stream, n_tok, H, G]: 64-bit numbers of its first token and of that token's first row,
    common to all threads; 32-bit ones from there: token, query head and row [M], and which rows exist.
    """
    row = (block * M) % G + tl.arange(0, M)
    first_token = stream * n_tok + (block * M) // G
    token, group = row // G, row % G
    live = block * M + tl.arange(0, M) < n_tok * G
    return first_token, (first_token * n_head + head) * G, token, group, live, token * (n_head * G) + group


@triton.jit
def _load_bias(bias, token, live, first, end, n_cells, C: tl.constexpr):
    """Mask values [M, C] of cells from `first` on, -inf beyond `end`, and whether any row sees a cell [C]."""
    offset = tl.arange(0, C)
    seen = tl.load(
        bias + first + (token[:, None] * n_cells + offset[None, :]),
        mask=live[:, None] & (first + offset < end)[None, :],
        other=float("-inf"),
    )
    return seen, tl.max((seen != float("-inf")).to(tl.int32), axis=0) > 0


@triton.jit
def _empty_state(M: tl.constexpr, R: tl.constexpr):
    """Softmax state before the first cell: m and z [M], sums of coded and of 16-bit bands [M, R]."""
    m = tl.full((M,), float("-inf"), tl.float32)
    z = tl.zeros((M,), tl.float32)
    return m, z, tl.zeros((M, R), tl.float32), tl.zeros((M, R), tl.float32)


@triton.jit
def _store(m_ptr, z_ptr, acc_ptr, out, at, live, m, z, acc, j, R: tl.constexpr):
    m = tl.where((z != z) & (m == float("-inf")), 0.0, m)  # A lost row differs from one without visible cells.
    tl.store(m_ptr + out + at, m, mask=live)
    tl.store(z_ptr + out + at, z, mask=live)
    tl.store(acc_ptr + out * R + (at[:, None] * R + j[None, :]), acc, mask=live[:, None])


@triton.jit
def _attend(
    qt_ptr,
    shift_ptr,
    bias_ptr,
    slope_ptr,
    k_rows_ptr,
    v_rows_ptr,
    scales_ptr,
    k_offsets,
    k_table,
    k_steps,
    v_offsets,
    v_table,
    v_steps,
    m_ptr,
    z_ptr,
    acc_ptr,
    n_tok,
    n_cells,
    split,
    n_split,
    k_stride,
    v_stride,
    k_stream,
    v_stream,
    softcap,
    G: tl.constexpr,
    RK: tl.constexpr,
    RV: tl.constexpr,
    K_HALF: tl.constexpr,
    V_HALF: tl.constexpr,
    K_PATH: tl.constexpr,
    V_PATH: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
):
    # Heads are the fastest axis, so that programs that share sectors of rows run together.
    head, n_head = tl.program_id(0), tl.num_programs(0)
    part = tl.program_id(1) % n_split
    block = tl.program_id(1) // n_split
    stream, n_stream = tl.program_id(2).to(tl.int64), tl.num_programs(2)

    first_token, first_row, token, group, live, at = _rows(block, stream, head, n_head, n_tok, G, M)
    jk, jv = tl.arange(0, RK), tl.arange(0, RV)

    k_table += head * _ROWS * RK
    v_table += head * _ROWS * RV
    q, top, q_half, top_half = _load_queries(
        qt_ptr + first_row * RK, at, live, jk, k_steps + head * RK, k_table, RK, K_HALF
    )
    shift = top  # not used
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + first_row + at, mask=live, other=0.0)
    slope = tl.load(slope_ptr + head * G + group)

    m, z, acc, acc_half = _empty_state(M, RV)
    k_head = k_rows_ptr + stream * k_stream + tl.load(k_offsets + head)
    v_head = v_rows_ptr + stream * v_stream + tl.load(v_offsets + head)
    end = tl.minimum(n_cells, (part + 1) * split)
    offset = tl.arange(0, C)
    for first in range(part * split, end, C):
        bias, visible = _load_bias(bias_ptr + first_token * n_cells, token, live, first, end, n_cells, C)
        # Masked cells may have any content, so they are not read.
        if tl.max(visible.to(tl.int32), axis=0) > 0:
            k_row = k_head + tl.cast(first, tl.int64) * k_stride
            s, codes, halves = _codes(k_row, offset * k_stride, visible, scales_ptr, k_table, jk, RK, K_HALF, K_PATH)
            logit = _logits(s, codes, halves, q, top, q_half, top_half, shift, K_HALF, HAS_SHIFT)
            p, keep, m, z = softmax_step(logit, bias, slope, softcap, m, z, HAS_CAP)

            v_row = v_head + tl.cast(first, tl.int64) * v_stride
            s, codes, halves = _codes(v_row, offset * v_stride, visible, scales_ptr, v_table, jv, RV, V_HALF, V_PATH)
            z, acc, acc_half = _add_values(s, codes, halves, p, keep, z, acc, acc_half, V_HALF)

    out = part.to(tl.int64) * n_stream * n_tok * n_head * G + first_row
    acc = acc * tl.load(v_steps + head * RV + jv)[None, :] + acc_half
    _store(m_ptr, z_ptr, acc_ptr, out, at, live, m, z, acc, jv, RV)


def project_queries(k: Codecs, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q [n_stream, n_tok, H, G, d] -> qt F32 [n_stream, n_tok, H, G, R]: scale[h] * D q. scale [H] includes gamma."""
    return torch.einsum("hrd,bthgd->bthgr", k.decode.float() * scale[:, None, None].float(), q.float()).contiguous()


def default_splits(n_programs: int, n_cells: int, device: torch.device) -> int:
    """Number of splits: a few programs per multiprocessor, at least 256 cells per split."""
    n_parts = 1
    if device.type == "cuda":
        n_parts = 4 * torch.cuda.get_device_properties(device).multi_processor_count // max(1, n_programs)
    return max(1, min(n_parts, 64, triton.cdiv(n_cells, 256)))


def _check_shapes(
    k: Codecs, v: Codecs, k_rows: torch.Tensor, v_rows: torch.Tensor, qt: torch.Tensor, bias: torch.Tensor
) -> None:
    _, _, n_head, _, width = qt.shape
    n_cells = min(k_rows.shape[1], v_rows.shape[1])
    if width != k.width or n_head != k.n_head or n_head != v.n_head:
        raise ValueError(
            f"qt: {k.n_head} KV heads of {k.width} coefficients expected, {n_head} of {width} found (V has {v.n_head})"
        )
    if bias.shape[2] > n_cells or bias.shape[:2] != qt.shape[:2]:
        raise ValueError(
            f"bias: [n_stream, n_tok] {tuple(qt.shape[:2])} of at most {n_cells} cells expected, "
            f"{tuple(bias.shape)} found"
        )


def attend(
    k: Codecs,
    v: Codecs,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    qt: torch.Tensor,
    bias: torch.Tensor,
    *,
    shift: torch.Tensor | None = None,
    slope: torch.Tensor | None = None,
    softcap: float = 0.0,
    n_split: int | None = None,
) -> Partial:
    """Attention of n_tok tokens of every stream over its coded cells.

    k_rows, v_rows U8 [n_stream, n_cells, >= row_bytes], with contiguous bytes; qt F32 [n_stream, n_tok, H, G, R of K],
    projected queries, including gamma and the softmax scale; bias F32 [n_stream, n_tok, n_cells]; shift F32 [n_stream,
    n_tok, H, G], the part of a logit common to all cells (None: 0); slope F32 [H, G] (None: 1); softcap 0: none;
    n_split: splits of the cells (None: chosen for the device). All tensors are contiguous and on one device. Raises
    ValueError if shapes disagree.
    """
    n_stream, n_tok, n_head, group, _ = qt.shape
    n_cells = bias.shape[2]
    _check_shapes(k, v, k_rows, v_rows, qt, bias)
    shapes = shapes_on(qt.device, max(k.width, v.width), k.any_half or v.any_half)
    shape = shapes.decode if n_tok * group <= shapes.decode.rows else shapes.prompt
    n_blocks = triton.cdiv(n_tok * group, shape.rows)
    if n_split is None:
        n_split = default_splits(n_head * n_blocks * n_stream, n_cells, qt.device)
    split = triton.cdiv(triton.cdiv(n_cells, n_split), shape.cells) * shape.cells
    rows = (n_split, n_stream, n_tok, n_head, group)
    m, z = (torch.empty(rows, dtype=torch.float32, device=qt.device) for _ in range(2))
    acc = torch.empty((*rows, v.width), dtype=torch.float32, device=qt.device)
    if slope is None:
        slope = torch.ones((n_head, group), dtype=torch.float32, device=qt.device)
    if n_stream * n_tok == 0:
        return Partial(m, z, acc)
    _attend[(n_head, n_split * n_blocks, n_stream)](
        qt,
        qt if shift is None else shift,
        bias,
        slope,
        k_rows,
        v_rows,
        scales(qt.device),
        k.offsets,
        k.coefficients,
        k.steps,
        v.offsets,
        v.coefficients,
        v.steps,
        m,
        z,
        acc,
        n_tok,
        n_cells,
        split,
        n_split,
        k_rows.stride(1),
        v_rows.stride(1),
        k_rows.stride(0),
        v_rows.stride(0),
        softcap,
        G=group,
        RK=k.width,
        RV=v.width,
        K_HALF=k.any_half,
        V_HALF=v.any_half,
        K_PATH=k.n_place > 0,
        V_PATH=v.n_place > 0,
        HAS_SHIFT=shift is not None,
        HAS_CAP=softcap > 0,
        M=shape.rows,
        C=shape.cells,
        num_warps=shape.warps,
    )
    return Partial(m, z, acc)
