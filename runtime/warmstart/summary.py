"""A prompt's keys and values pooled to a few slots per layer and head, before anything trained touches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.frame import Frame
from runtime.warmstart.shapes import F32, Plan, pooling


@dataclass(frozen=True, eq=False)
class Summary:
    """Slots of a prompt of n_tokens. k, v: by layer, [n_head_kv, n_slots, d_k or d_v], keys as at position 0."""

    n_tokens: int
    k: list[F32]
    v: list[F32]


def summarise(
    k_rows: Sequence[NDArray[np.floating]], v_rows: Sequence[NDArray[np.floating]], plan: Plan, frame: Frame
) -> Summary:
    """Pool a prompt's keys and values, by layer [T, n_head_kv, d], as they lie in the cache at positions 0 to T − 1.

    Raises WarmStartError for a prompt shorter than its summary and for rows that hold NaN or infinity.
    """
    n_tokens = len(k_rows[0])
    first, last = plan.span(n_tokens)
    weights = pooling(last - first, plan.n_slots)
    positions = np.arange(first, last)
    k, v = [], []
    for il, (keys, values) in enumerate(zip(k_rows, v_rows, strict=True)):
        pooled = [
            np.einsum("mn,nhd->hmd", weights, rows, optimize=True).astype(np.float32)
            for rows in (frame.unrotate(keys[first:last], positions), values[first:last])
        ]
        if not all(np.isfinite(slots).all() for slots in pooled):
            raise WarmStartError("prompt", f"expected finite keys and values, found NaN or infinity in layer {il}")
        k.append(pooled[0])
        v.append(pooled[1])
    return Summary(n_tokens, k, v)
