"""Corrects predictions by measurements in the engine: one factor for our layouts, one for llama.cpp's cache types.

Sensitivities predict a cost to second order, layer by layer. If few cells decide the output, errors of all layers
together cost more than that. So a layout is planned, its errors are written into a saved state, and its KLD is
measured. The factor is the measured KLD over the predicted one. The stock type has no exact window, so it decodes a
part of a chunk itself.

This plan is not the plan of the file, and neither can replace the other:

- The file's plan comes later and needs the factors: the default budget is the smallest whose *corrected* prediction
  is as good as q8_0's.
- The trial layout must cost at least CLEAR nats, to be measurable above rounding. A layout for use costs a tenth of
  that or less.
- The factors are stored in the calibration. Later conversions with other budgets, windows or ranks use them.
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

BITS = (4.0, 3.5, 3.0, 2.5, 2.0, 1.5)  # budgets of trial layouts; the first one that is predicted to cost CLEAR is run
CLEAR = 0.004  # nats per token
PLANNED = 4.0  # layers planned per second: the progress bar's first estimate
STOCK_TOKENS = 384  # maximum tokens that a stock type is run on; on 256, q4_0's KLD came out twice as large
ROWS_ONLY = 1 << 40  # a context so long that window and bases add nothing to the bits per element
STOCK = "q4_0"  # the stock type with the largest KLD, which rounding disturbs least
BATCH = 128  # tokens decoded at once: bounds the logits in memory


def n_stock(n: int) -> int:
    """Tokens that a stock type and f16 each decode of a chunk of n."""
    return min(n * 3 // 8, STOCK_TOKENS)


def tokens_to_correct(others: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens that corrected() decodes. others: lengths of the chunks that are not measured; lengths: of all chunks."""
    n_chunks = len(others) or sum(n == max(lengths) for n in lengths)
    return sum(others) + (CORRECTING + SCORED) * n_chunks + 2 * n_stock(max(lengths))


def corrected(trials: SensitivityTrials, others: Sequence[Sequence[int]], n_threads: int) -> Calibration:
    """trials.result() with corrected predictions. others: chunks to correct on, which were not measured; without any,
    the longer measured ones or the latest one. trials.on_decoded may raise to stop."""
    calibration = trials.result()
    chunks = [_decoded(trials, tokens) for tokens in others]
    if not others:
        chunks = [trials.decoded_chunks.get(c) or trials.decode(c) for c in trials.longer if c in trials.measured.done]
    if not chunks:
        chunks = [*trials.decoded_chunks.values()][-1:] or [trials.decode(0)]
    trials.decoded_chunks.clear()
    assert calibration.sensitivity is not None
    with trials.session.without_context():
        for chunk in chunks:
            chunk.spill(trials.folder)
        layers, predicted, predicted_stock = _trial_layout(trials, calibration)
        correction = correction0 = 1.0
        if predicted_stock:
            tokens = max([*others, *trials.chunks], key=len)
            tokens = tokens[: n_stock(len(tokens))]
            try:
                (kld,) = compare(trials.session.model, [ordinary(STOCK)], tokens, n_threads, trials.on_decoded)
                correction0 = max(kld - trials.measured.floor, 0.0) / predicted_stock or 1.0
            except CacheError as error:
                note(f"predictions for llama.cpp's own cache types are not corrected: {error.reason}")
    costs = [_cost(trials, chunk, layers) for chunk in chunks]
    if max(costs) > 0.0 and predicted > 0.0:
        correction = float(np.mean(np.maximum(costs, 0.0))) / predicted
    sensitivity = replace(calibration.sensitivity, correction=correction, correction0=correction0)
    return replace(calibration, sensitivity=sensitivity)


def _decoded(trials: SensitivityTrials, tokens: Sequence[int]) -> DecodedChunk:
    n_scored = min(CORRECTING, len(tokens) - trials.window.n_recent - 2 * SCORED)
    return DecodedChunk(trials.session, tokens, n_scored, trials.latent, on_decoded=trials.on_decoded)


def _trial_layout(
    trials: SensitivityTrials, calibration: Calibration
) -> tuple[tuple[CodedLayer, ...], float, float | None]:
    """The layout to measure, its predicted cost, and that of the stock type, nats per token, before any correction.

    Its budget is the largest of BITS that is predicted to cost CLEAR, else the smallest possible one.
    """
    exact = replace(trials.window, recent_bits=16)  # the state to change has recent rows in f16
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
    """KLD of a layout over the scored tokens of a chunk, less the cost of rounding.

    The exact window stays where it is while these tokens are decoded: at its place for the token in their middle.
    """
    floor = trials.rounding(chunk, len(trials.chunks), 0)
    trials.on_decoded(SCORED)
    kld = chunk.final_kld(_coded_cells(chunk, trials.window, layers))
    trials.on_decoded(len(chunk.scored))
    return kld - floor


def _coded_cells(
    chunk: DecodedChunk, window: Window, layers: Sequence[CodedLayer]
) -> Iterator[tuple[tuple[int, str], F32]]:
    """The cells of every layer's keys and values as a coded cache returns them: (il, side), [start, n_head_kv, d]."""
    n_scored = len(chunk.scored)
    coded = slice(window.n_sink, chunk.start - max(window.n_recent - n_scored // 2, 0))
    for layer in layers:
        il = layer.shape.il
        for side in "k" if layer.latent else "kv":
            rows = chunk.view(il, side).astype(np.float32)
            for h, head in enumerate(layer.heads):
                stored, gamma = (head.k, head.gamma) if side == "k" else (head.v, 1.0)
                gamma = 1.0 if layer.latent else gamma  # a latent row also holds the values, which gamma does not scale
                rows[coded, h] = reconstructed(rows[coded, h], stored, gamma)
            yield (il, side), rows


def compare(
    model: Model,
    caches: Sequence[CacheChoice],
    chunk: Sequence[int],
    n_threads: int | None,
    on_decoded: Callable[[int], None] = ignore,
) -> list[float]:
    """Mean KLD of every cache from f16 over the second half of `chunk`, which all caches decode batch by batch.

    on_decoded: called with the number of tokens decoded by all caches together. Quantized weights amplify rounding: two
    engines that differ by rounding alone have a KLD of 2e-3 to 4e-3 (SmolLM2 Q4_1). A KLD means something only if it
    is well above that.
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
