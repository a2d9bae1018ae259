"""attend: partial softmax sums over coded cells, for splits of the cells (split-K) that combine merges.

    logit(t, g, c) = cap(qt[t, g] . k(c) + shift[t, g]) + slope[g] * bias[t, c];  bias = -inf masks the cell

One program handles a block of query rows of one KV head and one split. Each read of a code serves all rows of the
block; in decode these are all G query heads. A word has codes of eight coefficients, and integer arithmetic on words
computes four levels at once. Levels plus one half are exact in half precision. Tensor cores multiply them by queries
(times the steps of bands) and by weights (times row scales). Both factors are rounded to halves, relative to the
largest of a query row or tile. Paths are not decoded in sequence: three codes of a row determine a level. The matrices
have 1024 + 127.5 - level - 1/2, integers that need no conversion; this is undone in the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from subkv_triton.codecs import (
    AT,
    BITS,
    DOUBLE,
    FILL,
    FOLD,
    HIGH,
    KIND,
    LOW,
    N_OCTET_ROWS,
    N_ROWS,
    ONE,
    ONE_BACK,
    ONE_TURN,
    RIGHT,
    STORED,
    TRIPLE,
    TWO,
    TWO_BACK,
    TWO_TURN,
    Codecs,
)
from subkv_triton.encode import scales
from subkv_triton.fields import CODED, HALF
from subkv_triton.launch import shapes_on

_LOW, _HIGH, _ONE, _TWO, _AT, _RIGHT, _BITS = (tl.constexpr(i) for i in (LOW, HIGH, ONE, TWO, AT, RIGHT, BITS))
_ONE_TURN, _ONE_BACK, _TWO_TURN, _TWO_BACK = (tl.constexpr(i) for i in (ONE_TURN, ONE_BACK, TWO_TURN, TWO_BACK))
_FOLD, _FILL, _DOUBLE, _TRIPLE, _OCTET_ROWS = (tl.constexpr(i) for i in (FOLD, FILL, DOUBLE, TRIPLE, N_OCTET_ROWS))
_KIND, _STORED, _ROWS, _CODED, _HALF = (tl.constexpr(i) for i in (KIND, STORED, N_ROWS, CODED, HALF))
_MIDDLE = tl.constexpr(1024 + 127.5)  # what _decode returns for 0


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
def _row(table, row: tl.constexpr, N: tl.constexpr):
    """A row of Codecs.octets, u32 [1, N]. table: pointers [N] to the first row."""
    return tl.load(table + row * N).to(tl.uint32, bitcast=True)[None, :]


@triton.jit
def _part(rows, table, part: tl.constexpr, N: tl.constexpr):
    """One part of the indices of N octets, u32 [C, N]. rows: pointers [C] to the words of a head."""
    word = tl.load(rows[:, None] + tl.load(table + (part + _AT) * N)[None, :]).to(tl.uint32, bitcast=True)
    return (word >> _row(table, part + _RIGHT, N)) & _row(table, part + _BITS, N)


@triton.jit
def _turned(x, table, turn: tl.constexpr, back: tl.constexpr, N: tl.constexpr):
    return (x << _row(table, turn, N)) | (x >> _row(table, back, N))


@triton.jit
def _above(x):
    """For each byte 128 + n with n >= 0: n; for others 0."""
    top = x & 0x80808080
    return x & (top - (top >> 7))


@triton.jit
def _levels(index, table, N: tl.constexpr, ANY_PATH: tl.constexpr):
    """127 - level of four indices, a byte each. Levels m and -1 - m have the same size m."""
    folded = _row(table, _FOLD, N) - index  # 128 + m without bends, if negative, or 127 - m
    negative = ((folded >> 7) & 0x01010101) * 255
    size = (folded ^ negative) | _row(table, _FILL, N)  # 127 - m
    if ANY_PATH:  # beyond each bend, levels lie one step more apart
        double, triple = _row(table, _DOUBLE, N), _row(table, _TRIPLE, N)
        size = size - _above(double - size) - _above(triple - size)
    return size ^ negative


@triton.jit
def _unpacked(even, odd):
    """f16 [..., 2, 2, 2]: 1024 + n for bytes 0 and 2 of even, 0 and 2 of odd, 1 and 3 of even, 1 and 3 of odd."""
    words = tl.join(tl.join(even, even >> 8), tl.join(odd, odd >> 8))
    words = (words & 0x00FF00FF) | 0x64006400
    low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True))


@triton.jit
def _coefficients(R: tl.constexpr):
    """The coefficients [R] in the order of _decode."""
    j = tl.arange(0, R)
    return (j & ~7) | (4 * (j & 1)) | ((j & 7) >> 1)


@triton.jit
def _settle(x):
    """x [C, R] unchanged; the reduction keeps the layout in which x was computed.

    Otherwise Triton may move the layout change for tl.dot's operand up to the loads of words. Then _decode computes in
    the operand's layout, in which lanes and warps hold copies of each element and a lane holds whole rows.
    """
    return tl.sum(x[:, :, None], axis=2)


@triton.jit
def _decode(
    rows,
    octets,
    C: tl.constexpr,
    R: tl.constexpr,
    ANY_PATH: tl.constexpr,
    ANY_HIGH: tl.constexpr,
    SETTLED: tl.constexpr,
):
    """1151.5 - values in steps, f16 [C, R], of a head's rows, in the order of _coefficients; 1151.5 is _MIDDLE.

    rows: pointers [C] to words; octets: the head's Codecs.octets.
    """
    N: tl.constexpr = R // 8
    table = octets + tl.arange(0, N)
    one, two = _part(rows, table, _ONE, N), _part(rows, table, _TWO, N)
    one, two = _turned(one, table, _ONE_TURN, _ONE_BACK, N), _turned(two, table, _TWO_TURN, _TWO_BACK, N)
    low = _part(rows, table, _LOW, N) ^ two
    even = ((low << 1) & 0x1E1E1E1E) | (one & 0x01010101)  # indices of coefficients 0, 2, 4 and 6
    odd = ((low >> 3) & 0x1E1E1E1E) | ((one >> 4) & 0x01010101)
    if ANY_HIGH:
        high = _part(rows, table, _HIGH, N)
        even = even | ((high & 0x07070707) << 5)
        odd = odd | ((high & 0x70707070) << 1)
    even, odd = _levels(even, table, N, ANY_PATH), _levels(odd, table, N, ANY_PATH)
    if SETTLED:
        even, odd = _settle(even), _settle(odd)
    return tl.reshape(_unpacked(even, odd), (C, R))


@triton.jit
def _stored(rows, table, j, R: tl.constexpr):
    """The 16-bit coefficients f16 [C, R] of a head's rows, and 0 for others. table: the head's Codecs.coefficients."""
    at, kept = tl.load(table + _STORED * R + j), tl.load(table + _KIND * R + j) == _HALF
    word = tl.load(rows[:, None] + (at >> 1)[None, :], mask=kept[None, :], other=0)
    half = ((word >> (16 * (at & 1))[None, :]) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return _settle(tl.where(kept[None, :], half, 0.0))


@triton.jit
def _read(
    cells, head_at, scale_at, scales_ptr, table, octets, j,
    C: tl.constexpr, R: tl.constexpr,
    ANY_HALF: tl.constexpr, ANY_PATH: tl.constexpr, ANY_HIGH: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """Rows of a head in cells [C] (pointers to words) -> scales f32 [C]; values in steps and halves, f16 [C, R]."""
    code = (tl.load(cells + (scale_at >> 2)) >> (8 * (scale_at & 3))) & 255
    rows = cells + head_at
    codes = _decode(rows, octets, C, R, ANY_PATH, ANY_HIGH, SETTLED)
    halves = codes  # not used
    if ANY_HALF:
        halves = _stored(rows, table, j, R)
    return tl.load(scales_ptr + code), codes, halves


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
def of_rows(x, CELLS: tl.constexpr):
    """x [M] beside matrices of M query rows, whose axis CELLS is that of cells (or of coefficients)."""
    return tl.expand_dims(x, CELLS)


@triton.jit
def _of_cells(x, CELLS: tl.constexpr):
    """x [C] beside such matrices."""
    return tl.expand_dims(x, 1 - CELLS)


@triton.jit
def sum_of_weights(p, bad, CELLS: tl.constexpr):
    """Sums [M] of weights p, NaN for rows that give weight to a bad [C] value."""
    return tl.sum(tl.where(_of_cells(bad, CELLS) & (p > 0), float("nan"), p), axis=CELLS)


@triton.jit
def softmax_step(logit, bias, slope, softcap, m, HAS_CAP: tl.constexpr, CELLS: tl.constexpr):
    """One step of the online softmax over C keys: logit, bias (-inf: masked), slope, m [M].

    -> weights, the factor on earlier sums [M], m. A visible logit that is not finite makes the weights' sum NaN.
    """
    logit = tl.where(_finite(logit), logit, float("nan"))
    if HAS_CAP:
        logit = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logit / softcap) + 1.0))  # tanh
    logit = tl.where(bias != float("-inf"), logit + of_rows(slope, CELLS) * bias, float("-inf"))
    m_new = tl.maximum(m, tl.max(logit, axis=CELLS))
    base = tl.where(m_new > float("-inf"), m_new, 0.0)
    p = tl.exp(logit - of_rows(base, CELLS))
    keep = tl.exp(m - base)
    return p, keep, m_new


@triton.jit
def _load_queries(qt, at, live, j, steps, table, R: tl.constexpr, ANY_HALF: tl.constexpr):
    """Query rows [M] at `at`: halves for coded bands, their factors [M] and their products with a row of zeros [M], and
    halves and factors for 16-bit bands."""
    q = tl.load(qt + (at[:, None] * R + j[None, :]), mask=live[:, None], other=0.0)
    kinds = tl.load(table + _KIND * R + j)
    scaled = q * tl.load(steps + j)[None, :]
    coded, top = _halves(tl.where((kinds == _CODED)[None, :], scaled, 0.0))
    top += tl.sum(q * 0.0, axis=1)  # NaN if a coefficient is not finite
    middle = _MIDDLE * tl.sum(coded.to(tl.float32), axis=1)
    half, top_half = coded, top  # not used
    if ANY_HALF:
        half, top_half = _halves(tl.where((kinds == _HALF)[None, :], q, 0.0))
    return coded, top, middle, half, top_half


@triton.jit
def _product(rows, cells, CELLS: tl.constexpr):
    """Dot products of rows [M, R] and cells [C, R]."""
    if CELLS == 1:
        products = tl.dot(rows, tl.trans(cells))
    else:
        products = tl.dot(cells, tl.trans(rows))
    return products


@triton.jit
def _sum(weight, values, CELLS: tl.constexpr):
    """Sums of values [C, R], by row of the weights."""
    if CELLS == 1:
        sums = tl.dot(weight, values)
    else:
        sums = tl.dot(tl.trans(values), weight)
    return sums


@triton.jit
def _logits(
    s, codes, halves, coded, top, middle, half, top_half, shift,
    ANY_HALF: tl.constexpr, HAS_SHIFT: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Logits of a step's keys: their scales, and what _read and _load_queries return."""
    logit = (of_rows(middle, CELLS) - _product(coded, codes, CELLS)) * (of_rows(top, CELLS) * _of_cells(s, CELLS))
    if ANY_HALF:
        dot = _product(half, halves, CELLS) * of_rows(top_half, CELLS)
        logit += tl.where(_of_cells(s > 0, CELLS), dot, 0.0)
    if HAS_SHIFT:
        logit += of_rows(shift, CELLS)
    return logit


@triton.jit
def _add_values(s, codes, halves, p, keep, z, acc, acc_half, ANY_HALF: tl.constexpr, CELLS: tl.constexpr):
    """Adds a step's values of weights p to the sums of coded and 16-bit bands -> z and both."""
    s, halves, bad = _without_bad(s, halves, ANY_HALF)
    z = z * keep + sum_of_weights(p, bad, CELLS)
    largest = tl.maximum(tl.max(s, axis=0), 1e-30)
    weight = (p * _of_cells(s / largest, CELLS)).to(tl.float16)
    middle = _MIDDLE * tl.sum(weight.to(tl.float32), axis=CELLS)
    acc = acc * of_rows(keep, CELLS) + (of_rows(middle, CELLS) - _sum(weight, codes, CELLS)) * largest
    if ANY_HALF:
        weight = tl.where(_of_cells(s > 0, CELLS), p, 0.0).to(tl.float16)
        acc_half = acc_half * of_rows(keep, CELLS) + _sum(weight, halves, CELLS)
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
def _load_bias(bias, token, live, first, end, n_cells, C: tl.constexpr, CELLS: tl.constexpr):
    """Mask values of C cells from `first` on, -inf beyond `end`, and whether any row sees a cell."""
    offset = tl.arange(0, C)
    seen = tl.load(
        bias + first + (of_rows(token, CELLS) * n_cells + _of_cells(offset, CELLS)),
        mask=of_rows(live, CELLS) & _of_cells(first + offset < end, CELLS),
        other=float("-inf"),
    )
    return seen, tl.max(tl.max((seen != float("-inf")).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _empty_state(M: tl.constexpr, R: tl.constexpr, CELLS: tl.constexpr):
    """Softmax state before the first cell: m and z [M], sums of coded and of 16-bit bands."""
    if CELLS == 1:
        acc = tl.zeros((M, R), tl.float32)
    else:
        acc = tl.zeros((R, M), tl.float32)
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), acc, acc


@triton.jit
def _store(m_ptr, z_ptr, acc_ptr, out, at, live, m, z, acc, j, R: tl.constexpr, CELLS: tl.constexpr):
    m = tl.where((z != z) & (m == float("-inf")), 0.0, m)  # a lost row is not one without visible cells
    tl.store(m_ptr + out + at, m, mask=live)
    tl.store(z_ptr + out + at, z, mask=live)
    place = of_rows(at, CELLS) * R + _of_cells(j, CELLS)
    tl.store(acc_ptr + out * R + place, acc, mask=of_rows(live, CELLS))


@triton.jit
def _attend(
    qt_ptr, shift_ptr, bias_ptr, slope_ptr, k_rows_ptr, v_rows_ptr, scales_ptr,
    k_offsets, k_table, k_octets, k_steps, v_offsets, v_table, v_octets, v_steps, m_ptr, z_ptr, acc_ptr,
    n_tok, n_cells, split, n_split, k_stride, v_stride, k_stream, v_stream, k_scales, v_scales, softcap,
    G: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, K_HALF: tl.constexpr, V_HALF: tl.constexpr,
    K_PATH: tl.constexpr, V_PATH: tl.constexpr, K_HIGH: tl.constexpr, V_HIGH: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_CAP: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    CELLS: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    # heads are the fastest axis: programs that share sectors of rows run together
    head, n_head = tl.program_id(0), tl.num_programs(0)
    part = tl.program_id(1) % n_split
    block = tl.program_id(1) // n_split
    stream, n_stream = tl.program_id(2).to(tl.int64), tl.num_programs(2)

    first_token, first_row, token, group, live, at = _rows(block, stream, head, n_head, n_tok, G, M)
    jk, jv = _coefficients(RK), _coefficients(RV)

    k_table += head * _ROWS * RK
    v_table += head * _ROWS * RV
    q, top, middle, q_half, top_half = _load_queries(
        qt_ptr + first_row * RK, at, live, jk, k_steps + head * RK, k_table, RK, K_HALF
    )
    shift = top  # not used
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + first_row + at, mask=live, other=0.0)
    slope = tl.load(slope_ptr + head * G + group)

    m, z, acc, acc_half = _empty_state(M, RV, CELLS)
    k_octets += head * _OCTET_ROWS * (RK // 8)
    v_octets += head * _OCTET_ROWS * (RV // 8)
    k_at, v_at = tl.load(k_offsets + head) >> 2, tl.load(v_offsets + head) >> 2
    k_stream_ptr, v_stream_ptr = k_rows_ptr + stream * k_stream, v_rows_ptr + stream * v_stream
    k_cells, v_cells = tl.arange(0, C) * k_stride, tl.arange(0, C) * v_stride
    end = tl.minimum(n_cells, (part + 1) * split)
    for first in range(part * split, end, C):
        bias, visible = _load_bias(bias_ptr + first_token * n_cells, token, live, first, end, n_cells, C, CELLS)
        if visible:  # masked cells may have any content
            last = tl.minimum(C, end - first) - 1
            cells = k_stream_ptr + tl.cast(first, tl.int64) * k_stride + tl.minimum(k_cells, last * k_stride)
            s, codes, halves = _read(
                cells, k_at, k_scales + head, scales_ptr, k_table, k_octets, jk, C, RK, K_HALF, K_PATH, K_HIGH, SETTLED
            )
            logit = _logits(s, codes, halves, q, top, middle, q_half, top_half, shift, K_HALF, HAS_SHIFT, CELLS)
            p, keep, m = softmax_step(logit, bias, slope, softcap, m, HAS_CAP, CELLS)

            cells = v_stream_ptr + tl.cast(first, tl.int64) * v_stride + tl.minimum(v_cells, last * v_stride)
            s, codes, halves = _read(
                cells, v_at, v_scales + head, scales_ptr, v_table, v_octets, jv, C, RV, V_HALF, V_PATH, V_HIGH, SETTLED
            )
            z, acc, acc_half = _add_values(s, codes, halves, p, keep, z, acc, acc_half, V_HALF, CELLS)

    out = part.to(tl.int64) * n_stream * n_tok * n_head * G + first_row
    steps = tl.where(tl.load(v_table + _KIND * RV + jv) == _CODED, tl.load(v_steps + head * RV + jv), 0.0)
    acc = acc * _of_cells(steps, CELLS) + acc_half
    _store(m_ptr, z_ptr, acc_ptr, out, at, live, m, z, acc, jv, RV, CELLS)


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
    for name, rows in (("k_rows", k_rows), ("v_rows", v_rows)):
        if rows.shape[2] % 4 or rows.stride(1) % 4 or rows.stride(0) % 4 or rows.storage_offset() % 4:
            raise ValueError(f"{name}: whole words expected, rows of {rows.shape[2]} bytes, {rows.stride()} found")


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

    k_rows, v_rows U8 [n_stream, n_cells, >= row_bytes], in whole words, with contiguous bytes; qt F32 [n_stream, n_tok,
    H, G, R of K], projected queries, including gamma and the softmax scale; bias F32 [n_stream, n_tok, n_cells]; shift
    F32 [n_stream, n_tok, H, G], the part of a logit common to all cells (None: 0); slope F32 [H, G] (None: 1); softcap
    0: none; n_split: splits of the cells (None: chosen for the device). All tensors are contiguous and on one device.
    Raises ValueError if shapes disagree.
    """
    n_stream, n_tok, n_head, group, _ = qt.shape
    n_cells = bias.shape[2]
    _check_shapes(k, v, k_rows, v_rows, qt, bias)
    shapes = shapes_on(qt.device, max(k.width, v.width), k.any_half or v.any_half)
    n_rows = n_tok * group
    few = n_rows <= shapes.decode.rows
    shape = shapes.decode if few else shapes.prompt
    block_rows = max(shapes.least_rows, triton.next_power_of_2(n_rows)) if few else shape.rows
    n_blocks = triton.cdiv(n_rows, block_rows)
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
    k_words, v_words = k_rows.view(torch.int32), v_rows.view(torch.int32)
    tables = [(c.offsets, c.coefficients, c.octets, c.steps) for c in (k, v)]
    _attend[(n_head, n_split * n_blocks, n_stream)](
        qt,
        qt if shift is None else shift,
        bias,
        slope,
        k_words,
        v_words,
        scales(qt.device),
        *tables[0],
        *tables[1],
        m,
        z,
        acc,
        n_tok,
        n_cells,
        split,
        n_split,
        *(x.stride(axis) for axis in (1, 0) for x in (k_words, v_words)),
        *(c.scales_at for c in (k, v)),
        softcap,
        G=group,
        RK=k.width,
        RV=v.width,
        K_HALF=k.any_half,
        V_HALF=v.any_half,
        K_PATH=k.n_place > 0,
        V_PATH=v.n_place > 0,
        K_HIGH=k.any_high,
        V_HIGH=v.any_high,
        HAS_SHIFT=shift is not None,
        HAS_CAP=softcap > 0,
        M=block_rows,
        C=shape.cells,
        CELLS=0 if few else 1,
        SETTLED=shape.settled,
        num_warps=shape.warps,
    )
    return Partial(m, z, acc)
