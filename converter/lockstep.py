"""Caches side by side in the engine: how far a coded or a stock cache is from f16 on the same tokens.

Quantized weights amplify rounding: two engines whose numbers differ by less than anything that matters are apart by
some KLD already (SmolLM2 Q4_1: 2e-3 to 4e-3). What is measured here must be well above it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from converter.scoring import ROWS, log_softmax
from subkv.engine.cache import CacheOptions, choose_cache
from subkv.engine.context import ContextOptions, Logits
from subkv.engine.model import Model
from subkv.format import metadata
from subkv.format.calibration import Calibration
from subkv.format.window import Window
from subkv.native.gguf import SHA256_KEY, Gguf, write_sidecar
from subkv.plan.pipeline import Fit, Options

COMPARED = 3  # contexts that corrected() runs
BATCH = 128  # tokens decoded at once: bounds the logits in memory
LOUD = 0.03  # nats per token that the layout run for a correction should cost: ten times the engine's own
ROWS_ONLY = 1 << 31  # a context in which window and bases count nothing
BITS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)  # budgets tried for it
NOT_A_FILE = "0" * 64  # a digest
STOCK = "q4_0"  # whose KLD corrects predictions without a window: the loudest


def mean_kld(exact: Logits, other: Logits) -> float:
    """Mean KLD of rows of logits [n, n_vocab] from the exact ones, nats."""
    total = 0.0
    for i in range(0, len(exact), ROWS):
        log_p = log_softmax(exact[i : i + ROWS])
        total += float(np.sum(np.exp(log_p) * (log_p - log_softmax(other[i : i + ROWS]))))
    return total / len(exact)


def compare(model: Model, caches: Sequence[CacheOptions], chunk: Sequence[int], n_threads: int | None) -> list[float]:
    """Mean KLD of every cache from f16 over the second half of `chunk`, decoded by all of them batch by batch."""
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
    return [float(kld) for kld in sums / (len(chunk) - first)]


def corrected(
    model: Model, base: Gguf, calibration: Calibration, chunk: Sequence[int], n_threads: int | None
) -> Calibration:
    """The calibration with its predictions corrected by what a layout and a stock type really cost on `chunk`.

    A factor that cannot be measured (a KLD of zero, a head size that the type refuses) stays 1.
    """
    assert calibration.sensitivity is not None
    measured = replace(calibration.sensitivity, correction=1.0, correction0=1.0)
    plain = replace(calibration, sensitivity=measured, sha256=NOT_A_FILE)
    window = Window(calibration.n_skip, calibration.sensitivity.n_recent)
    fit = Fit(base, plain, Options(window=window, bpe_context=ROWS_ONLY))
    predicted, caches = [], []
    with tempfile.TemporaryDirectory() as folder:
        sidecar = Path(folder) / "layout.gguf"
        predicted.append(_write_loud(base, fit, sidecar))
        caches.append(CacheOptions("subkv", bases=sidecar))
        stock = fit.stock_error(STOCK)
        if stock is not None:
            predicted.append(stock)
            caches.append(CacheOptions(STOCK))
        found = compare(model, caches, chunk, n_threads)
    factors = [kld / what if kld > 0.0 and what > 0.0 else 1.0 for kld, what in zip(found, predicted, strict=True)]
    measured = replace(measured, correction=factors[0], correction0=factors[1] if len(factors) > 1 else 1.0)
    return replace(calibration, sensitivity=measured, sha256="")


def _write_loud(base: Gguf, fit: Fit, path: Path) -> float:
    """A sidecar of the largest of BITS that is LOUD, and its prediction."""
    predicted = 0.0
    for bits in reversed(BITS):
        plan = fit.plan(bits)
        layers, _ = fit.code(plan)
        predicted = fit.error(layers) or 0.0
        if predicted >= LOUD:
            break
    values = metadata.keys(layers, fit.calibration, fit.settings, fit.account(plan))
    write_sidecar(base, path, {**values, SHA256_KEY: ("str", NOT_A_FILE)})  # nobody asks, and hashing takes time
    return predicted
