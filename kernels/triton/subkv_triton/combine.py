"""combine: merge the splits of attend, multiply by D_v, add exact keys and attention sinks, normalise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from subkv_triton.attend import Partial, softmax_step, sum_of_weights
from subkv_triton.codecs import MIN_WIDTH, Codecs

BLOCK_ROWS = 16
BLOCK_KEYS = 16
BLOCK_RANK = 32


@dataclass
class Exact:
    """Exact keys and values in half precision. For each key at most one of this bias and attend's may be finite."""

    k: torch.Tensor
    """F16 [n_stream, n_keys, H, d of K]"""
    v: torch.Tensor
    """F16 [n_stream, n_keys, H, d of V]"""
    q: torch.Tensor
    """F32 [n_stream, n_tok, H, G, d of K], including the softmax scale, without gamma."""
    bias: torch.Tensor
    """F32 [n_stream, n_tok, n_keys]"""


@triton.jit
def _dot(x, y):
    """x f32 [M, K] times y f16 [K, N] on tensor cores; x is split into two halves, for about 22 bits."""
    top = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)[:, None]
    x = x / top
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return (tl.dot(high, y) + tl.dot(low, y)) * top


@triton.jit
def _merge_splits(m_ptr, z_ptr, at, live, n_split, n_rows, M: tl.constexpr):
    """Largest logit of all splits, the same or 0 if all cells are masked, and sum of exp(logit - that): [M] each."""
    m = tl.full((M,), float("-inf"), tl.float32)
    for i in range(n_split):
        m = tl.maximum(m, tl.load(m_ptr + i * n_rows + at, mask=live, other=float("-inf")))
    base = tl.where(m > float("-inf"), m, 0.0)
    z = tl.zeros((M,), tl.float32)
    for i in range(n_split):
        share = tl.exp(tl.load(m_ptr + i * n_rows + at, mask=live, other=float("-inf")) - base)
        z += share * tl.load(z_ptr + i * n_rows + at, mask=live, other=0.0)
    return m, base, z


@triton.jit
def _weight(m, z, sink_ptr, HAS_SINKS: tl.constexpr):
    """1 / z [M], with attention sinks in the sum; 0 for rows without visible keys."""
    w = tl.where(z > 0, 1.0, 0.0)
    if HAS_SINKS:  # A sink is a logit without a value.
        sink = tl.load(sink_ptr)
        top = tl.maximum(m, sink)
        w = tl.exp(m - top)
        z = z * w + tl.exp(sink - top)
    return tl.where(z == 0, 0.0, w / tl.where(z == 0, 1.0, z))


@triton.jit
def _combine(
    m_ptr,
    z_ptr,
    acc_ptr,
    decode_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    slope_ptr,
    sinks_ptr,
    out_ptr,
    n_tok,
    n_split,
    n_keys,
    softcap,
    d_k,
    d_v,
    G: tl.constexpr,
    RV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
):
    head, n_head = tl.program_id(0), tl.num_programs(0)
    block = tl.program_id(1)
    stream, n_stream = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row = block * M + tl.arange(0, M)
    live = row < n_tok * G
    token, group = row // G, row % G
    at = ((stream * n_tok + token) * n_head + head) * G + group
    jr, jk, jv = tl.arange(0, R), tl.arange(0, D), tl.arange(0, DV)
    n_rows = n_stream * n_tok * n_head * G

    m, base, z = _merge_splits(m_ptr, z_ptr, at, live, n_split, n_rows, M)
    o = tl.zeros((M, DV), tl.float32)
    for first in range(0, RV, R):  # The whole D_v does not fit small devices.
        j = first + jr
        e = tl.zeros((M, R), tl.float32)
        for i in range(n_split):
            of_split = i * n_rows + at
            share = tl.exp(tl.load(m_ptr + of_split, mask=live, other=float("-inf")) - base)
            e += share[:, None] * tl.load(acc_ptr + of_split[:, None] * RV + j[None, :], mask=live[:, None], other=0.0)
        basis = decode_ptr + (head * RV + j)[:, None] * d_v + jv[None, :]
        o += _dot(e, tl.load(basis, mask=(jv < d_v)[None, :], other=0.0))

    slope = tl.load(slope_ptr + head * G + group)
    for first in range(0, n_keys, C):
        key = first + tl.arange(0, C)
        bias = tl.load(
            bias_ptr + (stream * n_tok + token)[:, None] * n_keys + key[None, :],
            mask=live[:, None] & (key < n_keys)[None, :],
            other=float("-inf"),
        )
        shown = tl.max((bias != float("-inf")).to(tl.int32), axis=0) > 0
        at_key = (stream * n_keys + key) * n_head + head
        logit = tl.zeros((M, C), tl.float32)
        for part in range(0, DK, D):  # Whole queries would take most registers of some GPUs.
            j = part + jk
            q = tl.load(q_ptr + at[:, None] * d_k + j[None, :], mask=live[:, None] & (j < d_k)[None, :], other=0.0)
            k = tl.load(k_ptr + at_key[:, None] * d_k + j[None, :], mask=shown[:, None] & (j < d_k)[None, :], other=0.0)
            logit += _dot(q, tl.trans(k))
        p, keep, m = softmax_step(logit, bias, slope, softcap, m, HAS_CAP, 1)
        v = tl.load(v_ptr + at_key[:, None] * d_v + jv[None, :], mask=shown[:, None] & (jv < d_v)[None, :], other=0.0)
        bad = tl.max((~(tl.abs(v) < float("inf"))).to(tl.int32), axis=1) > 0  # zero times NaN is NaN
        z = z * keep + sum_of_weights(p, bad, 1)
        o = o * keep[:, None] + _dot(p, tl.where(bad[:, None], 0.0, v))

    w = _weight(m, z, sinks_ptr + head * G + group, HAS_SINKS)
    tl.store(out_ptr + at[:, None] * d_v + jv[None, :], w[:, None] * o, mask=live[:, None] & (jv < d_v)[None, :])


def combine(
    v: Codecs,
    partial: Partial,
    exact: Exact | None = None,
    *,
    slope: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output F32 [n_stream, n_tok, H, G, d of V]; zeros for a token without visible keys.

    slope F32 [H, G] and softcap apply to exact keys, as in attend. sinks F32 [H, G]: logits without a value.
    """
    n_split, n_stream, n_tok, n_head, group = partial.m.shape
    device = partial.m.device
    out = torch.empty((n_stream, n_tok, n_head, group, v.d), dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out
    if exact is None:
        nothing = torch.zeros(1, device=device)
        exact = Exact(nothing.half(), nothing.half(), nothing, nothing)
        n_keys = d_k = 0
    else:
        n_keys, d_k = exact.k.shape[1], exact.k.shape[3]
    if slope is None:
        slope = torch.ones((n_head, group), dtype=torch.float32, device=device)
    width = triton.next_power_of_2(max(MIN_WIDTH, d_k))
    _combine[(n_head, triton.cdiv(n_tok * group, BLOCK_ROWS), n_stream)](
        partial.m,
        partial.z,
        partial.acc,
        v.decode,
        exact.q,
        exact.k,
        exact.v,
        exact.bias,
        slope,
        slope if sinks is None else sinks,
        out,
        n_tok,
        n_split,
        n_keys,
        softcap,
        d_k,
        v.d,
        G=group,
        RV=v.width,
        DK=width,
        DV=triton.next_power_of_2(max(MIN_WIDTH, v.d)),
        HAS_CAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        R=min(v.width, BLOCK_RANK),
        D=min(width, BLOCK_RANK),
        M=BLOCK_ROWS,
        C=BLOCK_KEYS,
    )
    return out
