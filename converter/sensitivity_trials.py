"""Trials of sensitivities in the engine: errors are followed to the residual stream by arithmetic, and beyond by noise.

residual.py computes, from queries, keys and values alone, the vector that an error in a cached key or value adds to the
residual stream. That gives a head's matrix except for the factor from the stream's energy to nats. The factor is
measured: a trial puts noise into the cells of one layer's keys or values in a saved state, and takes the KLD of the
tokens decoded after it. The state is restored for every trial, so a trial decodes SCORED tokens and not the text before
them.

Many short texts show more directions than a few long ones. But how much is read from beyond the exact window depends on
the number of cells there: on average over many cells errors cancel, and a cell far back is read only if it exists.
So some chunks are longer. Their beginnings are measured as the other chunks are, and the matrices of every layer are
scaled by the energy far into them over the energy near their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator

from converter.decoded_chunk import QUERIES, SCORED, DecodedChunk, Spill, Unpredictable, ignore
from converter.residual import SIDES, Rows, energy, equal_rows, gram_of, metrics
from converter.sensitivity_measurements import (
    MOMENTS,
    NEGLIGIBLE,
    UNPREDICTABLE,
    Measurements,
    Trial,
    evened,
    smoothed,
)
from converter.session import Session
from converter.statistics_stage import spread
from subkv.format.arrays import F32, F64
from subkv.format.calibration import Calibration, LayerSensitivity, LayerShape, LayerStats, Sensitivity, TextSource
from subkv.format.window import Window
from subkv.plan import mla
from subkv.plan.costs import output_grams, output_weights

TARGET = 0.03  # nats per token that a trial's noise should cost: above rounding, small enough to be quadratic
FIRST = 0.03  # energy of the very first trial's noise, relative to keys and values replaced by random ones
TINY = 1e-6  # the same of noise that is too small to matter
LEAST_COST, MOST_COST = 0.25, 2.0  # times TARGET: a trial outside is repeated with other noise
MOST_CHANGE = 100.0  # of its energy
NEAR = 1.5  # times the target energy: texts differ by more, and computing the energy takes no trial
REPEATS = 2
REPEATED = 1.4  # trials that one takes on average
LEAST = 6  # trials made without any time limit: rounding, both sides of the first layer, and two more
GRAMS = 1 << 30  # bytes: 270 MB of an 8B model, some GB of those whose groups have 64 heads
CORRECTING = 128  # tokens that are scored for a correction, after the cells of a longer text
MOST_STRETCH = 2.0  # logarithm, of a layer that reads next to nothing in one of two places: four standard deviations
APART = 3  # layers at the start whose factors differ from all others


@dataclass(frozen=True)
class Scope:
    """How much is decoded. far: tokens of each of builtin.LONGER, since reads from far back need a longer text. layers:
    tried beyond the first ones. statistics: whether the statistics stage has enough tokens for large heads without
    those that sensitivities add."""

    far: int = 2048
    layers: int = 24
    statistics: bool = True


FULL = Scope()
REDUCED = Scope(far=1536, layers=12, statistics=False)
LARGE = 1 << 30  # bytes of weights


def scope_of(n_bytes: int) -> Scope:
    """For weights of this size: large models take longest per token. converter/NOTES.md has the cost of REDUCED."""
    return REDUCED if n_bytes > LARGE else FULL


def n_trials(n_layer: int, scope: Scope = FULL) -> int:
    """Length of SensitivityTrials.plan()."""
    return len(_trial_sides(n_layer, scope.layers)) + len(_floors(n_layer))


def _floors(n_layer: int) -> list[int]:
    """The layers in which rounding is measured."""
    return sorted({0, n_layer - 1})


def _trial_sides(n: int, further: int) -> list[tuple[int, str]]:
    """Layers and sides that are tried, best first: both sides of the first APART layers, and keys and values in turn of
    at most `further` others; the rest is derived from its neighbours."""
    others = sorted([i for i in _order(n) if i >= APART][:further])
    side = {i: "kv"[j % 2] for j, i in enumerate(others)}
    return [(i, s) for i in _order(n) for s in (side.get(i, "") if i >= APART else "kv")]


def _covariance(stats: LayerStats, side: str) -> F64:
    """Of keys ("k") or values ("v"), [n_head_kv, d, d]."""
    second, first = (getattr(stats, f"{side}{power}") for power in (2, 1))
    covariance: F64 = second - first[:, :, None] * first[:, None, :]
    return covariance


class Noise:
    """Errors of one layer's side that cost the same in every direction, as those of a planned quantizer: covariance
    (Σ⁻¹ + M/θ)⁻¹ for rows of covariance Σ and metric M; θ sets the cost."""

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
        """Energy in the stream when all rows are replaced by random ones, per query."""
        return float(sum(np.sum(weights) for weights in self.weights))

    def of(self, target: float) -> Callable[[int, Generator], F32]:
        """Draws n rows of noise of this energy, [n, n_head_kv, d]; more than `most` is that, scaled."""
        gain, low, high = max(np.sqrt(target / self.most), 1.0), 1e-30, 1e30
        for _ in range(200):
            theta = float(np.sqrt(low * high))
            reached = sum(float(np.sum(w / (1.0 + w / theta))) for w in self.weights)
            low, high = (theta, high) if reached < target else (low, theta)

        def draw(n: int, rng: Generator) -> F32:
            heads = [
                (rng.standard_normal((n, len(w))) / np.sqrt(1.0 + w / theta)) @ to
                for w, to in zip(self.weights, self.maps, strict=True)
            ]
            return (gain * np.stack(heads, axis=1)).astype(np.float32)

        return draw


class SensitivityTrials:
    """Sensitivities of a calibration's layers, in steps: run steps() as far as time allows, then result().

    Every chunk adds to the matrices; the trials are distributed over the chunks.
    """

    def __init__(
        self,
        session: Session,
        calibration: Calibration,
        chunks: Sequence[Sequence[int]],
        n_recent: int,
        measured: Measurements | None = None,
        texts: Sequence[TextSource] = (),
        on_decoded: Callable[[int], None] = ignore,
        folder: Path | None = None,
        scope: Scope = FULL,
    ) -> None:
        """chunks: of more than n_recent + 2 SCORED + n_skip tokens. measured: by an earlier run. texts: one per chunk
        if the chunks are to enter the moments; the calibration has the cells of those that it names. on_decoded: called
        as tokens are decoded. folder: for data that is needed again; None: it stays in memory. scope: layers to try.
        """
        self.folder, self.scope = folder, scope
        self.session, self.base, self.calibration, self.chunks = session, session.source.gguf, calibration, chunks
        self.texts = tuple(texts)
        self.window, self.latent = Window(calibration.n_skip, n_recent), mla.is_latent(self.base)
        self.measured = measured or Measurements.empty(calibration)
        self.measured.forget_entered(calibration, texts)
        self.on_decoded = on_decoded
        self.near = min(map(len, chunks)) - SCORED  # cells that every chunk has
        self._grams: dict[int, Spill] = {}
        self.kept: dict[int, DecodedChunk] = {}  # longer chunks, and the latest

    def plan(self) -> list[tuple[int, int, str]]:
        """Chunk, index of the layer and side of every trial, best first within a chunk; side "" measures rounding."""
        n = len(self.calibration.layers)
        trials = [(j % len(self.chunks), i, side) for j, (i, side) in enumerate(_trial_sides(n, self.scope.layers))]
        floors = [(0, i, "") for i in _floors(n)]
        return floors + sorted(trials, key=lambda trial: trial[0])

    @property
    def tokens(self) -> int:
        """Tokens that all steps decode, if no trial is repeated."""
        return sum(map(len, self.chunks)) + SCORED * len(self.plan())

    @property
    def longer(self) -> list[int]:
        """Chunks whose second half begins after the last query of the shortest chunk."""
        return [c for c, tokens in enumerate(self.chunks) if (len(tokens) - CORRECTING) // 2 >= self.near]

    def steps(self, too_late: Callable[[int], bool] = lambda tokens: False) -> Iterator[int]:
        """Yields after every step the tokens that it decoded; `measured` can be saved between any two.

        too_late: whether that number of further tokens exceeds the time; called after LEAST trials. Longer chunks are
        worth more than further trials, so time is reserved for them.
        """
        tried = {(t.chunk, t.index, t.side) for t in self.measured.trials}
        for c, tokens in enumerate(self.chunks):
            left = [(i, side) for chunk, i, side in self.plan() if chunk == c and (c, i, side) not in tried]
            if not left and c in self.measured.done:
                continue
            ahead = sum(len(self.chunks[other]) for other in self.longer if other > c)
            if self._enough and too_late(len(tokens) + ahead):
                continue
            chunk = self.decoded(c)
            yield len(tokens)
            for i, side in left:
                if self._enough and too_late((1 + REPEATS) * SCORED + ahead):
                    break
                n_tried = self._try(chunk, c, i, side) if side else self._floor(chunk, c, i)
                self.on_decoded(SCORED * n_tried)
                yield SCORED * n_tried
            del chunk  # its memory is free while the next one is decoded

    @property
    def _enough(self) -> bool:
        return len(self.measured.trials) >= LEAST

    def decoded(self, c: int) -> DecodedChunk:
        """A chunk, which enters the matrices if it has not yet. Only the rows of the latest one can be read."""
        self.kept = {other: chunk for other, chunk in self.kept.items() if other in self.longer}
        for earlier in self.kept.values():
            earlier.spill(self.folder)
        longer = c in self.longer
        beginning = spread(self.near // 2, self.near, QUERIES) if longer else ()
        n_scored = CORRECTING if longer else SCORED
        chunk = DecodedChunk(self.session, self.chunks[c], n_scored, self.latent, beginning, self.on_decoded)
        if c not in self.measured.done:
            self._accumulate(c, chunk)
        self.kept[c] = chunk
        return chunk

    def _accumulate(self, c: int, chunk: DecodedChunk) -> None:
        """Errors in the first `near` cells count, in longer chunks as in others."""
        stretch = np.zeros((len(self.calibration.layers), len(SIDES)))
        for stats, sums, logs in zip(self.calibration.layers, self.measured.sums, stretch, strict=True):
            rows = chunk.rows(stats.shape.il, False)
            metrics_of = self._metrics(stats.shape)
            beginning = metrics_of(rows.until(self.near))
            for side, part in beginning.items():
                sums[side] += part
            if c in self.longer:
                near, far = len(rows.until(self.near).q), rows.beyond(self.near)
                beyond = metrics_of(far)
                energies = np.array([_energies(beyond, stats) / len(far.q), _energies(beginning, stats) / near])
                if np.min(energies) > 0.0:
                    logs[:] = np.clip(np.log(energies[0] / energies[1]), -MOST_STRETCH, MOST_STRETCH)
        if c in self.longer:
            self.measured.stretches[c] = stretch
        if c not in self.measured.entered:
            self._add_moments(chunk)
        self.measured.queries += int(np.sum(chunk.pos[: chunk.n_sampled] < self.near))
        self.measured.done.append(c)

    def _metrics(self, shape: LayerShape) -> Callable[[Rows], dict[str, F64]]:
        """residual.metrics() of any rows of a layer, whose weights are read once."""
        if self.latent:
            output, values = mla.read_weights(self.base, shape)
            gram = gram_of(output, shape.n_head)
            return lambda rows: metrics(rows, shape, gram, self.window, values, joint=True)
        n, d = shape.n_group, shape.d_v
        blocks = self._output_grams(shape).reshape(shape.n_head_kv, n, d, n, d)
        return lambda rows: metrics(rows, shape, lambda i, j: blocks[i // n, i % n, :, j % n], self.window)

    def _output_grams(self, shape: LayerShape) -> F32:
        """output_grams() of a layer. Every chunk needs them; those of the first layers are kept, up to GRAMS bytes."""
        if shape.il in self._grams:
            return self._grams[shape.il].array()
        grams = output_grams(self.base, shape)
        if (len(self._grams) + 1) * grams.nbytes <= GRAMS:
            self._grams[shape.il] = Spill(self.folder, bytearray(), grams)
        return grams

    def _add_moments(self, chunk: DecodedChunk) -> None:
        """The cells of every text have the same weight: kinds of text differ more than parts of one text."""
        n = chunk.start - self.window.n_sink
        weight = (self.near - self.window.n_sink) / n
        for stats, moments in zip(self.calibration.layers, self.measured.moments, strict=True):
            for side in "kv":
                cells = chunk.view(stats.shape.il, side)[self.window.n_sink :].astype(np.float64).transpose(1, 0, 2)
                moments[f"{side}2"] += weight * (cells.transpose(0, 2, 1) @ cells)
                moments[f"{side}1"] += weight * cells.sum(axis=1)
        self.measured.cells += self.near - self.window.n_sink

    def _noise(self, i: int, side: str) -> Noise:
        covariance = _covariance(self.calibration.layers[i], side)
        metric = self.measured.sums[i][f"{side}0"].astype(np.float64)
        if self.latent:  # an error in a value is one in its key, too
            d = self.calibration.layers[i].shape.d_v
            metric[:, :d, :d] += self.measured.sums[i]["v0" if side == "k" else "k0"][:, :d, :d]
        return Noise(covariance, metric / self.measured.queries)

    def _noisy(self, chunk: DecodedChunk, i: int, side: str, draw: Callable[[int, Generator], F32], seed: int) -> F32:
        """The cells before the scored tokens, noise in all but the sinks, as f16 holds it: [start, n_head_kv, d].

        Equal tokens of the first layer get equal noise, because their codes are equal.
        """
        il, coded = self.calibration.layers[i].shape.il, slice(self.window.n_sink, None)
        cells = chunk.view(il, side).astype(np.float32)
        values = chunk.view(il, "v")[coded].astype(np.float32)
        noise = draw(len(values), np.random.default_rng([seed, i]))
        if (kinds := equal_rows(values.reshape(len(values), -1))) is not None:
            order, starts = kinds
            of = np.repeat(order[starts], np.diff(starts, append=len(order)))
            noise[order] = noise[of]
        cells[coded] += noise
        noisy: F32 = cells.astype(np.float16).astype(np.float32)
        return noisy

    def rounding(self, chunk: DecodedChunk, c: int, i: int) -> float:
        """Cost of rounding alone on SCORED tokens: noise too small to matter."""
        noise = self._noise(i, "v")
        cells = self._noisy(chunk, i, "v", noise.of(TINY * noise.most), c)
        return chunk.kld((self.calibration.layers[i].shape.il, "v"), cells, SCORED)

    def _floor(self, chunk: DecodedChunk, c: int, i: int) -> int:
        """Measures rounding. Returns the number of trials, 1."""
        self.measured.trials.append(Trial(c, i, "", self.rounding(chunk, c, i), 0.0))
        return 1

    def _try(self, chunk: DecodedChunk, c: int, i: int, side: str) -> int:
        """Measures noise. Returns the number of trials, with those that were repeated."""
        shape = self.calibration.layers[i].shape
        noise, output = self._noise(i, side), output_weights(self.base, shape)
        rows = chunk.rows(shape.il, True).until(chunk.start + SCORED)
        exact = chunk.view(shape.il, side).astype(np.float32)
        most = noise.most if side == "k" or self.latent else np.inf  # attention is linear in its values

        def noisy(target: float) -> tuple[F32, float]:
            """The cells, and the energy that their noise adds to the stream."""
            cells = self._noisy(chunk, i, side, noise.of(min(target, most)), c)
            errors = {one: np.zeros_like(getattr(rows, one)) for one in ("kv" if self.latent else side)}
            for error in errors.values():  # of latent rows: a value's elements are the first of its key's
                n = min(error.shape[-1], exact.shape[-1])
                error[: chunk.start, :, :n] = (cells - exact)[..., :n]
            return cells, energy(rows, shape, output, errors.get("k"), errors.get("v"))

        guess, n_tried = self._guess(c, i, side), 0
        target = FIRST * noise.most if guess is None else 2.0 * TARGET / guess
        cells, added = noisy(target)
        if i >= APART and guess is not None and added > 0.0 and not 1.0 / NEAR < added / target < NEAR:
            target *= target / added
            cells, added = noisy(target)
        while True:
            n_tried += 1
            kld = chunk.kld((shape.il, side), cells, SCORED)
            done = LEAST_COST * TARGET < kld < MOST_COST * TARGET or (kld < TARGET and target >= most)
            if done or n_tried > REPEATS:
                break
            target *= min(TARGET / max(kld, TARGET / MOST_CHANGE), MOST_CHANGE)
            cells, added = noisy(target)
        self.measured.trials.append(Trial(c, i, side, kld, added))
        return n_tried

    def _guess(self, c: int, i: int, side: str) -> float | None:
        """Expected nats per half the energy, from the other trials."""
        known = self.measured.factors()
        if not known:
            return None
        factors, texts = smoothed(known, len(self.calibration.layers))
        return float(factors[side][i]) * texts.get(c, 1.0)

    def result(self) -> Calibration:
        """The calibration with its sensitivities; predictions are not corrected yet.

        Raises Unpredictable where no noise in the cache changes the model's predictions.
        """
        factors, _ = smoothed(self.measured.factors(), len(self.calibration.layers))
        lost = sum(0.5 * factors[s][i] * self._noise(i, s).most for s in "kv" for i in range(len(factors[s])))
        if lost < NEGLIGIBLE:
            raise Unpredictable("model", UNPREDICTABLE)
        layers, moments = [], self._moments()
        gains = np.ones((len(moments.layers), len(SIDES)))
        if self.measured.stretches:
            gains = np.exp(evened(np.mean(list(self.measured.stretches.values()), axis=0)))
        for i, (stats, sums) in enumerate(zip(moments.layers, self.measured.sums, strict=True)):
            scaled = {
                side: gain * factors[side[0]][i] * sums[side].astype(np.float64) / self.measured.queries
                for side, gain in zip(SIDES, gains[i], strict=True)
            }
            layers.append(replace(stats, sensitivity=LayerSensitivity(**scaled)))
        tokens = SCORED * sum(trial.side != "" for trial in self.measured.trials)
        n_ctx = max(len(chunk) for chunk in self.chunks)
        sensitivity = Sensitivity("engine", tokens, self.window.n_recent, n_ctx)
        return replace(moments, layers=tuple(layers), sensitivity=sensitivity, sha256="")

    def _moments(self) -> Calibration:
        """The calibration with the measured cells in its moments: more kinds of text at no cost."""
        n, layers = self.measured.cells, []
        new = sorted(set(self.measured.done) - set(self.measured.entered))
        if not self.texts or not n:
            return self.calibration
        for stats, sums in zip(self.calibration.layers, self.measured.moments, strict=True):
            tokens = stats.shape.tokens
            mixed = {
                name: (tokens * getattr(stats, name) + sums[name].astype(np.float64)) / (tokens + n) for name in MOMENTS
            }
            layers.append(replace(stats, shape=replace(stats.shape, tokens=tokens + n), **mixed))
        texts = (*self.calibration.texts, *(self.texts[c] for c in new))
        tokens = self.calibration.tokens + n
        return replace(self.calibration, layers=tuple(layers), texts=texts, tokens=tokens)


def _energies(metric: Mapping[str, F64], stats: LayerStats) -> F64:
    """Energies [len(SIDES)] that errors as large as keys and values add to the stream. metric: residual.metrics()."""
    return np.array([np.sum(metric[side] * _covariance(stats, side[0])) for side in SIDES])


def _order(n: int) -> list[int]:
    """All of n layers, so that any first few are spread over the depth: both ends, then the middle of every gap."""
    order, gaps = [0, n - 1] if n > 1 else [0], [(0, n - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
