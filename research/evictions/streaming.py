"""StreamingLLM (Xiao et al., ICLR 2024): the first 4 tokens and the latest ones. Here positions are not renumbered."""

from __future__ import annotations

import numpy as np

from research.evictions.policy import Asked, Kept

SINKS = 4


def keep(asked: Asked) -> Kept:
    n = asked.k.shape[1]
    query, key = np.arange(asked.first, n)[:, None], np.arange(n)[None]
    kept = (key <= query) & ((key < SINKS) | (key > query - (asked.budget - SINKS)))
    return np.broadcast_to(kept, (len(asked.q), *kept.shape))
