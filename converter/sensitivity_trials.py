"""Sensitivities, measured by trials in the engine.

A head's sensitivity is a matrix: the cost, in nats of KLD, of an error in its keys or values. Two steps compute it:

1. residual.py computes the vector that an error in a cached key or value adds to the residual stream. It needs only
   queries, keys and values. This gives the matrix, up to the factor from the stream's energy to nats.
2. A trial measures that factor. It adds noise to one layer's keys or values in a saved state and measures the KLD of
   the SCORED tokens decoded after it. The state is restored for every trial, so a trial does not decode the text again.

Many short texts show more directions than a few long ones. But the weight of cells beyond the exact window depends on
their number: errors of many cells cancel, and only a long text has distant cells. So some chunks are longer. Their
beginnings are measured like the other chunks. Then the matrices of every layer are scaled by the energy at the end of
longer chunks over the energy at their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from converter.decoded_chunk import QUERIES, SCORED, DecodedChunk, Spill, Unpredictable, ignore
from converter.residual import SIDES, Rows, energy, equal_rows, gram_of, metrics
from converter.session import Session
from converter.statistics_stage import evenly_spaced
from subkv.format.arrays import F32, F64
from subkv.format.calibration import Calibration, LayerSensitivity, LayerShape, LayerStats, Sensitivity, TextSource
from subkv.format.window import Window
from subkv.plan import mla
from subkv.plan.costs import output_grams, output_weights

TARGET = 0.03  # nats per token, the intended cost of a trial, above rounding and small enough to be quadratic
FIRST = 0.03  # energy of the first trial's noise, relative to keys and values replaced by random ones
TINY = 1e-6  # the same for noise that has no effect beyond rounding
LEAST_COST, MOST_COST = 0.25, 2.0  # times TARGET; a trial outside is repeated with other noise
MOST_CHANGE = 100.0  # maximum factor between the energies of a trial and its repetition
NEAR = 1.5  # accepted ratio of a trial's energy to the intended one; otherwise the noise is scaled before the trial
REPEATS = 2
REPEATED = 1.4  # mean number of attempts per trial
LEAST = 6  # trials made under any time limit, for rounding, both sides of the first layer, and two more
GRAMS = 1 << 30  # bytes of stored matrices, which take 270 MB for an 8B model, some GB for groups of 64 heads
CORRECTING = 128  # tokens scored for a correction, at the end of a longer text
MOST_STRETCH = 2.0  # limit for logarithms of a layer's energy ratio, four standard deviations
APART = 3  # first layers, whose factors differ from all others
AUDIBLE = 1.5  # times the cost of rounding; trials that cost less are ignored
NEGLIGIBLE = 1e-3  # nats: a smaller effect cannot be measured
UNPREDICTABLE = (
    "expected a model whose next tokens depend on its cache, found one that predicts the same with noise in it, as "
    "with random weights: nothing can be predicted"
)
MOMENTS = ("k2", "v2", "k1", "v1")  # members of LayerStats that get the cells of the chunks

VERSION = 1  # of saved Measurements; increase it when metrics, noise or chunks change

# Standard deviations of logarithms of factors: of one trial, between texts, between neighbouring layers, between the
# first three layers, between a layer's keys and values
SD_TRIAL, SD_TEXTS, SD_LAYERS, SD_FIRST, SD_SIDES = 0.3, 0.5, 0.5, 4.0, 0.6


@dataclass(frozen=True)
class Scope:
    """How much is decoded. far: tokens of each longer chunk. layers: trials beyond the first APART layers.
    long_statistics: the statistics stage reads enough tokens for large heads, without those that sensitivities add."""

    far: int = 2048
    layers: int = 24
    long_statistics: bool = True


FULL = Scope()
REDUCED = Scope(far=1536, layers=12, long_statistics=False)
LARGE = 1 << 30  # bytes of weights


def scope_of(n_bytes: int) -> Scope:
    """REDUCED for large weights, which take longest per token. research/notes/quality.md has its effect on quality."""
    return REDUCED if n_bytes > LARGE else FULL


def n_trials(n_layer: int, scope: Scope = FULL) -> int:
    """Length of SensitivityTrials.plan()."""
    return len(_trial_sides(n_layer, scope.layers)) + len(_floors(n_layer))


def _floors(n_layer: int) -> list[int]:
    """The layers in which rounding is measured."""
    return sorted({0, n_layer - 1})


def _trial_sides(n: int, further: int) -> list[tuple[int, str]]:
    """Layers and sides to try, most informative first: both sides of the first APART layers, and of at most `further`
    other layers keys and values in turn. All other factors are derived from neighbours."""
    others = sorted([i for i in _order(n) if i >= APART][:further])
    side = {i: "kv"[j % 2] for j, i in enumerate(others)}
    return [(i, s) for i in _order(n) for s in (side.get(i, "") if i >= APART else "kv")]


def _covariance(stats: LayerStats, side: str) -> F64:
    """Of keys ("k") or values ("v"), [n_head_kv, d, d]."""
    second, first = (getattr(stats, f"{side}{power}") for power in (2, 1))
    covariance: F64 = second - first[:, :, None] * first[:, None, :]
    return covariance


#
# measurements: saved, resumed, and smoothed to factors of all layers
#


@dataclass(frozen=True)
class Trial:
    """Noise in one layer's side ("k" or "v"; "": noise that measures rounding). kld: its cost, nats per scored token.
    energy: the squared norm that it adds to the residual stream."""

    chunk: int
    index: int
    side: str
    kld: float
    energy: float


@dataclass
class Measurements:
    """All measurements so far.

    sums: per layer, residual.metrics() summed over `queries` queries of the chunks `done`. moments: per layer, sums
    over `cells` cells, named as in LayerStats, of the chunks `done` except those `entered`, whose cells the calibration
    already has. stretches: per longer chunk, logarithms [layers, SIDES] of the energy of errors at its end over that at
    its beginning. Matrices are float32, as in the calibration's file: this saves 100 MB for an 8B model.
    """

    sums: list[dict[str, F32]]
    moments: list[dict[str, F32]]
    queries: int = 0
    cells: int = 0
    done: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    stretches: dict[int, F64] = field(default_factory=dict)

    @classmethod
    def empty(cls, calibration: Calibration) -> Measurements:
        sums = [{side: np.zeros(_size(layer, side), np.float32) for side in SIDES} for layer in calibration.layers]
        moments = [
            {name: np.zeros_like(getattr(layer, name), np.float32) for name in MOMENTS} for layer in calibration.layers
        ]
        return cls(sums, moments)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file."""
        numbers = [(t.chunk, t.index, " kv".index(t.side or " "), t.kld, t.energy) for t in self.trials]
        lists = {name: np.array(getattr(self, name), dtype=np.int64) for name in ("done", "entered")}
        lists["counts"] = np.array([self.queries, self.cells])
        stretches = {f"stretch.{chunk}": logs for chunk, logs in self.stretches.items()}
        own = [sums | moments for sums, moments in zip(self.sums, self.moments, strict=True)]
        parts = {f"{i}.{name}": part for i, layer in enumerate(own) for name, part in layer.items()}
        return {"trials": np.array(numbers).reshape(-1, 5)} | lists | stretches | parts

    @classmethod
    def restored(cls, arrays: Mapping[str, NDArray[Any]], calibration: Calibration) -> Measurements:
        """The inverse of arrays(), for the same calibration. Raises ValueError or numpy's errors for another one."""
        own = cls.empty(calibration)
        own.queries, own.cells = (int(n) for n in arrays["counts"])
        own.done, own.entered = ([int(chunk) for chunk in arrays[name]] for name in ("done", "entered"))
        own.stretches = {int(name[8:]): arrays[name] for name in arrays if name.startswith("stretch.")}
        size = (len(calibration.layers), len(SIDES))
        if any(logs.shape != size for logs in own.stretches.values()):
            raise ValueError(f"expected numbers of {size[0]} layers for every longer text, found others")
        own.trials = [
            Trial(int(c), int(i), " kv"[int(side)].strip(), float(kld), float(energy))
            for c, i, side, kld, energy in arrays["trials"]
        ]
        for layers in (own.sums, own.moments):
            for i, parts in enumerate(layers):
                for name in parts:
                    parts[name] += arrays[f"{i}.{name}"]
        return own

    def forget_entered(self, calibration: Calibration, texts: Sequence[TextSource]) -> None:
        """Drop the moments if the calibration already names texts of the chunks, and so has their cells.

        Raises ValueError if the calibration lacks a text that an earlier one named.
        """
        named = [chunk for chunk, text in enumerate(texts) if text in calibration.texts]
        if not set(named) >= set(self.entered):
            raise ValueError(f"expected a calibration with the cells of {len(self.entered)} texts, found {len(named)}")
        if named != self.entered:  # the result was written, with the cells of all measured texts
            self.entered, self.cells = named, 0
            for moments in self.moments:
                for part in moments.values():
                    part[:] = 0.0

    @property
    def floor(self) -> float:
        """The cost of rounding alone, nats per token."""
        return max((t.kld for t in self.trials if not t.side), default=0.0)

    def factors(self) -> dict[tuple[int, int, str], float]:
        """Nats per half the energy, by (chunk, layer, side), of trials that cost AUDIBLE times the rounding."""
        floors = {t.index: t.kld for t in self.trials if not t.side}
        factors = {}
        for t in self.trials:
            floor = float(np.interp(t.index, sorted(floors), [floors[i] for i in sorted(floors)])) if floors else 0.0
            if t.side and t.kld > max(AUDIBLE * floor, NEGLIGIBLE) and t.energy > 0.0:
                factors[t.chunk, t.index, t.side] = 2.0 * (t.kld - floor) / t.energy
        return factors


def _size(layer: LayerStats, side: str) -> tuple[int, ...]:
    d = layer.shape.d_k if side[0] == "k" else layer.shape.d_v
    return layer.shape.n_head_kv, d, d


def smoothed(factors: Mapping[tuple[int, int, str], float], n_layer: int) -> tuple[dict[str, F64], dict[int, float]]:
    """Factors of all layers, per side [n_layer], and factors of the texts, by chunk. factors: of the trials.

    A trial's factor is the product of a layer's and a text's: noise costs little in a text whose next tokens are
    certain. Logarithms are fitted by least squares. They differ little between neighbouring layers (except the first),
    and between a layer's keys and values. Raises Unpredictable without any factor.
    """
    if not factors:
        raise Unpredictable("model", UNPREDICTABLE)
    texts = {chunk: 2 * n_layer + j for j, chunk in enumerate(sorted({chunk for chunk, _, _ in factors}))}
    n = 2 * n_layer + len(texts)
    normal, right = np.zeros((n, n)), np.zeros(n)

    def expect(value: float, sd: float, plus: Sequence[int], minus: int | None = None) -> None:
        """Add an equation: the sum of the logarithms `plus`, less the one of `minus`, is value ± sd."""
        row = np.zeros(n)
        row[list(plus)] = 1.0
        if minus is not None:
            row[minus] = -1.0
        normal[:] += np.outer(row, row) / sd**2
        right[:] += value * row / sd**2

    for (chunk, i, side), factor in factors.items():
        expect(float(np.log(factor)), SD_TRIAL, [2 * i + (side == "v"), texts[chunk]])
    for at in texts.values():
        expect(0.0, SD_TEXTS, [at])
    for i in range(n_layer):
        expect(0.0, SD_SIDES, [2 * i], 2 * i + 1)
        for at in (2 * i, 2 * i + 1) if i + 1 < n_layer else ():
            expect(0.0, SD_FIRST if i < 2 else SD_LAYERS, [at], at + 2)
    solved = np.exp(np.linalg.solve(normal, right))
    sides = {"k": solved[0 : 2 * n_layer : 2], "v": solved[1 : 2 * n_layer : 2]}
    return sides, {chunk: float(solved[at]) for chunk, at in texts.items()}


def evened(logs: F64) -> F64:
    """Means [layers, …] of each layer and its neighbours, which have half its weight: two texts are few for one layer.
    The first layer stays as it is."""
    others = np.concatenate([logs[1:2], logs[1:], logs[-1:]])
    means = logs.copy()
    means[1:] = (others[:-2] + 2.0 * others[1:-1] + others[2:]) / 4.0
    return means


#
# trials
#


class Noise:
    """Random errors of one layer's keys or values with the covariance of a planned quantizer's errors, (Σ⁻¹ + M/θ)⁻¹:
    Σ is the covariance of the rows, M the metric; θ sets the cost, which is equal in all directions."""

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
        """Energy in the stream if all rows are replaced by random ones, per query."""
        return float(sum(np.sum(weights) for weights in self.weights))

    def of(self, target: float) -> Callable[[int, Generator], F32]:
        """A function that draws n rows of noise with this energy: [n, n_head_kv, d]. Beyond `most` it is scaled."""
        gain, low, high = max(np.sqrt(target / self.most), 1.0), 1e-30, 1e30
        for _ in range(200):
            theta = float(np.sqrt(low * high))
            reached = sum(float(np.sum(w / (1.0 + w / theta))) for w in self.weights)
            low, high = (theta, high) if reached < target else (low, theta)

        def draw(n: int, rng: Generator) -> F32:
            heads = [
                (rng.standard_normal((n, len(w))) / np.sqrt(1.0 + w / theta)) @ to_row
                for w, to_row in zip(self.weights, self.maps, strict=True)
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
        """chunks: of more than n_recent + 2 SCORED + n_skip tokens. measured: by an earlier run. texts: one per chunk,
        if the chunks are to enter the calibration's moments, unless it names them already. on_decoded: called as tokens
        are decoded. folder: for temporary files; None: the system's. scope: layers to try.
        """
        self.folder, self.scope = folder, scope
        self.session, self.base, self.calibration, self.chunks = session, session.source.gguf, calibration, chunks
        self.texts = tuple(texts)
        self.window, self.latent = Window(calibration.n_skip, n_recent), mla.is_latent(self.base)
        self.measured = measured or Measurements.empty(calibration)
        self.measured.forget_entered(calibration, texts)
        self.on_decoded = on_decoded
        self.near = min(map(len, chunks)) - SCORED  # cells before the scored tokens of the shortest chunk
        self._grams: dict[int, Spill] = {}
        self.decoded_chunks: dict[int, DecodedChunk] = {}  # the longer ones and the latest

    def plan(self) -> list[tuple[int, int, str]]:
        """(chunk, index of the layer, side) of every trial; side "": measures rounding."""
        n = len(self.calibration.layers)
        trials = [(j % len(self.chunks), i, side) for j, (i, side) in enumerate(_trial_sides(n, self.scope.layers))]
        floors = [(0, i, "") for i in _floors(n)]
        return floors + sorted(trials, key=lambda trial: trial[0])

    @property
    def longer(self) -> list[int]:
        """Indices of the chunks so long that their sampled queries come after all cells of the shortest chunk."""
        return [c for c, tokens in enumerate(self.chunks) if (len(tokens) - CORRECTING) // 2 >= self.near]

    def steps(self, too_late: Callable[[int], bool] = lambda tokens: False) -> Iterator[int]:
        """Yields, after every step, the number of tokens that it decoded. `measured` can be saved between steps.

        too_late(n): whether n further tokens exceed the time limit; called after LEAST trials. Longer chunks matter
        more than further trials, so time is reserved for them.
        """
        tried = {(t.chunk, t.index, t.side) for t in self.measured.trials}
        for c, tokens in enumerate(self.chunks):
            trials = [(i, side) for chunk, i, side in self.plan() if chunk == c and (c, i, side) not in tried]
            if not trials and c in self.measured.done:
                continue
            reserved = sum(len(self.chunks[other]) for other in self.longer if other > c)
            if self._enough and too_late(len(tokens) + reserved):
                continue
            chunk = self.decode(c)
            yield len(tokens)
            for i, side in trials:
                if self._enough and too_late((1 + REPEATS) * SCORED + reserved):
                    break
                n_attempts = 1
                if side:
                    n_attempts = self._try(chunk, c, i, side)
                else:
                    self.measured.trials.append(Trial(c, i, "", self.rounding(chunk, c, i), 0.0))
                self.on_decoded(SCORED * n_attempts)
                yield SCORED * n_attempts
            del chunk  # frees its memory before the next one is decoded

    @property
    def _enough(self) -> bool:
        return len(self.measured.trials) >= LEAST

    def decode(self, c: int) -> DecodedChunk:
        """Decode a chunk, and add it to the matrices unless they have it. rows() of earlier chunks are lost."""
        self.decoded_chunks = {other: chunk for other, chunk in self.decoded_chunks.items() if other in self.longer}
        for longer_chunk in self.decoded_chunks.values():
            longer_chunk.spill(self.folder)
        longer = c in self.longer
        beginning = evenly_spaced(self.near // 2, self.near, QUERIES) if longer else ()
        n_scored = CORRECTING if longer else SCORED
        chunk = DecodedChunk(self.session, self.chunks[c], n_scored, self.latent, beginning, self.on_decoded)
        if c not in self.measured.done:
            self._accumulate(c, chunk)
        self.decoded_chunks[c] = chunk
        return chunk

    def _accumulate(self, c: int, chunk: DecodedChunk) -> None:
        """Add a chunk's first `near` cells to the matrices; of a longer chunk, also compute the energy ratios."""
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
        """residual.metrics() for rows of a layer; the weights are read once."""
        if self.latent:
            output, values = mla.read_weights(self.base, shape)
            gram = gram_of(output, shape.n_head)
            return lambda rows: metrics(rows, shape, gram, self.window, values, joint=True)
        n, d = shape.n_group, shape.d_v
        blocks = self._output_grams(shape).reshape(shape.n_head_kv, n, d, n, d)
        return lambda rows: metrics(rows, shape, lambda i, j: blocks[i // n, i % n, :, j % n], self.window)

    def _output_grams(self, shape: LayerShape) -> F32:
        """output_grams() of a layer. Every chunk needs them; the first layers' are stored, up to GRAMS bytes."""
        if shape.il in self._grams:
            return self._grams[shape.il].array()
        grams = output_grams(self.base, shape)
        if (len(self._grams) + 1) * grams.nbytes <= GRAMS:
            self._grams[shape.il] = Spill(self.folder, bytearray(), grams)
        return grams

    def _add_moments(self, chunk: DecodedChunk) -> None:
        """Add a chunk's cells to the moments. Every text has the same weight, because kinds of text differ more than
        the parts of one text."""
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
        if self.latent:  # a value is a part of its key, so an error changes both
            d = self.calibration.layers[i].shape.d_v
            metric[:, :d, :d] += self.measured.sums[i]["v0" if side == "k" else "k0"][:, :d, :d]
        return Noise(covariance, metric / self.measured.queries)

    def _noisy(self, chunk: DecodedChunk, i: int, side: str, draw: Callable[[int, Generator], F32], seed: int) -> F32:
        """The cells before the scored tokens, with noise except in the sinks, rounded to f16: [start, n_head_kv, d].

        Equal tokens in the first layer get equal noise, because their codes are equal.
        """
        il, coded = self.calibration.layers[i].shape.il, slice(self.window.n_sink, None)
        cells = chunk.view(il, side).astype(np.float32)
        values = chunk.view(il, "v")[coded].astype(np.float32)
        noise = draw(len(values), np.random.default_rng([seed, i]))
        if (kinds := equal_rows(values.reshape(len(values), -1))) is not None:
            order, starts = kinds
            noise[order] = noise[np.repeat(order[starts], np.diff(starts, append=len(order)))]
        cells[coded] += noise
        noisy: F32 = cells.astype(np.float16).astype(np.float32)
        return noisy

    def rounding(self, chunk: DecodedChunk, c: int, i: int) -> float:
        """The cost of rounding alone, nats per token: a trial with noise of energy TINY."""
        noise = self._noise(i, "v")
        cells = self._noisy(chunk, i, "v", noise.of(TINY * noise.most), c)
        return chunk.kld((self.calibration.layers[i].shape.il, "v"), cells, SCORED)

    def _try(self, chunk: DecodedChunk, c: int, i: int, side: str) -> int:
        """Measure the cost of noise in one layer's side. Returns the number of attempts."""
        shape = self.calibration.layers[i].shape
        noise, output = self._noise(i, side), output_weights(self.base, shape)
        rows = chunk.rows(shape.il, True).until(chunk.start + SCORED)
        exact = chunk.view(shape.il, side).astype(np.float32)
        max_energy = noise.most if side == "k" or self.latent else np.inf  # attention is linear in its values

        def noisy(target: float) -> tuple[F32, float]:
            """The cells with noise of about this energy, and its exact energy in the stream."""
            cells = self._noisy(chunk, i, side, noise.of(min(target, max_energy)), c)
            errors = {name: np.zeros_like(getattr(rows, name)) for name in ("kv" if self.latent else side)}
            for error in errors.values():  # a latent value is the first elements of its key
                n = min(error.shape[-1], exact.shape[-1])
                error[: chunk.start, :, :n] = (cells - exact)[..., :n]
            return cells, energy(rows, shape, output, errors.get("k"), errors.get("v"))

        guess, n_attempts = self._guess(c, i, side), 0
        target = FIRST * noise.most if guess is None else 2.0 * TARGET / guess
        cells, added = noisy(target)
        if i >= APART and guess is not None and added > 0.0 and not 1.0 / NEAR < added / target < NEAR:
            target *= target / added
            cells, added = noisy(target)
        while True:
            n_attempts += 1
            kld = chunk.kld((shape.il, side), cells, SCORED)
            in_range = LEAST_COST * TARGET < kld < MOST_COST * TARGET or (kld < TARGET and target >= max_energy)
            if in_range or n_attempts > REPEATS:
                break
            target *= min(TARGET / max(kld, TARGET / MOST_CHANGE), MOST_CHANGE)
            cells, added = noisy(target)
        self.measured.trials.append(Trial(c, i, side, kld, added))
        return n_attempts

    def _guess(self, c: int, i: int, side: str) -> float | None:
        """The factor (nats per half the energy) that the other trials predict; None without any."""
        measured = self.measured.factors()
        if not measured:
            return None
        factors, texts = smoothed(measured, len(self.calibration.layers))
        return float(factors[side][i]) * texts.get(c, 1.0)

    def result(self) -> Calibration:
        """The calibration with sensitivities, before the correction of predictions.

        Raises Unpredictable if noise in the cache does not change the model's output.
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
        """The calibration with the cells of the chunks in its moments, which adds kinds of text at no cost."""
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
    """Energies [len(SIDES)] in the stream of errors as large as keys and values. metric: of residual.metrics()."""
    return np.array([np.sum(metric[side] * _covariance(stats, side[0])) for side in SIDES])


def _order(n: int) -> list[int]:
    """All n layers: both ends, then the middle of every gap, so that the first few are evenly spaced over the depth."""
    order, gaps = [0, n - 1] if n > 1 else [0], [(0, n - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
