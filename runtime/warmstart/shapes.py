"""How many slots a prompt is summarised in, which tokens they stand for and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.warmstart.errors import WarmStartError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """A prompt of T tokens is its first n_sink tokens, n_slots slots for those between, and its last n_last tokens."""

    n_slots: int
    n_sink: int
    n_last: int

    def __post_init__(self) -> None:
        for name, low in (("n_slots", 1), ("n_sink", 0), ("n_last", 1)):
            value = getattr(self, name)
            if not low <= value <= 4096:
                raise WarmStartError(name, f"expected a number of tokens from {low} to 4096, found {value}")

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt that can be summarised: as many as there are slots, sinks and last tokens."""
        return self.n_sink + self.n_slots + self.n_last

    def span(self, n_tokens: int) -> tuple[int, int]:
        """The pooled tokens [first, last). Raises WarmStartError for a prompt shorter than its summary."""
        if n_tokens < self.shortest:
            raise WarmStartError(
                "prompt",
                f"expected at least {self.shortest} tokens ({self.n_sink} sinks, {self.n_slots} slots, {self.n_last} "
                f"last tokens), found {n_tokens}",
            )
        return self.n_sink, n_tokens - self.n_last


def _triangles(n: int, m: int) -> F64:
    """[m, n] weights before they are normalised: slot j is centred at (j + ½)/m of the tokens and 1/m wide each way.

    A token lies at the middle of its share of the span, (t + ½)/n. The paper has it at its end, which shifts all slots
    by half a token to the left; so n slots of n tokens are these tokens.
    """
    if not 1 <= m <= n:
        raise WarmStartError("prompt", f"expected at least {m} tokens to pool, found {n}")
    tokens, centres = (np.arange(n) + 0.5) / n, (np.arange(m) + 0.5) / m
    # rounding must not let a neighbour in where the distance is exactly one width
    return np.maximum(0.0, np.round(1.0 - m * np.abs(tokens[None] - centres[:, None]), 12))


def pooling(n: int, m: int) -> F64:
    """[m, n] W: slot j is the mean of tokens weighted by row j, which adds up to 1. Raises WarmStartError for n < m."""
    weights = _triangles(n, m)
    return weights / weights.sum(axis=1, keepdims=True)


def counts(n: int, m: int) -> F64:
    """[m] how many of n tokens each slot stands for; adds up to n."""
    weights = _triangles(n, m).sum(axis=1)
    return weights * (n / weights.sum())


def placed(plan: Plan, n_tokens: int) -> F64:
    """[n_slots] t̂: mean position of the tokens of each slot, ascending, in a prompt of n_tokens."""
    first, last = plan.span(n_tokens)
    return pooling(last - first, plan.n_slots) @ np.arange(first, last, dtype=np.float64)
