"""Caches side by side in the engine: how far a coded or a stock cache is from f16 on the same tokens.

Quantized weights amplify rounding: two engines whose numbers differ by less than anything that matters are apart by
some KLD already (SmolLM2 Q4_1: 2e-3 to 4e-3). What is measured here must be well above it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from converter.scoring import ROWS, log_softmax
from subkv.engine.cache import CacheOptions, choose_cache
from subkv.engine.context import ContextOptions, Logits
from subkv.engine.model import Model

BATCH = 128  # tokens decoded at once: bounds the logits in memory


def mean_kld(exact: Logits, other: Logits) -> float:
    """Mean KLD of rows of logits [n, n_vocab] from the exact ones, nats."""
    total = 0.0
    for i in range(0, len(exact), ROWS):
        log_p = log_softmax(exact[i : i + ROWS])
        total += float(np.sum(np.exp(log_p) * (log_p - log_softmax(other[i : i + ROWS]))))
    return total / len(exact)


def compare(
    model: Model,
    caches: Sequence[CacheOptions],
    chunk: Sequence[int],
    n_threads: int | None,
    told: Callable[[int], None] = lambda n: None,
) -> list[float]:
    """Mean KLD of every cache from f16 over the second half of `chunk`, decoded by all of them batch by batch.

    told: called as tokens are decoded, each once for every cache and once for f16.
    """
    first, sums = len(chunk) // 2, np.zeros(len(caches))
    options = ContextOptions(len(chunk), BATCH, BATCH, n_threads)
    with contextlib.ExitStack() as opened:
        exact, *others = (
            opened.enter_context(model.context(choose_cache(model.path, cache), options))
            for cache in (CacheOptions("f16"), *caches)
        )
        for start in range(0, len(chunk), BATCH):
            tokens = chunk[start : start + BATCH]
            skipped = min(max(first - start, 0), len(tokens))
            n = exact.decode(tokens, start, skipped)
            for i, context in enumerate(others):
                context.decode(tokens, start, skipped)
                if n:
                    sums[i] += n * mean_kld(exact.logits(n), context.logits(n))
            told(len(tokens) * (1 + len(others)))
    return [float(kld) for kld in sums / (len(chunk) - first)]
