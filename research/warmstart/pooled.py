"""Slots: which tokens of a prompt they stand for, where they lie, and a prompt's keys and values pooled into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from converter.scoring import F32, F64
from research.warmstart.frame import Frame
from subkv.base.errors import SubkvError


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
                raise SubkvError(name, f"expected a number of tokens from {low} to 4096, found {value}")

    def __str__(self) -> str:
        return f"{self.n_sink} sinks, {self.n_slots} slots, {self.n_last} last tokens"

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt that can be summarised: as many as there are slots, sinks and last tokens."""
        return self.n_sink + self.n_slots + self.n_last

    def span(self, n_tokens: int, most: int | None = None) -> tuple[int, int]:
        """The pooled tokens [first, last). Raises SubkvError about `prompt` for one shorter than its summary, or of
        more than `most` tokens."""
        least = self.shortest
        if n_tokens < least or (most is not None and n_tokens > most):
            expected = f"at least {least} tokens ({self})" if most is None else f"{least} ({self}) to {most} tokens"
            raise SubkvError("prompt", f"expected {expected}, found {n_tokens}")
        return self.n_sink, n_tokens - self.n_last


def _triangles(n: int, m: int) -> F64:
    """[m, n] weights before they are normalised: slot j is centred at (j + ½)/m of the tokens and 1/m wide each way.

    A token lies at the middle of its share of the span, (t + ½)/n. The paper has it at its end, which shifts all slots
    by half a token to the left; so n slots of n tokens are these tokens.
    """
    if not 1 <= m <= n:
        raise SubkvError("prompt", f"expected at least {m} tokens to pool, found {n}")
    tokens, centres = (np.arange(n) + 0.5) / n, (np.arange(m) + 0.5) / m
    # rounding must not let a neighbour in where the distance is exactly one width
    return np.maximum(0.0, np.round(1.0 - m * np.abs(tokens[None] - centres[:, None]), 12))


def pooling(n: int, m: int) -> F64:
    """[m, n] W: slot j is the mean of tokens weighted by row j, which adds up to 1. Raises SubkvError for n < m."""
    weights = _triangles(n, m)
    return weights / weights.sum(axis=1, keepdims=True)


def counts(n: int, m: int) -> F64:
    """[m] how many of n tokens each slot stands for; adds up to n."""
    weights = _triangles(n, m).sum(axis=1)
    return weights * (n / weights.sum())


def placed(plan: Plan, n_tokens: int) -> tuple[F64, F64]:
    """Of the slots of a prompt of n_tokens: t̂ [n_slots], mean position of their tokens, ascending; and mass [n_slots],
    the logarithm of how many they stand for."""
    first, last = plan.span(n_tokens)
    where = pooling(last - first, plan.n_slots) @ np.arange(first, last, dtype=np.float64)
    return where, np.log(counts(last - first, plan.n_slots))


@dataclass(frozen=True, eq=False)
class Slots:
    """Slots of a prompt, by layer: k [n_head_kv, n_slots, d_k], v [n_head_kv, n_slots, d_v]. Keys are as at position 0
    and without the mass of the tokens that they stand for, which depends on the prompt that they will be part of."""

    k: list[F32]
    v: list[F32]


def summarise(
    k_rows: Sequence[NDArray[np.floating]], v_rows: Sequence[NDArray[np.floating]], plan: Plan, frame: Frame
) -> Slots:
    """Pool a prompt's keys and values, by layer [T, n_head_kv, d], as they lie in the cache at positions 0 to T − 1.

    Nothing trained has touched them. Raises SubkvError for a prompt shorter than its summary and for rows that hold NaN
    or infinity.
    """
    first, last = plan.span(len(k_rows[0]))
    weights = pooling(last - first, plan.n_slots)
    found = Slots([], [])
    for il, (keys, values) in enumerate(zip(k_rows, v_rows, strict=True)):
        still = frame.unrotate(keys[first:last], np.arange(first, last))
        for out, rows in ((found.k, still), (found.v, values[first:last])):
            out.append(np.einsum("mn,nhd->hmd", weights, rows, optimize=True).astype(np.float32))
            if not np.isfinite(out[-1]).all():
                raise SubkvError("prompt", f"expected finite keys and values, found NaN or infinity in layer {il}")
    return found
