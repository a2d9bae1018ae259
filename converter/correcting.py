"""Correcting predictions of measured sensitivities by what a layout, and a stock type, really cost in the engine.

Errors of all layers together add up to more than second order says where attention is rare and decisive. The layout is
put into a saved state; the stock type, which has no window, runs for real on a part of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from converter.decoded import SCORED, Decoded
from converter.lockstep import compare
from converter.sensing import CORRECTING, Sensing
from subkv.base.errors import CacheError
from subkv.base.progress import note
from subkv.engine.cache import CacheOptions
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
STOCK_TOKENS = 384  # that a stock type is run on at most; 256 told twice as much of q4_0 as it costs
ROWS_ONLY = 1 << 40  # a context in which window and bases count nothing
STOCK = "q4_0"  # whose KLD corrects predictions without a window: the loudest


def n_stock(n: int) -> int:
    """Tokens of a chunk of n that a stock type is run on, beside f16."""
    return min(n * 3 // 8, STOCK_TOKENS)


def ahead(others: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens that corrected() decodes, of chunks of such lengths, the others included."""
    n_chunks = len(others) or sum(n == max(lengths) for n in lengths)
    return sum(others) + (CORRECTING + SCORED) * n_chunks + 2 * n_stock(max(lengths))


def corrected(
    sensing: Sensing, others: Sequence[Sequence[int]], n_threads: int, told: Callable[[int], None]
) -> Calibration:
    """sensing.result(), with its predictions corrected on other chunks; none: on the longer ones, or the latest, of
    those that are measured. told: as of Sensing; what it raises ends it."""
    calibration = sensing.result()
    chunks = [_decoded(sensing, tokens) for tokens in others]
    if not others:
        chunks = [sensing.held.get(c) or sensing.decoded(c) for c in sensing.longer if c in sensing.found.done]
    if not chunks:
        chunks = [*sensing.held.values()][-1:] or [sensing.decoded(0)]
    sensing.held.clear()
    assert calibration.sensitivity is not None
    with sensing.session.aside():
        for chunk in chunks:
            chunk.put_away(sensing.folder)
        layers, predicted, stock = _planned(sensing, calibration, told)
        factors = [1.0, 1.0]
        if stock:
            tokens = max([*others, *sensing.chunks], key=len)
            tokens = tokens[: n_stock(len(tokens))]
            try:
                (kld,) = compare(sensing.session.model, [CacheOptions(STOCK)], tokens, n_threads, told)
                factors[1] = max(kld - sensing.found.floor, 0.0) / stock or 1.0
            except CacheError as error:
                note(f"predictions of llama.cpp's own cache types stay uncorrected: {error.reason}")
    found = [_cost(sensing, chunk, layers) for chunk in chunks]
    if max(found) > 0.0 and predicted > 0.0:
        factors[0] = float(np.mean(np.maximum(found, 0.0))) / predicted
    measured = replace(calibration.sensitivity, correction=factors[0], correction0=factors[1])
    return replace(calibration, sensitivity=measured)


def _decoded(sensing: Sensing, tokens: Sequence[int]) -> Decoded:
    n_scored = min(CORRECTING, len(tokens) - sensing.window.n_recent - 2 * SCORED)
    return Decoded(sensing.session, tokens, n_scored, sensing.latent, told=sensing.told)


def _planned(
    sensing: Sensing, calibration: Calibration, told: Callable[[int], None]
) -> tuple[tuple[CodedLayer, ...], float, float | None]:
    """A layout of the largest of BITS whose prediction is CLEAR, or of the smallest that heads can have; that; and what
    is predicted of the stock type."""
    exact = replace(sensing.window, recent_bits=16)  # as in the trial, which changes no other cells
    fit = Fit(sensing.base, calibration, Options(window=exact, bpe_context=ROWS_ONLY))
    least, _ = budget_range(fit.heads, fit.overhead)
    for bits in [bits for bits in BITS if bits >= least.total]:
        told(0)
        layers, _ = fit.code(fit.plan(bits))
        predicted = fit.error(layers) or 0.0
        if predicted >= CLEAR:
            break
    return layers, predicted, fit.stock_error(STOCK)


def _cost(sensing: Sensing, chunk: Decoded, layers: Sequence[CodedLayer]) -> float:
    """KLD of a layout over the scored tokens of a chunk, above what rounding costs there.

    The exact window stays where it is while they are read; it lies so that it is right in their middle.
    """
    floor = sensing.rounding(chunk, len(sensing.chunks), 0)
    sensing.told(SCORED)
    kld = chunk.spent(_coded(chunk, sensing.window, layers))
    sensing.told(len(chunk.scored))
    return kld - floor


def _coded(chunk: Decoded, window: Window, layers: Sequence[CodedLayer]) -> Iterator[tuple[tuple[int, str], F32]]:
    """What attention would see of the cells of every layer's sides."""
    n_scored = len(chunk.scored)
    coded = slice(window.n_sink, chunk.start - max(window.n_recent - n_scored // 2, 0))
    for layer in layers:
        il = layer.shape.il
        for side in "k" if layer.latent else "kv":
            seen = chunk.view(il, side).astype(np.float32)
            for h, head in enumerate(layer.heads):
                stored, gamma = (head.k, head.gamma) if side == "k" else (head.v, 1.0)
                gamma = 1.0 if layer.latent else gamma  # which multiplies keys alone
                seen[coded, h] = reconstructed(seen[coded, h], stored, gamma)
            yield (il, side), seen
