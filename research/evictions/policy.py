"""What a policy is given and returns, and what several share.

The first half of a chunk is a prompt that attends to everything; a policy rules from the first scored token on. That
favours policies: codecs are read by the prompt, too. Positions stay those of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from subkv.format.arrays import F32

Kept = NDArray[np.bool_]  # [n_head, n − first, n] the keys that every query from `first` on sees, all in its past


@dataclass(frozen=True)
class Request:
    """One layer's text. q [n_head, n, d], k [n_head_kv, n, d], after RoPE; budget: tokens that may be kept."""

    q: F32
    k: F32
    first: int
    budget: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return len(self.q) // len(self.k)

    def attention(self, queries: slice) -> F32:
        """Exact causal attention [n_head_kv, n_queries, n] of some queries, summed over each group's heads."""
        heads, n, d = self.k.shape
        q = self.q[:, queries].reshape(heads, -1, d)
        logits = np.float32(self.scale) * q @ self.k.swapaxes(1, 2)
        positions = np.tile(np.arange(n)[queries], self.group)
        logits[:, np.arange(n)[None] > positions[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(2, keepdims=True))
        weights /= weights.sum(2, keepdims=True)
        out: F32 = weights.reshape(heads, self.group, -1, n).sum(1)
        return out

    def of_groups(self, kept: Kept) -> Kept:
        """[n_head_kv, …] for all query heads."""
        return np.repeat(kept, self.group, axis=0)


class Policy(Protocol):
    def __call__(self, request: Request) -> Kept: ...
