"""Results of the trials of sensitivities, saved and resumed, and the factors of all layers derived from them."""

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

AUDIBLE = 1.5  # times the cost of rounding: a trial that costs less shows nothing
NEGLIGIBLE = 1e-3  # nats: a smaller effect cannot be measured
UNPREDICTABLE = (
    "expected a model whose next tokens depend on its cache, found one that predicts the same with noise in it, as "
    "with random weights: nothing can be predicted"
)
MOMENTS = ("k2", "v2", "k1", "v1")  # members of LayerStats to which the measured cells are added

VERSION = 1  # of saved Measurements; increase it when metrics, noise or chunks change

# Standard deviations of logarithms: of a trial, between texts, layers, the first three, and a layer's sides
SD_TRIAL, SD_TEXTS, SD_LAYERS, SD_FIRST, SD_SIDES = 0.3, 0.5, 0.5, 4.0, 0.6


@dataclass(frozen=True)
class Trial:
    """Noise in one layer's side ("k" or "v"): its cost in nats of KLD per scored token, and energy, the exact squared
    norm that it adds to the residual stream. Side "": noise that is too small to matter."""

    chunk: int
    index: int
    side: str
    kld: float
    energy: float


@dataclass
class Measurements:
    """All measurements so far. sums: per layer residual.metrics(), over `queries` queries of the chunks `done`.

    moments: per layer sums over `cells` cells, named as the members of LayerStats, of the chunks `done` without those
    `entered`, whose cells are in the calibration already. stretches: per longer chunk, logarithms [layers, SIDES] of
    the energy that errors in cells add far into it over the energy that they add near its beginning. Matrices are
    float32, as in the calibration's file: 100 MB less for an 8B model.
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
        """Everything, to be saved."""
        numbers = [(t.chunk, t.index, " kv".index(t.side or " "), t.kld, t.energy) for t in self.trials]
        lists = {name: np.array(getattr(self, name), dtype=np.int64) for name in ("done", "entered")}
        lists["counts"] = np.array([self.queries, self.cells])
        stretches = {f"stretch.{chunk}": logs for chunk, logs in self.stretches.items()}
        own = [sums | moments for sums, moments in zip(self.sums, self.moments, strict=True)]
        parts = {f"{i}.{name}": part for i, layer in enumerate(own) for name, part in layer.items()}
        return {"trials": np.array(numbers).reshape(-1, 5)} | lists | stretches | parts

    @classmethod
    def restored(cls, arrays: Mapping[str, NDArray[Any]], calibration: Calibration) -> Measurements:
        """The measurements whose arrays() these are, with the same calibration. Raises numpy's errors for others."""
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
        """Forget the moments of those of the chunks' texts that the calibration names: it has their cells already.

        Raises ValueError for a calibration that names fewer than an earlier one.
        """
        named = [chunk for chunk, text in enumerate(texts) if text in calibration.texts]
        if not set(named) >= set(self.entered):
            raise ValueError(f"expected a calibration with the cells of {len(self.entered)} texts, found {len(named)}")
        if named != self.entered:  # all measured texts are: they were written with the result
            self.entered, self.cells = named, 0
            for moments in self.moments:
                for part in moments.values():
                    part[:] = 0.0

    @property
    def floor(self) -> float:
        """Cost of rounding alone, nats per token."""
        return max((t.kld for t in self.trials if not t.side), default=0.0)

    def factors(self) -> dict[tuple[int, int, str], float]:
        """Nats per half the energy, by chunk, layer and side, of the trials that are AUDIBLE."""
        floors = {t.index: t.kld for t in self.trials if not t.side}
        known = {}
        for t in self.trials:
            floor = float(np.interp(t.index, sorted(floors), [floors[i] for i in sorted(floors)])) if floors else 0.0
            if t.side and t.kld > max(AUDIBLE * floor, NEGLIGIBLE) and t.energy > 0.0:
                known[t.chunk, t.index, t.side] = 2.0 * (t.kld - floor) / t.energy
        return known


def _size(layer: LayerStats, side: str) -> tuple[int, ...]:
    d = layer.shape.d_k if side[0] == "k" else layer.shape.d_v
    return layer.shape.n_head_kv, d, d


def smoothed(factors: Mapping[tuple[int, int, str], float], n_layer: int) -> tuple[dict[str, F64], dict[int, float]]:
    """Factors of all layers, per side [n_layer], and of the texts, by chunk, from those of the trials, which are
    products of both: noise costs little in a text whose next tokens are certain.

    Their logarithms change little from one layer to the next, except in the first two, and between a layer's keys and
    values. Raises Unpredictable where none is known.
    """
    if not factors:
        raise Unpredictable("model", UNPREDICTABLE)
    texts = {chunk: 2 * n_layer + j for j, chunk in enumerate(sorted({chunk for chunk, _, _ in factors}))}
    n = 2 * n_layer + len(texts)
    normal, right = np.zeros((n, n)), np.zeros(n)

    def expect(value: float, sd: float, plus: Sequence[int], minus: int | None = None) -> None:
        """Adds an expected value of the sum of some logarithms, minus another one."""
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
    """Means [layers, …] with a layer's neighbours, which have half its weight, because two texts are few for one layer.
    The first layer is unchanged."""
    others = np.concatenate([logs[1:2], logs[1:], logs[-1:]])
    means = logs.copy()
    means[1:] = (others[:-2] + 2.0 * others[1:-1] + others[2:]) / 4.0
    return means
