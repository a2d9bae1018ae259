"""H2O (Zhang et al., NeurIPS 2023): half the budget for the latest tokens, half for those that drew most attention.

Attention is added up over all queries so far, per KV head over its query heads. After every token the one with the
least sum goes, the latest half aside; what is gone stays gone, and draws nothing any more.
"""

from __future__ import annotations

import numpy as np

from research.evictions.policy import Kept, Request

PIECE = 256  # queries whose attention is held at once


def keep(request: Request) -> Kept:
    heads, n, d = request.k.shape
    recent = request.budget // 2
    drawn = np.zeros((heads, n), dtype=np.float32)
    for low in range(0, request.first, PIECE):
        drawn += request.attention(slice(low, min(low + PIECE, request.first))).sum(1)
    alive = np.zeros((heads, n), dtype=np.bool_)
    order = np.argsort(-drawn[:, : request.first - recent], axis=1, kind="stable")[:, : request.budget - recent]
    np.put_along_axis(alive, order, True, axis=1)
    alive[:, request.first - recent : request.first] = True
    kept = np.zeros((heads, n - request.first, n), dtype=np.bool_)
    head = np.arange(heads)
    q = request.q.reshape(heads, request.group, n, d)
    for i in range(request.first, n):
        alive[:, i] = True
        over = alive.sum(1) > request.budget
        candidates = np.where(alive[:, : i + 1 - recent], drawn[:, : i + 1 - recent], np.inf)
        worst = candidates.argmin(1)
        alive[head[over], worst[over]] = False
        kept[:, i - request.first] = alive
        # every head keeps as many, so that its keys are one array
        cells = np.nonzero(alive)[1].reshape(heads, -1)
        keys = np.take_along_axis(request.k, cells[:, :, None], axis=1)
        logits = np.float32(request.scale) * q[:, :, i] @ keys.swapaxes(1, 2)
        weights = np.exp(logits - logits.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        np.put_along_axis(drawn, cells, np.take_along_axis(drawn, cells, 1) + weights.sum(1), axis=1)
    return request.of_groups(kept)
