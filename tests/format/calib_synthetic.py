"""Random calibration statistics and a numpy engine, for the converter's tests. Nothing here needs a native library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subkv.engine.observer import ACCUMULATE, SAMPLE, ObservedLayer
from subkv.format.calibration import (
    Calibration,
    LayerSensitivity,
    LayerShape,
    LayerStats,
    Sensitivity,
    TextSource,
)

F64 = NDArray[np.float64]
DEMO_SHAPE = {"n_head": 4, "n_head_kv": 2, "d_k": 32, "d_v": 32}


def random_moment(rng: np.random.Generator, d: int, decay: float = 3.0) -> F64:
    """Second moment [d, d] with a spectrum that falls by e^-decay over its length, in random directions."""
    vectors, _ = np.linalg.qr(rng.standard_normal((d, d)))
    spectrum = np.exp(-decay * np.arange(d) / d) * rng.uniform(0.5, 2.0, d)
    return (vectors * spectrum) @ vectors.T


def draw(rng: np.random.Generator, moment: F64, n: int) -> F64:
    """n Gaussian rows [n, d] with the given second moment."""
    values, vectors = np.linalg.eigh(moment)
    return rng.standard_normal((n, len(moment))) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T


def random_layer(il: int, seed: int, samples: int = 32, **shape: Any) -> LayerStats:
    """Statistics of one layer from Gaussian data; samples = 0: a layer without sampled rows."""
    rng = np.random.default_rng([seed, il])
    dims = LayerShape(il=il, scale=float(np.float32(1.0 / np.sqrt(32))), tokens=1000, **{**DEMO_SHAPE, **shape})
    k2, q2 = (np.stack([random_moment(rng, dims.d_k) for _ in range(dims.n_head_kv)]) for _ in range(2))
    v2 = np.stack([random_moment(rng, dims.d_v) for _ in range(dims.n_head_kv)])
    keys = np.stack([draw(rng, moment, samples) for moment in k2], axis=1)
    values = np.stack([draw(rng, moment, samples) for moment in v2], axis=1)
    queries = np.stack([draw(rng, q2[h // dims.n_group], samples) for h in range(dims.n_head)], axis=1)
    zeros_k, zeros_v = np.zeros((dims.n_head_kv, dims.d_k)), np.zeros((dims.n_head_kv, dims.d_v))
    rows = [x.astype(np.float16) for x in (keys, values, queries)]
    return LayerStats(dims, k2, q2, v2, zeros_k, zeros_k, zeros_v, *rows)


def with_key_means(layer: LayerStats, size: float) -> LayerStats:
    """The same keys around means with elements of this size."""
    rng = np.random.default_rng([layer.shape.il, 77])
    mean = size * rng.standard_normal(layer.k1.shape)
    k2 = layer.k2 + mean[:, :, None] * mean[:, None, :]
    return replace(layer, k1=mean, k2=k2, ks=(layer.ks.astype(np.float64) + mean).astype(np.float16))


def random_calibration(n_layer: int = 2, seed: int = 0, samples: int = 32, **overrides: Any) -> Calibration:
    """A whole calibration; overrides: fields of Calibration or of LayerShape."""
    fields: dict[str, Any] = {
        "arch": "llama",
        "name": "tiny",
        "block_count": n_layer,
        "n_ctx": 4096,
        "n_skip": 4,
        "tokens": 1000,
        "texts": (TextSource("a.txt", "0" * 64, 12345),),
        "model_sha256": "1" * 64,
        "generator": "test",
    }
    shape = {key: overrides.pop(key) for key in list(overrides) if key not in fields}
    layers = tuple(random_layer(il, seed, samples, **shape) for il in range(n_layer))
    return Calibration(**{**fields, **overrides}, layers=layers)


class FakeSession:
    """An engine in numpy: queries, keys and values are fixed functions of token, position, layer and head.

    Every byte of text is a token. nonfinite: positions whose rows count as NaN. Records the decoded batches.
    """

    arch, name, block_count = "llama", "tiny", 2

    def __init__(self, n_skip: int = 4, bos: int | None = 1, nonfinite: Sequence[int] = (), **shape: Any) -> None:
        self.n_skip, self.bos, self.nonfinite = n_skip, bos, set(nonfinite)
        self.dims = {**DEMO_SHAPE, **shape}
        self.batches: list[tuple[int, int]] = []
        self.modes: list[int] = []
        self.interrupt_after: int | None = None
        self._mode: tuple[int, set[int], set[int]] = (0, set(), set())
        self._rows: dict[tuple[int, str], list[F64]] = {}
        self._bad = 0
        self._decoded = 0

    def tokenize(self, text: bytes, special: bool = False) -> list[int]:
        return list(text)

    def mode(self, mode: int, key_pos: Sequence[int] = (), query_pos: Sequence[int] = ()) -> None:
        self.modes.append(mode)
        self._mode = (mode, set(key_pos), set(query_pos))

    def clear(self) -> None:
        self._decoded = 0

    def decode(self, tokens: Sequence[int], first_pos: int) -> None:
        assert first_pos == self._decoded, "chunks start from an empty cache and are decoded in order"
        self._decoded += len(tokens)
        self.batches.append((first_pos, len(tokens)))
        if self.interrupt_after is not None and len(self.batches) > self.interrupt_after:
            raise KeyboardInterrupt
        mode, key_pos, query_pos = self._mode
        for pos, token in enumerate(tokens, start=first_pos):
            if pos < self.n_skip or mode not in (ACCUMULATE, SAMPLE):
                continue
            if pos in self.nonfinite:
                self._bad += 1
                continue
            for il in range(self.block_count):
                for kind, row in zip("qkv", self.row(il, token, pos), strict=True):
                    is_recorded = mode == ACCUMULATE or pos in (query_pos if kind == "q" else key_pos)
                    if is_recorded:
                        self._rows.setdefault((il, kind if mode == ACCUMULATE else kind + "s"), []).append(row)

    def row(self, il: int, token: int, pos: int) -> tuple[F64, F64, F64]:
        """q [n_head, d_k], k [n_head_kv, d_k], v [n_head_kv, d_v] of one token."""
        d = self.dims
        rng = np.random.default_rng([il, token, pos])
        fade = np.exp(-np.arange(d["d_k"]) / 10.0)
        q = rng.standard_normal((d["n_head"], d["d_k"])) * fade
        k = rng.standard_normal((d["n_head_kv"], d["d_k"])) * fade + 0.3
        return q, k, rng.standard_normal((d["n_head_kv"], d["d_v"])) * np.exp(-np.arange(d["d_v"]) / 20.0)

    def layers(self) -> list[ObservedLayer]:
        def count(il: int, kind: str) -> int:
            return len(self._rows.get((il, kind), []))

        return [
            ObservedLayer(
                il,
                scale=0.25,
                n_tokens=count(il, "k"),
                n_key=count(il, "ks"),
                n_query=count(il, "qs"),
                n_nonfinite=self._bad,
                **self.dims,
            )
            for il in range(self.block_count)
        ]

    def get(self, layer: ObservedLayer, what: str) -> F64:
        d = layer.d_v if what[0] == "v" else layer.d_k
        heads = layer.n_head if what[0] == "q" else layer.n_head_kv
        if what.endswith("s"):
            rows = self._rows.get((layer.il, what), [])
            return np.array(rows).reshape(len(rows), heads, d)
        rows = self._rows[layer.il, what[0]]
        stacked = np.array(rows).reshape(len(rows), layer.n_head_kv, -1, d)  # the group's heads side by side
        if what.endswith("1"):
            return stacked.mean(axis=(0, 2))
        return np.einsum("thgi,thgj->hij", stacked, stacked) / (stacked.shape[0] * stacked.shape[2])


def text_bytes(n: int, seed: int = 0) -> bytes:
    """n printable ASCII bytes with line ends."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(32, 127, n).astype(np.uint8)
    letters[60::61] = 10
    return letters.tobytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sensitive(n_layer: int = 3, **shape: Any) -> Calibration:
    """Random statistics with random sensitivities, two decades apart from layer to layer."""
    calibration = random_calibration(n_layer, **shape)
    rng = np.random.default_rng(1)

    def moments(il: int, heads: int, d: int) -> Any:
        return 0.1 * 100.0**-il * np.stack([random_moment(rng, d) for _ in range(heads)])

    layers = []
    for stats in calibration.layers:
        il, heads, d_k, d_v = stats.shape.il, stats.shape.n_head_kv, stats.shape.d_k, stats.shape.d_v
        k, k0, v, v0 = (moments(il, heads, d) for d in (d_k, d_k, d_v, d_v))
        layers.append(replace(stats, sensitivity=LayerSensitivity(k=k, v=v, k0=k0, v0=v0)))
    return replace(calibration, layers=tuple(layers), sensitivity=Sensitivity("fisher", 1000, 128, 2048))
