"""StreamingLLM (Xiao et al., ICLR 2024): the first 4 tokens and the latest ones. Here positions are not renumbered."""

from __future__ import annotations

import numpy as np

from research.evictions.policy import Kept, Request

SINKS = 4


def keep(request: Request) -> Kept:
    n = request.k.shape[1]
    query, key = np.arange(request.first, n)[:, None], np.arange(n)[None]
    kept = (key <= query) & ((key < SINKS) | (key > query - (request.budget - SINKS)))
    return np.broadcast_to(kept, (len(request.q), *kept.shape))
