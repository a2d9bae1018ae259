"""Measurements of the sensitivity stage: saved, resumed, and smoothed to factors of all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter.decoded_chunk import Unpredictable
from converter.residual import SIDES
from subkv.format.arrays import F32, F64
from subkv.format.calibration import Calibration, LayerStats, TextSource

AUDIBLE = 1.5  # times the cost of rounding: trials that cost less are ignored
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
