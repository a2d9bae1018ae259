"""SnapKV (Li et al., NeurIPS 2024): what the last 32 queries of the prompt attend to, pooled over 7 neighbours.

The original selects once, at the end of the prompt, and keeps all that is generated; so that its bytes stay bounded it
selects anew here after every 128 tokens, among the tokens that are left. The observing queries' own keys stay.
"""

from __future__ import annotations

import numpy as np

from research.evictions.policy import Kept, Request

OBSERVING, POOL, EVERY = 32, 7, 128


def keep(request: Request) -> Kept:
    heads, n, _ = request.k.shape
    kept = np.zeros((heads, n - request.first, n), dtype=np.bool_)
    alive = np.ones((heads, n), dtype=np.bool_)
    for low in range(request.first, n, EVERY):
        high = min(low + EVERY, n)
        past = low - OBSERVING
        drawn = request.attention(slice(past, low)).sum(1)[:, :past]
        padded = np.pad(drawn, ((0, 0), (POOL // 2, POOL // 2)), constant_values=-np.inf)
        pooled = np.lib.stride_tricks.sliding_window_view(padded, POOL, axis=1).max(2)
        pooled = np.where(alive[:, :past], pooled, -np.inf)
        room = request.budget - OBSERVING - EVERY  # what the next tokens fill
        chosen = np.argsort(-pooled, axis=1, kind="stable")[:, :room]
        before, alive = alive, np.zeros_like(alive)
        np.put_along_axis(alive, chosen, True, axis=1)
        alive &= before
        alive[:, past:] = True
        causal = np.arange(n)[None] <= np.arange(low, high)[:, None]
        kept[:, low - request.first : high - request.first] = alive[:, None] & causal[None]
    return request.of_groups(kept)
