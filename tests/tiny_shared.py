"""Tiny models of tiny.py whose later layers read the K and V rows of earlier layers."""

from __future__ import annotations

from typing import Any

import numpy as np


def _attention(m: Any, blk: str, d: int, owns_rows: bool) -> None:
    """Queries, and keys and values where there are any; all are normalized, and logits are not scaled."""
    for name, n in (("q", m.n_head * d), ("k", m.n_head_kv * d), ("v", m.n_head_kv * d)):
        if name == "q" or owns_rows:
            m.matrix(f"{blk}.attn_{name}", m.n_embd, n)
    m.matrix(f"{blk}.attn_output", m.n_head * d, m.n_embd)
    for name in "qk" if owns_rows else "q":
        m.normal(f"{blk}.attn_{name}_norm.weight", (d,), 0.1, 1.7 / d**0.25)


def gemma4(m: Any) -> None:
    """Every other layer has a sliding window and smaller heads; the last n_shared layers read others' rows."""
    m.keys |= {
        "attention.sliding_window": m.n_swa,
        "attention.sliding_window_pattern": [il % 2 == 0 for il in range(m.n_layer)],
        "attention.shared_kv_layers": m.n_shared,
        "attention.key_length_swa": m.head_size // 2,
        "attention.value_length_swa": m.head_size // 2,
        "rope.dimension_count_swa": m.head_size // 2,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    m.embedding(std=1 / np.sqrt(m.n_embd), output=False)
    m.tensors["output_norm.weight"] *= 3
    m.normal("rope_freqs.weight", (m.head_size // 2,), 0.1, 1.0)
    for il, blk in enumerate(m.layers()):
        m.norm(f"{blk}.attn_norm", m.n_embd)
        _attention(m, blk, m.head_size if il % 2 else m.head_size // 2, il < m.n_layer - m.n_shared)
        m.norm(f"{blk}.post_attention_norm", m.n_embd)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.ffn(blk)
        m.norm(f"{blk}.post_ffw_norm", m.n_embd)


def gemma3n(m: Any) -> None:
    """Layers from 20 on read the rows of 18 and 19; four parallel streams, and embeddings of every layer."""
    n, n_altup, rank, per_layer = m.n_embd, 4, 64, 256  # the last three: not in a file's metadata
    m.keys |= {"attention.sliding_window": m.n_swa, "final_logit_softcapping": 30.0}
    m.embedding(std=1 / np.sqrt(n), output=False)
    m.tensors["output_norm.weight"] *= 3
    for name in ("altup_proj", "altup_unembd_proj"):
        m.matrix(name, n, n, stack=(n_altup - 1,))
    m.normal("per_layer_token_embd.weight", (len(m.tensors["token_embd.weight"]), per_layer * m.n_layer), 0.05)
    m.matrix("per_layer_model_proj", n, per_layer * m.n_layer)
    m.norm("per_layer_proj_norm", per_layer)
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", n)
        _attention(m, blk, m.head_size, True)  # the loader requires keys and values that are never read
        m.norm(f"{blk}.ffn_norm", n)
        for name in ("post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm"):
            m.normal(f"{blk}.{name}.weight", (n,), 0.02, 0.2)  # many layers of full size would amplify all rounding
        m.ffn(blk)
        for name, n_in, n_out in (("inp_gate", n, per_layer), ("proj", per_layer, n)):
            m.matrix(f"{blk}.{name}", n_in, n_out)
        for name, n_in, n_out in (("laurel_l", n, rank), ("laurel_r", rank, n), ("altup_router", n, n_altup)):
            m.matrix(f"{blk}.{name}", n_in, n_out)
        m.matrix(f"{blk}.altup_correct_coef", n_altup, n_altup, 0.1)
        m.matrix(f"{blk}.altup_predict_coef", n_altup, n_altup**2, 0.1)
        m.normal(f"{blk}.altup_correct_scale.weight", (n,), 0.1, 1.0)
        m.norm(f"{blk}.altup_router_norm", n)
