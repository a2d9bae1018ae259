"""Correcting predictions of measured sensitivities by the real cost of a layout, and of a stock type, in the engine.

Where attention is rare and decisive, errors of all layers together cost more than second order predicts. The layout,
planned from the sensitivities for this alone, is put into a saved state; the stock type, which has no window, runs for
real on a part of a chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from converter.decoded_chunk import SCORED, DecodedChunk, ignore
from converter.scoring import mean_kld
from converter.sensitivity_trials import CORRECTING, SensitivityTrials
from subkv.base.errors import CacheError
from subkv.base.progress import note
from subkv.engine.cache import ORDINARY, CacheChoice, ordinary
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.format.arrays import F32
from subkv.format.bases import CodedLayer
from subkv.format.calibration import Calibration
from subkv.format.window import Window
from subkv.plan.budget import budget_range
from subkv.plan.pipeline import Fit, Options
from subkv.plan.predict import reconstructed

BITS = (4.0, 3.5, 3.0, 2.5, 2.0, 1.5)  # budgets for a correction; the first whose prediction is CLEAR is run
CLEAR = 0.004  # nats per token
PLANNED = 4.0  # layers per second that a layout is planned for: a first guess
STOCK_TOKENS = 384  # most tokens that a stock type is run on; on 256, q4_0 seemed to cost twice as much as it does
ROWS_ONLY = 1 << 40  # a context in which window and bases count nothing
STOCK = "q4_0"  # its KLD, the largest of the stock types, corrects predictions without a window
BATCH = 128  # tokens decoded at once: bounds the logits in memory


def n_stock(n: int) -> int:
    """Tokens of a chunk of n that a stock type is run on, beside f16."""
    return min(n * 3 // 8, STOCK_TOKENS)


def tokens_to_correct(others: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens that corrected() decodes. others: lengths of chunks that are not measured; lengths: of all chunks."""
    n_chunks = len(others) or sum(n == max(lengths) for n in lengths)
    return sum(others) + (CORRECTING + SCORED) * n_chunks + 2 * n_stock(max(lengths))


def corrected(trials: SensitivityTrials, others: Sequence[Sequence[int]], n_threads: int) -> Calibration:
    """trials.result() with its predictions corrected on other chunks; without any: on the longer ones that are
    measured, or on the latest one. trials.on_decoded may raise to stop."""
    calibration = trials.result()
    chunks = [_decoded(trials, tokens) for tokens in others]
    if not others:
        chunks = [trials.kept.get(c) or trials.decoded(c) for c in trials.longer if c in trials.measured.done]
    if not chunks:
        chunks = [*trials.kept.values()][-1:] or [trials.decoded(0)]
    trials.kept.clear()
    assert calibration.sensitivity is not None
    with trials.session.without_context():
        for chunk in chunks:
            chunk.spill(trials.folder)
        layers, predicted, stock = _planned(trials, calibration)
        factors = [1.0, 1.0]
        if stock:
            tokens = max([*others, *trials.chunks], key=len)
            tokens = tokens[: n_stock(len(tokens))]
            try:
                (kld,) = compare(trials.session.model, [ordinary(STOCK)], tokens, n_threads, trials.on_decoded)
                factors[1] = max(kld - trials.measured.floor, 0.0) / stock or 1.0
            except CacheError as error:
                note(f"predictions for llama.cpp's own cache types are not corrected: {error.reason}")
    costs = [_cost(trials, chunk, layers) for chunk in chunks]
    if max(costs) > 0.0 and predicted > 0.0:
        factors[0] = float(np.mean(np.maximum(costs, 0.0))) / predicted
    sensitivity = replace(calibration.sensitivity, correction=factors[0], correction0=factors[1])
    return replace(calibration, sensitivity=sensitivity)


def _decoded(trials: SensitivityTrials, tokens: Sequence[int]) -> DecodedChunk:
    n_scored = min(CORRECTING, len(tokens) - trials.window.n_recent - 2 * SCORED)
    return DecodedChunk(trials.session, tokens, n_scored, trials.latent, on_decoded=trials.on_decoded)


def _planned(trials: SensitivityTrials, calibration: Calibration) -> tuple[tuple[CodedLayer, ...], float, float | None]:
    """A layout of the largest of BITS whose prediction is CLEAR, or of the smallest that heads can have; its predicted
    cost; and that of the stock type."""
    exact = replace(trials.window, recent_bits=16)  # as in the trial, which changes no other cells
    fit = Fit(trials.base, calibration, Options(window=exact, bpe_context=ROWS_ONLY))
    least, _ = budget_range(fit.heads, fit.overhead)
    for bits in [bits for bits in BITS if bits >= least.total]:
        trials.on_decoded(0)
        layers, _ = fit.code(fit.plan(bits))
        predicted = fit.error(layers) or 0.0
        if predicted >= CLEAR:
            break
    return layers, predicted, fit.stock_error(STOCK)


def _cost(trials: SensitivityTrials, chunk: DecodedChunk, layers: Sequence[CodedLayer]) -> float:
    """KLD of a layout over the scored tokens of a chunk, above the cost of rounding there.

    The exact window does not move while they are decoded; it is right for the token in their middle.
    """
    floor = trials.rounding(chunk, len(trials.chunks), 0)
    trials.on_decoded(SCORED)
    kld = chunk.final_kld(_coded_cells(chunk, trials.window, layers))
    trials.on_decoded(len(chunk.scored))
    return kld - floor


def _coded_cells(
    chunk: DecodedChunk, window: Window, layers: Sequence[CodedLayer]
) -> Iterator[tuple[tuple[int, str], F32]]:
    """The cells of every layer's sides as attention reads them."""
    n_scored = len(chunk.scored)
    coded = slice(window.n_sink, chunk.start - max(window.n_recent - n_scored // 2, 0))
    for layer in layers:
        il = layer.shape.il
        for side in "k" if layer.latent else "kv":
            rows = chunk.view(il, side).astype(np.float32)
            for h, head in enumerate(layer.heads):
                stored, gamma = (head.k, head.gamma) if side == "k" else (head.v, 1.0)
                gamma = 1.0 if layer.latent else gamma  # which multiplies keys alone
                rows[coded, h] = reconstructed(rows[coded, h], stored, gamma)
            yield (il, side), rows


def compare(
    model: Model,
    caches: Sequence[CacheChoice],
    chunk: Sequence[int],
    n_threads: int | None,
    on_decoded: Callable[[int], None] = ignore,
) -> list[float]:
    """Mean KLD of every cache from f16 over the second half of `chunk`, decoded by all of them batch by batch.

    on_decoded: called as tokens are decoded, each once for every cache and once for f16. Quantized weights amplify
    rounding: engines whose numbers differ by a negligible amount have a KLD already (SmolLM2 Q4_1: 2e-3 to 4e-3), so a
    cache's KLD must be well above that.
    """
    first, sums = len(chunk) // 2, np.zeros(len(caches))
    options = ContextOptions(len(chunk), BATCH, BATCH, n_threads)
    with contextlib.ExitStack() as opened:
        exact, *others = (opened.enter_context(model.context(cache, options)) for cache in (ORDINARY, *caches))
        for start in range(0, len(chunk), BATCH):
            tokens = chunk[start : start + BATCH]
            skipped = min(max(first - start, 0), len(tokens))
            n = exact.decode(tokens, start, skipped)
            for i, context in enumerate(others):
                context.decode(tokens, start, skipped)
                if n:
                    sums[i] += n * mean_kld(exact.logits(n), context.logits(n))
            on_decoded(len(tokens) * (1 + len(others)))
    return [float(kld) for kld in sums / (len(chunk) - first)]
