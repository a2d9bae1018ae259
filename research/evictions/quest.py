"""Quest (Tang et al., ICML 2024): nothing is evicted; every query reads the pages of 16 tokens that may score highest.

A page's score for a query is Σ_i max(q_i·least_i, q_i·most_i) over the channels of its keys' minima and maxima, which
are stored besides: 2 halves per channel and page. The budget is what is read, per query head; the page of the query
itself is always read. The original reads everything in its first two layers; here no layer does.
"""

from __future__ import annotations

import numpy as np

from research.evictions.policy import Kept, Request

PAGE = 16
BITS = 2 * 16 / PAGE / 2  # per K/V element, of the minima and maxima


def keep(request: Request) -> Kept:
    heads, n, d = request.k.shape
    pages = -(-n // PAGE)
    padded = np.pad(request.k, ((0, 0), (0, pages * PAGE - n), (0, 0)), mode="edge").reshape(heads, pages, PAGE, d)
    least, most = padded.min(2), padded.max(2)
    q = request.q[:, request.first :].reshape(heads, -1, d)
    scores = np.maximum(q, 0) @ most.swapaxes(1, 2) + np.minimum(q, 0) @ least.swapaxes(1, 2)
    scores = scores.reshape(len(request.q), -1, pages)
    query, page = np.arange(request.first, n), np.arange(pages)
    own = query // PAGE
    scores[:, page[None] > own[:, None]] = -np.inf
    scores[:, np.arange(len(query)), own] = np.inf
    chosen = np.argsort(-scores, axis=2, kind="stable")[:, :, : request.budget // PAGE]
    read = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(read, chosen, True, axis=2)
    causal = np.arange(n)[None] <= query[:, None]
    kept: Kept = np.repeat(read, PAGE, axis=2)[:, :, :n] & causal
    return kept
