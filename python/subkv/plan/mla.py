"""Models with latent attention (MLA) that can be coded, and their sizes and weights."""

from __future__ import annotations

import numpy as np

from subkv.base.errors import SubkvError
from subkv.format.arrays import F32
from subkv.format.calibration import LayerShape
from subkv.native.gguf import Base

# architectures; in those of SPARSE, an indexer chooses the cells to which a token attends
SPARSE = ("deepseek32", "glm-dsa", "hy_v4", "dots3note", "glm5-next")
SUPPORTED = ("deepseek2", "mistral4", "kimi-linear", "kimi-k3", "bailingmoe3", *SPARSE)
WHY = "bases of latent attention (MLA) need it"


def is_latent(base: Base) -> bool:
    """Whether the model's attention is latent, in a form that the engine supports."""
    arch = base.get("general.architecture")
    return arch in SUPPORTED and base.get(f"{arch}.attention.key_length_mla") is not None


def sizes(base: Base) -> tuple[int, int]:
    """Elements of a row and of its latent; 0 if not in the metadata. (Not every file has value_length.)"""
    arch = base.get("general.architecture")
    d_k, d_v = (base.get(f"{arch}.attention.{key}") for key in ("key_length", "kv_lora_rank"))
    return d_k if isinstance(d_k, int) else 0, d_v if isinstance(d_v, int) else 0


def output_weights(base: Base, shape: LayerShape) -> F32:
    """W_o,h W_v,h of all heads, which map sums of latents to the residual stream: [n_embd, n_head·d_v], as W_o.

    Raises as read_weights().
    """
    w_o, heads = read_weights(base, shape)
    per_head = w_o.reshape(len(w_o), shape.n_head, -1).transpose(1, 0, 2) @ heads
    return np.asarray(per_head.transpose(1, 0, 2).reshape(len(w_o), -1))


def read_weights(base: Base, shape: LayerShape) -> tuple[F32, F32]:
    """W_o [n_embd, n_head·d] and all heads' W_v [n_head, d, d_v], which maps a sum of latents to a head's output.

    Ignores the gate that some models have between the two. Raises SubkvError for missing or misshapen tensors.
    """
    output, values = (f"blk.{shape.il}.{name}.weight" for name in ("attn_output", "attn_v_b"))
    w_o, w_v = base.tensor(output, WHY), base.matrix(values, WHY, stacked=True).rows(slice(None))
    if len(w_v) != w_o.shape[1] or len(w_v) % shape.n_head or w_v.shape[1] != shape.d_v:
        raise SubkvError(
            values,
            f"expected {w_o.shape[1]} rows of {shape.d_v} (all heads' outputs, the latent), found {list(w_v.shape)}",
        )
    return w_o, w_v.reshape(shape.n_head, -1, shape.d_v)
