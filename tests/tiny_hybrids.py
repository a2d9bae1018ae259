"""Tiny models of tiny.py with recurrent layers, alone or with attention layers."""

from __future__ import annotations

from typing import Any

import numpy as np


def mamba(m: Any) -> None:
    """Recurrent, without a K/V cache."""
    n, inner, state, rank = m.n_embd, 2 * m.n_embd, 8, 8
    m.keys |= {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    m.embedding()
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", n)
        m.matrix(f"{blk}.ssm_in", n, 2 * inner)
        m.matrix(f"{blk}.ssm_conv1d", 4, inner)
        m.bias(f"{blk}.ssm_conv1d", inner)
        m.matrix(f"{blk}.ssm_x", inner, rank + 2 * state, 2.0)
        m.matrix(f"{blk}.ssm_dt", rank, inner, 0.5)
        m.normal(f"{blk}.ssm_dt.bias", (inner,), 0.5, -4.0)  # small steps: a long memory
        m.tensors[f"{blk}.ssm_a"] = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
        m.normal(f"{blk}.ssm_d", (inner,), 0.1, 1.0)
        m.matrix(f"{blk}.ssm_out", inner, n)


def lfm2(m: Any) -> None:
    """Hybrid: even layers are short convolutions with a recurrent state (no KV heads), odd layers attend."""
    m.keys |= {"shortconv.l_cache": 3, "attention.head_count_kv": [il % 2 * m.n_head_kv for il in range(m.n_layer)]}
    m.embedding(output=False)
    m.tensors["token_embd_norm.weight"] = 0.25 * m.tensors.pop("output_norm.weight")  # the final norm; tied output
    for il, blk in enumerate(m.layers()):
        m.norm(f"{blk}.attn_norm", m.n_embd)
        if il % 2:
            m.norm(f"{blk}.attn_q_norm", m.head_size)
            m.norm(f"{blk}.attn_k_norm", m.head_size)
            m.attention(blk)
        else:
            m.matrix(f"{blk}.shortconv.conv", 3, m.n_embd)
            m.matrix(f"{blk}.shortconv.in_proj", m.n_embd, 3 * m.n_embd)
            m.matrix(f"{blk}.shortconv.out_proj", m.n_embd, m.n_embd)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.ffn(blk)


def qwen35(m: Any) -> None:
    """Hybrid with M-RoPE: even layers are linear attention (a gated delta rule), odd layers attend, with a gate."""
    n, d, n_group = m.n_embd, m.n_state, m.n_head
    m.keys |= {
        "rope.dimension_sections": [m.head_size // 2 - 2 * (m.head_size // 6), *[m.head_size // 6] * 2, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": n_group * d,
        "ssm.state_size": d,
        "ssm.time_step_rank": n_group,
        "ssm.group_count": n_group,
    }
    m.embedding()
    for il, blk in enumerate(m.layers()):
        m.norm(f"{blk}.attn_norm", n)
        if il % 2:
            m.attention(blk)
            m.matrix(f"{blk}.attn_q", n, 2 * m.n_head * m.head_size, 1.5)
            m.norm(f"{blk}.attn_q_norm", m.head_size)
            m.norm(f"{blk}.attn_k_norm", m.head_size)
        else:
            m.matrix(f"{blk}.attn_qkv", n, 3 * n_group * d)
            m.matrix(f"{blk}.attn_gate", n, n_group * d)
            m.matrix(f"{blk}.ssm_conv1d", 4, 3 * n_group * d)
            m.normal(f"{blk}.ssm_dt.bias", (n_group,), 0.5, -4.0)  # small steps: a long memory
            m.tensors[f"{blk}.ssm_a"] = -np.arange(1, n_group + 1, dtype=np.float32)
            m.matrix(f"{blk}.ssm_beta", n, n_group)
            m.matrix(f"{blk}.ssm_alpha", n, n_group, 0.5)
            m.norm(f"{blk}.ssm_norm", d)
            m.matrix(f"{blk}.ssm_out", n_group * d, n)
        m.norm(f"{blk}.post_attention_norm", n)
        m.ffn(blk)
