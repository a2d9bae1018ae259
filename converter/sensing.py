"""Sensitivities measured in the engine: where an error in the cache goes by arithmetic, what it does there by trial.

An error in a cached key or value adds to the residual stream what residual.py computes from queries, keys and values
alone; that gives a head's matrix but for the factor from the stream's energy to nats. The factor is measured: noise in
the cells of one layer's keys or values, put into a saved state, and the KLD of the tokens that are decoded after it.
The state is restored for every trial, so that a trial costs SCORED tokens and not the text before them.

Many short texts tell more of directions than a few long ones. But how much is read from beyond the exact window depends
on how much there is: on average over many cells errors cancel, and what is fetched from far back must be there. So the
matrices of every layer are scaled by what two longer texts read far into them and near their beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.random import Generator

from converter.decoded import SCORED, Decoded, Unpredictable
from converter.lockstep import compare
from converter.observe import spread
from converter.residual import SIDES, Rows, energy, metrics
from converter.session import Session
from converter.trials import MOMENTS, SILENT, UNPREDICTABLE, Found, Trial, smoothed
from subkv.base.errors import SubkvError
from subkv.base.progress import progress_bar
from subkv.engine.cache import CacheOptions
from subkv.format.arrays import F32, F64
from subkv.format.bases import CodedLayer
from subkv.format.calibration import Calibration, LayerSensitivity, LayerShape, LayerStats, Sensitivity, TextSource
from subkv.format.window import Window
from subkv.native.gguf import Base
from subkv.plan import mla
from subkv.plan.budget import budget_range
from subkv.plan.costs import output_weights
from subkv.plan.pipeline import Fit, Options
from subkv.plan.predict import reconstructed

TARGET = 0.03  # nats per token that a trial's noise should cost: above rounding, small enough to be quadratic
FIRST = 0.03  # energy of the very first trial's noise, relative to keys and values replaced by random ones
TINY = 1e-6  # the same of noise that is too small to matter
QUIET, LOUD = 0.25, 2.0  # a trial that costs less or more of TARGET is repeated with other noise
MOST_CHANGE = 100.0  # of its energy
NEAR = 1.5  # times the energy that was wanted: texts differ by more, and finding out costs no trial
REPEATS = 2
BITS = (4.0, 3.5, 3.0, 2.5, 2.0, 1.5)  # budgets for a correction; the first whose prediction is CLEAR is run
CLEAR = 0.004  # nats per token
CORRECTING = 128  # tokens that are scored for a correction
STOCK_TOKENS = 384  # that a stock type is run on at most
LOOKING = 64  # queries at the beginning of a longer chunk
ROWS_ONLY = 1 << 40  # a context in which window and bases count nothing
STOCK = "q4_0"  # whose KLD corrects predictions without a window: the loudest
LEAST = 6  # trials that are made however little time there is: rounding, both sides of the first layer, and two more
MOST_STRETCH = 2.0  # logarithm, of a layer that reads next to nothing in one of two places: four standard deviations
UNSEEN = 1.4  # times what texts cost that have set the scales: what others do (NOTES.md has six kinds of text)
APART, SPREAD = 3, 24  # layers at the start whose factors stand apart; others that are tried


def _floors(n_layer: int) -> list[int]:
    """The layers in which rounding is measured."""
    return sorted({0, n_layer - 1})


def n_trials(n_layer: int) -> int:
    """How many trials Sensing.plan() has."""
    return len(_tried(n_layer)) + len(_floors(n_layer))


def _tried(n: int) -> list[tuple[int, str]]:
    """Layers and sides that are tried, best first: both sides of the first ones, which stand apart, and of at most
    SPREAD others keys and values in turn; the rest follows from its neighbours."""
    others = sorted([i for i in _order(n) if i >= APART][:SPREAD])
    side = {i: "kv"[j % 2] for j, i in enumerate(others)}
    return [(i, s) for i in _order(n) for s in (side.get(i, "") if i >= APART else "kv")]


def _covariance(stats: LayerStats, side: str) -> F64:
    """Of keys ("k") or values ("v"), [n_head_kv, d, d]."""
    second, first = (getattr(stats, f"{side}{power}") for power in (2, 1))
    covariance: F64 = second - first[:, :, None] * first[:, None, :]
    return covariance


class Noise:
    """Errors of one layer's side that cost every direction the same, as a planned quantizer's do: covariance
    (Σ⁻¹ + M/θ)⁻¹ for rows of covariance Σ and metric M; θ sets how much."""

    def __init__(self, covariance: F64, metric: F64) -> None:
        """Both [n_head_kv, d, d]; metric per query."""
        self.weights, self.maps = [], []
        for sigma, m in zip(covariance, metric, strict=True):
            values, vectors = np.linalg.eigh(sigma)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            cost, turn = np.linalg.eigh(root.T @ m @ root)
            self.weights.append(np.maximum(cost, 0.0))
            self.maps.append(turn.T @ root.T)

    @property
    def most(self) -> float:
        """Energy in the stream of rows drawn anew, per query."""
        return float(sum(np.sum(weights) for weights in self.weights))

    def of(self, wanted: float) -> Callable[[int, Generator], F32]:
        """Draws n rows of noise of this energy, [n, n_head_kv, d]; more than `most` is that, scaled."""
        gain, low, high = max(np.sqrt(wanted / self.most), 1.0), 1e-30, 1e30
        for _ in range(200):
            theta = float(np.sqrt(low * high))
            found = sum(float(np.sum(w / (1.0 + w / theta))) for w in self.weights)
            low, high = (theta, high) if found < wanted else (low, theta)

        def draw(n: int, rng: Generator) -> F32:
            heads = [
                (rng.standard_normal((n, len(w))) / np.sqrt(1.0 + w / theta)) @ to
                for w, to in zip(self.weights, self.maps, strict=True)
            ]
            return (gain * np.stack(heads, axis=1)).astype(np.float32)

        return draw


class Sensing:
    """Sensitivities of a calibration's layers, in steps: run steps() as far as there is time, then result().

    Every chunk adds to the matrices; the trials are shared among the chunks.
    """

    def __init__(
        self,
        session: Session,
        base: Base,
        calibration: Calibration,
        chunks: Sequence[Sequence[int]],
        n_recent: int,
        found: Found | None = None,
        texts: Sequence[TextSource] = (),
    ) -> None:
        """chunks: of more than n_recent + 2 SCORED + n_skip tokens. found: what an earlier run had. texts: of the
        chunks, one each, if these are to enter the moments; the first ones, which the calibration names, are in them.
        """
        self.session, self.base, self.calibration, self.chunks = session, base, calibration, chunks
        self.texts = tuple(texts)
        self.window, self.latent = Window(calibration.n_skip, n_recent), mla.is_latent(base)
        self.found = found or Found.none(calibration)
        self.found.enter(calibration, texts)

    def plan(self) -> list[tuple[int, int, str]]:
        """Chunk, index of the layer and side of every trial, best first within a chunk; side "" measures rounding."""
        n = len(self.calibration.layers)
        trials = [(j % len(self.chunks), i, side) for j, (i, side) in enumerate(_tried(n))]
        floors = [(0, i, "") for i in _floors(n)]
        return floors + sorted(trials, key=lambda trial: trial[0])

    @property
    def tokens(self) -> int:
        """Tokens that all steps decode, if no trial is repeated."""
        return sum(map(len, self.chunks)) + SCORED * len(self.plan())

    def steps(self) -> Iterator[int]:
        """Yields after every step the tokens that it decoded; found can be kept between any two."""
        tried = {(t.chunk, t.index, t.side) for t in self.found.trials}
        for c, tokens in enumerate(self.chunks):
            left = [(i, side) for chunk, i, side in self.plan() if chunk == c and (c, i, side) not in tried]
            if not left and c < self.found.chunks:
                continue
            chunk = Decoded(self.session, tokens, latent=self.latent)
            if c >= self.found.chunks:
                self._accumulate(chunk)
            yield len(tokens)
            for i, side in left:
                yield SCORED * (self._try(chunk, c, i, side) if side else self._floor(chunk, c, i))

    def _accumulate(self, chunk: Decoded) -> None:
        for stats, sums in zip(self.calibration.layers, self.found.sums, strict=True):
            for side, part in self._metrics(chunk.rows(stats.shape.il, False), stats.shape).items():
                sums[side] += part
        if self.found.chunks >= self.found.entered:
            self._add_moments(chunk)
        self.found.queries += chunk.n_sampled
        self.found.chunks += 1

    def _metrics(self, rows: Rows, shape: LayerShape) -> dict[str, F64]:
        if not self.latent:
            return metrics(rows, shape, output_weights(self.base, shape), self.window)
        output, values = mla.read_weights(self.base, shape)
        return metrics(rows, shape, output, self.window, values)

    def _add_moments(self, chunk: Decoded) -> None:
        for stats, moments in zip(self.calibration.layers, self.found.moments, strict=True):
            for side in "kv":
                cells = chunk.view(stats.shape.il, side)[self.window.n_sink :].astype(np.float64).transpose(1, 0, 2)
                moments[f"{side}2"] += cells.transpose(0, 2, 1) @ cells
                moments[f"{side}1"] += cells.sum(axis=1)
        self.found.cells += chunk.start - self.window.n_sink

    def _noise(self, i: int, side: str) -> Noise:
        covariance = _covariance(self.calibration.layers[i], side)
        metric = self.found.sums[i][f"{side}0"]
        if self.latent:  # an error in a value is one in its key, too
            d = self.calibration.layers[i].shape.d_v
            metric = metric.copy()
            metric[:, :d, :d] += self.found.sums[i]["v0" if side == "k" else "k0"][:, :d, :d]
        return Noise(covariance, metric / self.found.queries)

    def _noisy(self, chunk: Decoded, i: int, side: str, draw: Callable[[int, Generator], F32], seed: int) -> F32:
        """The cells before the scored tokens, noise in all but the sinks, as f16 holds it: [start, n_head_kv, d]."""
        cells = chunk.view(self.calibration.layers[i].shape.il, side).astype(np.float32)
        cells[self.window.n_sink :] += draw(len(cells) - self.window.n_sink, np.random.default_rng([seed, i]))
        noisy: F32 = cells.astype(np.float16).astype(np.float32)
        return noisy

    def _rounding(self, chunk: Decoded, c: int, i: int) -> float:
        """What rounding alone costs: noise too small to matter."""
        noise = self._noise(i, "v")
        cells = self._noisy(chunk, i, "v", noise.of(TINY * noise.most), c)
        return chunk.kld({(self.calibration.layers[i].shape.il, "v"): cells})

    def _floor(self, chunk: Decoded, c: int, i: int) -> int:
        """Rounding as a trial; returns how many it took."""
        self.found.trials.append(Trial(c, i, "", self._rounding(chunk, c, i), 0.0))
        return 1

    def _try(self, chunk: Decoded, c: int, i: int, side: str) -> int:
        """Returns how many trials it took."""
        shape = self.calibration.layers[i].shape
        noise, rows, output = self._noise(i, side), chunk.rows(shape.il, True), output_weights(self.base, shape)
        exact = chunk.view(shape.il, side).astype(np.float32)
        most = noise.most if side == "k" or self.latent else np.inf  # attention is linear in its values

        def noisy(wanted: float) -> tuple[F32, float]:
            """The cells, and what the noise in them adds to the stream."""
            cells = self._noisy(chunk, i, side, noise.of(min(wanted, most)), c)
            errors = {one: np.zeros_like(getattr(rows, one)) for one in ("kv" if self.latent else side)}
            for error in errors.values():  # of latent rows: a value's elements are the first of its key's
                n = min(error.shape[-1], exact.shape[-1])
                error[: chunk.start, :, :n] = (cells - exact)[..., :n]
            return cells, energy(rows, shape, output, errors.get("k"), errors.get("v"))

        guess, n_tried = self._guess(c, i, side), 0
        wanted = FIRST * noise.most if guess is None else 2.0 * TARGET / guess
        cells, moved = noisy(wanted)
        if i >= APART and guess is not None and moved > 0.0 and not 1.0 / NEAR < moved / wanted < NEAR:
            wanted *= wanted / moved
            cells, moved = noisy(wanted)
        while True:
            n_tried += 1
            kld = chunk.kld({(shape.il, side): cells})
            done = QUIET * TARGET < kld < LOUD * TARGET or (kld < TARGET and wanted >= most)
            if done or n_tried > REPEATS:
                break
            wanted *= min(TARGET / max(kld, TARGET / MOST_CHANGE), MOST_CHANGE)
            cells, moved = noisy(wanted)
        self.found.trials.append(Trial(c, i, side, kld, moved))
        return n_tried

    def _guess(self, c: int, i: int, side: str) -> float | None:
        """Nats per half energy that the other trials let expect."""
        known = self.found.factors()
        if not known:
            return None
        factors, texts = smoothed(known, len(self.calibration.layers))
        return float(factors[side][i]) * texts.get(c, 1.0)

    def result(self, stretch: F64 | None = None) -> Calibration:
        """The calibration with what is found; predictions are not corrected yet: corrected(). stretch: as _stretch().

        Raises Unpredictable where no noise in the cache changes what the model says.
        """
        factors, _ = smoothed(self.found.factors(), len(self.calibration.layers))
        lost = sum(0.5 * factors[s][i] * self._noise(i, s).most for s in "kv" for i in range(len(factors[s])))
        if lost < SILENT:
            raise Unpredictable("model", UNPREDICTABLE)
        layers, moments = [], self._moments()
        gains = np.ones((len(moments.layers), len(SIDES))) if stretch is None else np.exp(stretch)
        for i, (stats, sums) in enumerate(zip(moments.layers, self.found.sums, strict=True)):
            scaled = {
                side: gain * factors[side[0]][i] * sums[side] / self.found.queries
                for side, gain in zip(SIDES, gains[i], strict=True)
            }
            layers.append(replace(stats, sensitivity=LayerSensitivity(**scaled)))
        tokens = SCORED * sum(trial.side != "" for trial in self.found.trials)
        n_ctx = max(len(chunk) for chunk in self.chunks)
        measured = Sensitivity("engine", tokens, self.window.n_recent, n_ctx)
        return replace(moments, layers=tuple(layers), sensitivity=measured, sha256="")

    def _stretch(self, chunk: Decoded, near: int, far: int) -> F64:
        """[layers, SIDES]: logarithms of what errors in cells add to the stream of a chunk's queries from position
        `far` on, over what they add to those before `near`."""
        logs = np.zeros((len(self.calibration.layers), len(SIDES)))
        for of_layer, stats in zip(logs, self.calibration.layers, strict=True):
            rows = chunk.rows(stats.shape.il, False)
            energies = []
            for queries, n in ((rows.pos >= far, len(rows.k)), (rows.pos < near, near)):
                part = Rows(rows.q[queries], rows.pos[queries], rows.k[:n], rows.v[:n])
                found = self._metrics(part, stats.shape)
                energies.append([np.sum(found[side] * _covariance(stats, side[0])) / len(part.q) for side in SIDES])
            if np.min(energies) > 0.0:
                of_layer[:] = np.clip(np.log(energies[0]) - np.log(energies[1]), -MOST_STRETCH, MOST_STRETCH)
        return logs

    def _moments(self) -> Calibration:
        """The calibration with the cells that were measured on in its moments, too: more kinds of text for nothing."""
        n, layers = self.found.cells, []
        if not self.texts or not n:
            return self.calibration
        for stats, sums in zip(self.calibration.layers, self.found.moments, strict=True):
            tokens = stats.shape.tokens
            mixed = {name: (tokens * getattr(stats, name) + sums[name]) / (tokens + n) for name in MOMENTS}
            layers.append(replace(stats, shape=replace(stats.shape, tokens=tokens + n), **mixed))
        texts = (*self.calibration.texts, *self.texts[self.found.entered : self.found.chunks])
        tokens = self.calibration.tokens + n
        return replace(self.calibration, layers=tuple(layers), texts=texts, tokens=tokens)

    def corrected(self, held_out: Sequence[Sequence[int]], n_threads: int) -> Calibration:
        """result(), scaled by what is read from far back in longer chunks of other text, if these are longer, and with
        its predictions corrected by what a layout and a stock type cost there.

        Errors of all layers together add up to more than second order says where attention is rare and decisive. The
        layout is put into a saved state; the stock type, which has no window, runs for real on a part of a chunk.
        """
        chunks, stretches = [], []
        near = min(map(len, self.chunks)) - SCORED
        for tokens in held_out:
            n_scored = min(CORRECTING, len(tokens) - self.window.n_recent - 2 * SCORED)
            far = (len(tokens) - n_scored) // 2
            beginning = spread(near // 2, near, LOOKING) if near <= far else ()
            chunks.append(Decoded(self.session, tokens, n_scored, self.latent, beginning))
            if beginning:
                stretches.append(self._stretch(chunks[-1], near, far))
        calibration = self.result(evened(np.mean(stretches, axis=0)) if stretches else None)
        assert calibration.sensitivity is not None
        fit = Fit(self.base, calibration, Options(window=self.window, bpe_context=ROWS_ONLY))
        layers, predicted = _loud(fit)
        found, factors = [self._cost(chunk, layers) for chunk in chunks], [1.0, 1.0]
        if max(found) > 0.0 and predicted > 0.0:
            factors[0] = float(np.mean(np.maximum(found, 0.0))) / predicted * (UNSEEN if stretches else 1.0)
        stock = fit.stock_error(STOCK)
        if stock:
            tokens = held_out[0][: n_stock(len(held_out[0]))]
            (kld,) = compare(self.session.model, [CacheOptions(STOCK)], tokens, n_threads)
            factors[1] = max(kld - self.found.floor, 0.0) / stock or 1.0
        measured = replace(calibration.sensitivity, correction=factors[0], correction0=factors[1])
        return replace(calibration, sensitivity=measured)

    def _cost(self, chunk: Decoded, layers: Sequence[CodedLayer]) -> float:
        """KLD of a layout over the scored tokens of a chunk, above what rounding costs there.

        The exact window stays where it is while they are read; it lies so that it is right in their middle.
        """
        cells, n_scored = {}, len(chunk.scored)
        coded = slice(self.window.n_sink, chunk.start - max(self.window.n_recent - n_scored // 2, 0))
        for layer in layers:
            il = layer.shape.il
            for side in "k" if layer.latent else "kv":
                seen = chunk.view(il, side).astype(np.float32)
                for h, head in enumerate(layer.heads):
                    stored, gamma = (head.k, head.gamma) if side == "k" else (head.v, 1.0)
                    gamma = 1.0 if layer.latent else gamma  # which multiplies keys alone
                    seen[coded, h] = reconstructed(seen[coded, h], stored, gamma)
                cells[il, side] = seen
        return chunk.kld(cells) - self._rounding(chunk, len(self.chunks), 0)


def evened(logs: F64) -> F64:
    """Means [layers, …] with a layer's neighbours, of half its weight: two texts say little of one layer. The first
    stands apart."""
    others = np.concatenate([logs[1:2], logs[1:], logs[-1:]])
    found = logs.copy()
    found[1:] = (others[:-2] + 2.0 * others[1:-1] + others[2:]) / 4.0
    return found


def _loud(fit: Fit) -> tuple[tuple[CodedLayer, ...], float]:
    """A layout of the largest of BITS whose prediction is CLEAR, or of the smallest that heads can have; and that."""
    least, _ = budget_range(fit.heads, fit.overhead)
    for bits in [bits for bits in BITS if bits >= least.total]:
        layers, _ = fit.code(fit.plan(bits))
        predicted = fit.error(layers) or 0.0
        if predicted >= CLEAR:
            break
    return layers, predicted


def n_measured(n_chunks: int) -> int:
    """How many of so many chunks are measured on; predictions are corrected on the others, two if there are enough."""
    return n_chunks - 2 if n_chunks > 3 else n_chunks - 1


def n_stock(n: int) -> int:
    """Tokens of a chunk of n that a stock type is run on, beside f16."""
    return min(n * 3 // 8, STOCK_TOKENS)


def sense(
    session: Session,
    base: Base,
    calibration: Calibration,
    chunks: Sequence[Sequence[int]],
    n_recent: int,
    n_threads: int,
    minutes: float | None = None,
    found: Found | None = None,
    keep: Callable[[Found], None] = lambda found: None,
    progress: bool = False,
    texts: Sequence[TextSource] = (),
) -> Calibration:
    """The calibration of a GGUF with sensitivities measured on n_measured() `chunks`, and corrected on the others.

    Where those are at least twice as long they also say how much more, or less, is read from far back in longer texts.

    session: with room for a chunk. minutes: time for all of it; after LEAST trials, what there
    is no time for is filled in from what is near. found: what an earlier run has kept; keep() is called after every
    step. texts: as Sensing. Raises SubkvError: about `n_ctx` for chunks too short, Unpredictable where nothing can be
    predicted.
    """
    start, n_ctx = time.monotonic(), min(map(len, chunks))
    least = n_recent + calibration.n_skip + 4 * SCORED
    if n_ctx < least:
        raise SubkvError("n_ctx", f"expected chunks of at least {least} tokens with this exact window, found {n_ctx}")
    n = n_measured(len(chunks))
    sensing = Sensing(session, base, calibration, chunks[:n], n_recent, found, texts[:n])
    last, spent = sum(map(len, chunks[n:])) + 2 * n_stock(len(chunks[n])), 0  # tokens of the correction, and so far
    with progress_bar("sensitivities", sensing.tokens + last, "tok", progress) as bar:
        for step in sensing.steps():
            keep(sensing.found)
            bar.update(step)
            spent += step
            passed = time.monotonic() - start
            late = minutes is not None and passed * (1.0 + (last + step) / spent) > 60.0 * minutes
            if late and len(sensing.found.trials) >= LEAST:
                break
        return sensing.corrected(chunks[n:], n_threads)


def _order(n: int) -> list[int]:
    """All of n layers, so that any beginning is spread over the depth: the ends, then the middles of what is left."""
    order, gaps = [0, n - 1] if n > 1 else [0], [(0, n - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
