"""The sensitivity stage: its texts, its time limit, its saved progress, the correction of its predictions.

sensitivity_trials.py measures. A run that was interrupted, or that reached its limit, saves its measurements, and a
later run resumes from them.

Two factors correct predictions, one for our layouts, one for llama.cpp's cache types. Sensitivities predict a cost to
second order, layer by layer. If few cells decide the output, errors of all layers together cost more than that. So a
layout is planned, its errors are written into a saved state, and its KLD is measured. The factor is the measured KLD
over the predicted one. The stock type has no exact window, so it decodes a part of a chunk itself. Sliding layers,
which have no bases and no prediction, stay in f16 there.

This plan is not the plan of the file, and neither can replace the other:

- The file's plan comes later and needs the factors: the default budget is the smallest whose *corrected* prediction
  is as good as q8_0's.
- The trial layout must cost at least CLEAR nats, to be measurable above rounding. A layout for use costs a tenth of
  that or less.
- The factors are stored in the calibration. Later conversions with other budgets, windows or ranks use them.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter import builtin
from converter.corpus import Text, cut
from converter.decoded_chunk import SCORED, DecodedChunk, Unpredictable, ignore
from converter.request import CalibrationRequest
from converter.resume import EVERY, SAVED, interrupt
from converter.scoring import mean_kld
from converter.sensitivity_trials import (
    CORRECTING,
    FULL,
    LEAST,
    REPEATED,
    VERSION,
    Measurements,
    Scope,
    SensitivityTrials,
    n_trials,
)
from converter.session import Session
from converter.source import Source
from subkv.base.errors import CacheError, SubkvError, system_reason
from subkv.base.files import atomic_file, other_writers
from subkv.base.interrupts import Interrupt
from subkv.base.progress import duration, expect, note, progress_bar
from subkv.engine.cache import CacheChoice, also_attach, ordinary
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.engine.sliding import keep_f16
from subkv.format.arrays import F32
from subkv.format.bases import CodedLayer
from subkv.format.calibration import Calibration, TextSource
from subkv.format.window import Window
from subkv.plan.budget import budget_range
from subkv.plan.pipeline import Fit, Options
from subkv.plan.predict import reconstructed

# budgets of trial layouts, of which the first that is predicted to cost CLEAR is run
BITS = (4.0, 3.5, 3.0, 2.5, 2.0, 1.5)
CLEAR = 0.004  # nats per token
PLANNED = 4.0  # layers planned per second, the progress bar's first estimate
STOCK_TOKENS = 384  # the most tokens that a stock type is run on; with 256, q4_0's KLD came out twice as large
ROWS_ONLY = 1 << 40  # a context so long that window and bases add nothing to the bits per element
STOCK = "q4_0"  # the stock type with the largest KLD, which rounding disturbs least
BATCH = 128  # tokens decoded at once, which bounds the logits in memory


def with_sensitivities(
    source: Source,
    calibration: Calibration,
    request: CalibrationRequest,
    texts: Sequence[Text] | None,
    checkpoint: Path,
) -> tuple[Calibration, bool]:
    """The calibration with sensitivities, and whether they are complete. Incomplete measurements are saved.

    texts: of request.texts(). checkpoint: file of incomplete measurements. Raises SubkvError if sensitivities cannot be
    measured, and KeyboardInterrupt after it has saved the measurements so far.
    """
    n_threads = request.corpus.n_threads
    with Session(source, max(request.lengths), n_threads, calibration.n_skip) as session:
        chunks, sources = _chunks(session, request, texts)
        lengths = [len(chunk) for chunk in chunks]
        measurements = _saved(checkpoint, calibration, sources[: n_measured(lengths)], lengths)
        measurements = measurements or Measurements.empty(calibration)
        if request.minutes == 0 and len(measurements.trials) < LEAST:
            raise SubkvError("minutes", f"an interrupted run measured {len(measurements.trials)}, {LEAST} are needed")
        _announce(session, request, len(calibration.layers), measurements)
        with interrupt() as ctrl_c:
            save = Saver(checkpoint, ctrl_c, lengths)
            try:
                result = measure_sensitivities(
                    session,
                    calibration,
                    chunks,
                    request.n_recent,
                    n_threads,
                    request.minutes,
                    measurements,
                    save,
                    texts=sources,
                    folder=checkpoint.parent,
                    scope=request.scope,
                )
            except SubkvError as error:
                if ctrl_c.pressed:
                    save(measurements)
                if isinstance(error, Unpredictable):
                    minutes = math.inf if request.minutes is None else request.minutes
                    _write(checkpoint, measurements, lengths, minutes, error.reason)
                raise
            save(measurements)
        n = n_trials(len(calibration.layers), request.scope)
        complete = len(measurements.trials) >= n and len(measurements.done) >= n_measured(lengths)
        complete = complete and request.minutes != 0  # else corrections are missing
        if not complete:
            _write(checkpoint, measurements, lengths, request.minutes or 0.0)
            note(
                f"there was time for {len(measurements.trials)} of {n} sensitivities"
                + ("; predictions are not corrected by a measurement" if request.minutes == 0 else "")
            )
        return result, complete


def measure_sensitivities(
    session: Session,
    calibration: Calibration,
    chunks: Sequence[Sequence[int]],
    n_recent: int,
    n_threads: int,
    minutes: float | None = None,
    measurements: Measurements | None = None,
    save: Callable[[Measurements], None] = lambda measurements: None,
    texts: Sequence[TextSource] = (),
    folder: Path | None = None,
    scope: Scope = FULL,
) -> Calibration:
    """The calibration with sensitivities measured on the first n_measured() `chunks`, and corrected on the others.

    If some chunks are more than twice as long as the others, all are measured, and predictions are corrected on the
    longer ones.

    session: with room for a chunk. minutes: limit for everything. Trials after the first LEAST are left out at the
    limit; their layers then get the factors of their neighbours. With 0, nothing is decoded, and the result is that of
    `measurements`, without a correction. measurements: of an earlier run, of LEAST trials if minutes is 0. save: called
    whenever tokens were decoded; may raise KeyboardInterrupt. texts, folder, scope: as in SensitivityTrials.

    Raises SubkvError: about `n_ctx` if chunks are too short, about `output` if `folder` is full; Unpredictable if noise
    in the cache does not change the model's output.
    """
    start, n_ctx = time.monotonic(), min(map(len, chunks))
    least = n_recent + calibration.n_skip + 4 * SCORED
    if n_ctx < least:
        raise SubkvError("n_ctx", f"expected chunks of at least {least} tokens with this exact window, found {n_ctx}")
    lengths = [len(chunk) for chunk in chunks]
    n = n_measured(lengths)
    total, spent = tokens_to_decode(lengths, len(calibration.layers), measurements, scope), 0
    with progress_bar("sensitivities", total, "tok") as bar:

        def on_decoded(tokens: int) -> None:
            nonlocal spent
            spent += tokens
            bar.update(tokens)
            save(trials.measured)

        def too_late(tokens: int) -> bool:
            if minutes == 0:
                return True
            if minutes is None or not spent:
                return False  # the speed is unknown until tokens were decoded
            left = tokens + tokens_to_correct(lengths[n:], lengths)
            passed = time.monotonic() - start
            needed = passed * (1.0 + left / spent) + len(calibration.layers) / PLANNED
            return needed > 60.0 * minutes

        trials = SensitivityTrials(
            session, calibration, chunks[:n], n_recent, measurements, texts[:n], on_decoded, folder, scope
        )
        for _ in trials.steps(too_late):
            pass
        if minutes == 0:
            return trials.result()
        return corrected(trials, chunks[n:], n_threads)


def n_measured(lengths: Sequence[int]) -> int:
    """How many of the chunks are measured, from the first on. The others correct predictions: none if there are longer
    chunks, which then do both; else two, or one of at most three."""
    if max(lengths) - CORRECTING >= 2 * (min(lengths) - SCORED):
        return len(lengths)
    return len(lengths) - 2 if len(lengths) > 3 else len(lengths) - 1


def tokens_to_decode(
    lengths: Sequence[int], n_layer: int, measurements: Measurements | None = None, scope: Scope = FULL
) -> int:
    """Tokens that measure_sensitivities() decodes on chunks of these lengths, after measurements of an earlier run."""
    done, n = measurements.done if measurements else [], n_measured(lengths)
    decoded_again = max(lengths) if n == len(lengths) else 0  # longer chunks also correct predictions
    chunks = sum(length for c, length in enumerate(lengths[:n]) if c not in done or length == decoded_again)
    trials = n_trials(n_layer, scope) - (len(measurements.trials) if measurements else 0)
    return chunks + int(REPEATED * trials) * SCORED + tokens_to_correct(lengths[n:], lengths)


def _chunks(
    session: Session, request: CalibrationRequest, texts: Sequence[Text] | None
) -> tuple[list[tuple[int, ...]], list[TextSource]]:
    """The chunks, and the texts of those whose cells are to enter the statistics. Raises SubkvError about `files`."""
    lengths = request.lengths
    if texts is not None:
        chunks = cut(session, texts, lengths[0], len(lengths))
        if len(chunks) < 2:
            raise SubkvError("files", f"they need at least 2 chunks of {lengths[0]} tokens, found 1")
        return chunks, []
    blocks = builtin.read(session.template)
    order = sorted(range(builtin.MEASURED), key=lambda i: i in builtin.LONGER)
    chunks = [
        chunk
        for i, n in zip(order, lengths, strict=True)
        for chunk in cut(session, [blocks[i]], n, 1, whole=i not in builtin.LONGER)
    ]
    return chunks, [blocks[i].source for i in order] if request.short else []


def expected_seconds(
    request: CalibrationRequest, n_layer: int, speed: float, measurements: Measurements | None = None
) -> float:
    """Duration of with_sensitivities() after `measurements` at `speed` tokens per second. Also sets the bar's time."""
    tokens = tokens_to_decode(request.lengths, n_layer, measurements, request.scope)
    limit = 60 * request.minutes if request.minutes is not None else math.inf
    seconds = min(tokens / speed + n_layer / PLANNED, limit)
    expect("sensitivities", seconds)
    return seconds


def _announce(session: Session, request: CalibrationRequest, n_layer: int, measurements: Measurements) -> None:
    """Report how long the run takes, if more than 10 seconds."""
    trials = len(measurements.trials)
    seconds = expected_seconds(request, n_layer, session.speed(), measurements) if request.minutes != 0 else 0.0
    if trials:
        note(f"resuming after {trials} of {n_trials(n_layer, request.scope)} sensitivities")
    if seconds > 10:
        note(f"measuring sensitivities takes {duration(seconds)}")


#
# correction
#


def n_stock(n: int) -> int:
    """Tokens that a stock type and f16 each decode of a chunk of n."""
    return min(n * 3 // 8, STOCK_TOKENS)


def tokens_to_correct(others: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens that corrected() decodes, by the lengths of the chunks that are not measured and of all chunks."""
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
                with also_attach(keep_f16):
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
        exact, *others = (opened.enter_context(model.context(cache, options)) for cache in (ordinary(), *caches))
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


#
# interrupted work
#


class Saver:
    """Saves the measurements every EVERY seconds and at Ctrl-C. It is called as tokens are decoded."""

    def __init__(self, path: Path, ctrl_c: Interrupt, lengths: Sequence[int]) -> None:
        self._path, self._ctrl_c, self._lengths = path, ctrl_c, lengths
        self._written = time.monotonic()

    def __call__(self, measurements: Measurements) -> None:
        stop = self._ctrl_c.pressed
        if stop or time.monotonic() - self._written > EVERY:
            try:
                _write(self._path, measurements, self._lengths)
                if stop:
                    enough = len(measurements.trials) >= LEAST
                    note(f"{SAVED}, or convert --minutes 0 uses what is measured" if enough else SAVED)
            except SubkvError as error:
                if not stop:
                    raise
                note(f"progress is not saved: {error.reason}")
            self._written = time.monotonic()
        if stop:
            raise KeyboardInterrupt


def _write(
    path: Path, measurements: Measurements, lengths: Sequence[int], minutes: float = 0.0, refused: str = ""
) -> None:
    """lengths: of the chunks. minutes: the limit that the run reached; 0: interrupted. refused: the reason why
    sensitivities cannot be measured, if that is so."""
    with atomic_file(path) as handle:
        values = {"minutes": minutes, "refused": refused, "lengths": lengths, "version": VERSION}
        arrays = {name: np.array(value) for name, value in values.items()}
        np.savez(handle, allow_pickle=False, **arrays, **measurements.arrays())


@contextlib.contextmanager
def _opened(checkpoint: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    """The arrays that _write() wrote.

    Raises FileNotFoundError, SubkvError if the file cannot be read, ValueError if its version differs, and numpy's
    errors if it is damaged.
    """
    try:
        if others := other_writers(checkpoint):
            raise ValueError(f"expected a file that only this user can write to, found {others}")
        try:
            data = checkpoint.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SubkvError("XDG_CACHE_HOME", f"cannot read {checkpoint}: {system_reason(error)}") from error
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            version = int(arrays["version"]) if "version" in arrays else "none"
            if version != VERSION:
                raise ValueError(f"expected measurements of version {VERSION}, found {version}")
            yield arrays
    except MemoryError as error:
        raise SubkvError("XDG_CACHE_HOME", f"cannot read {checkpoint}: {system_reason(error)}") from error


def _saved(
    checkpoint: Path, calibration: Calibration, texts: Sequence[TextSource], lengths: Sequence[int]
) -> Measurements | None:
    """The measurements of an earlier run. texts: as in SensitivityTrials; lengths: of its chunks."""
    try:
        with _opened(checkpoint) as arrays:
            if "lengths" not in arrays or arrays["lengths"].tolist() != list(lengths):
                raise ValueError(f"expected chunks of {', '.join(map(str, lengths))} tokens, found others")
            saved = Measurements.restored(arrays, calibration)
        if not {*saved.done, *saved.stretches, *(trial.chunk for trial in saved.trials)} <= set(range(len(lengths))):
            raise ValueError(f"expected numbers of {len(lengths)} chunks, found others")
        saved.forget_entered(calibration, texts)
        return saved
    except FileNotFoundError:
        return None
    except SubkvError:
        raise
    except Exception as error:  # numpy and zipfile raise many kinds of errors about a damaged file
        note(f"note: {checkpoint} cannot be resumed ({error}); measuring again")
        return None


def outcome(checkpoint: Path) -> tuple[float, str] | None:
    """The end of an earlier run: the time limit in minutes that it reached, 0 if it was interrupted; and the reason why
    sensitivities cannot be measured, else "". None: no file, because none ran or all sensitivities are measured."""
    try:
        with _opened(checkpoint) as arrays:
            return float(arrays["minutes"]), str(arrays["refused"])
    except FileNotFoundError:
        return None
    except SubkvError:
        raise
    except Exception:  # It is damaged or of another version, as _saved() reports.
        return 0.0, ""
