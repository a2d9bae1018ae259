"""What all experiments share: model, calibration, texts, and how a cache is scored against exact keys and values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from converter.scoring import F64, score
from research.experiments.grids import Rows
from research.float32.adaptive import ResearchLayout, loaded
from research.float32.caches import Cache, adaptive_cache, coded_cache, layer_coder, result, run
from research.float32.reference import Reference, attend
from subkv.base.progress import tracked
from subkv.format.bases import Bands, CodedLayer
from subkv.format.calibration import Calibration
from subkv.format.codec import F32
from subkv.native.gguf import Gguf
from subkv.plan import budget as layout
from subkv.plan.pipeline import Fit, Options

Visitor = Callable[[int, F32, F32, F32], None]  # (il, q [n_head, n, d], k, v [n_head_kv, n, d]), llama.cpp's frame
GROUP = layout.GROUP


@dataclass(frozen=True)
class Text:
    """Chunks of n_ctx tokens from the start of a file; long: one chunk for the experiment on length."""

    name: str
    chunks: list[tuple[int, ...]]
    long: tuple[int, ...]


@dataclass
class Lab:
    """texts: in-domain first. options: of the coded caches; kv_bits: their budget in bits per element."""

    base: Gguf
    calibration: Calibration
    reference: Reference
    texts: list[Text]
    options: Options
    kv_bits: float
    n_ctx: int
    n_threads: int
    stack: contextlib.ExitStack
    progress: bool = True
    _fits: dict[Options, Fit] = field(default_factory=dict)
    _loaded: list[tuple[ResearchLayout, tuple[CodedLayer, ...]]] = field(default_factory=list)

    def fit(self, **changes: Any) -> Fit:
        """Bases under `options` with some of them changed; fitted once."""
        options = dataclasses.replace(self.options, **changes)
        if options not in self._fits:
            self._fits[options] = Fit(self.base, self.calibration, options, self.progress)
        return self._fits[options]

    def coded(self) -> tuple[ResearchLayout, tuple[CodedLayer, ...]]:
        """The layout at kv_bits, in libsubkv and here."""
        if not self._loaded:
            fit = self.fit()
            plan, narrow = fit.plan(self.kv_bits), fit.narrow(self.kv_bits)
            layers, _ = fit.code(plan, narrow)
            where = loaded(self.base, fit.calibration, fit.settings, fit.account(plan, narrow), layers)
            self._loaded.append((self.stack.enter_context(where), layers))
        return self._loaded[0]

    def static(self, kv_bits: float | None = None, sides: str = "kv", name: str | None = None) -> Cache:
        bits = self.kv_bits if kv_bits is None else kv_bits
        return coded_cache(self.fit(), bits, sides, name or f"static {bits:.4g}")

    def adaptive(self, text: str, name: str | None = None) -> Cache:
        """The layout at kv_bits with adaptive bases; `text` is a value of --adapt."""
        cache = adaptive_cache(self.fit(), self.base, self.kv_bits, "kv", text, self.stack)
        return dataclasses.replace(cache, name=name or f"adaptive {text}")

    def planned(self, fit: Fit, plan: Sequence[Bands], name: str, n_recent: int) -> Cache:
        """A cache of bands of one's own. n_recent: of the window; what it costs is counted."""
        layers, _ = fit.code(plan)
        overhead = layout.Overhead(fit.overhead.context, dataclasses.replace(fit.settings.window, n_recent=n_recent))
        counted = layout.account(fit.heads, plan, overhead)
        return Cache(name, layer_coder(layers), counted.total, counted.rows, fit.settings.window.n_sink, n_recent)

    def measure(self, caches: Sequence[Cache], text: Text) -> Rows:
        """Rows as of research.evaluate, one per cache. The caches keep the scores of this text."""
        for cache in caches:
            cache.clear()
        run(self.reference, caches, text.chunks, self.n_threads, self.progress)
        return [result(cache, text.name, self.n_ctx, len(text.chunks)) for cache in caches]

    def divergence(self, tokens: Sequence[int], first: int, caches: Sequence[Cache]) -> Iterator[tuple[F64, F64, F64]]:
        """Per cache KLD and ln p of the tokens after `first`, exact and coded: three [n − first − 1] arrays."""
        targets = np.array(tokens[first + 1 :], dtype=np.int32)
        exact = self.reference.logits(tokens, first)[:-1]
        with ThreadPoolExecutor(self.n_threads) as pool:
            for cache in tracked(f"{len(tokens)} tokens", caches, "cache", self.progress):
                assert cache.coder is not None
                how = (cache.coder, cache.n_sink, cache.n_recent, cache.recent)
                logits = self.reference.coded_logits(tokens, first, *how)[:-1]
                scores = score(logits, targets, exact, pool, self.n_threads)
                yield np.concatenate(scores.kld), np.concatenate(scores.nll_base), np.concatenate(scores.nll)

    def visit(self, tokens: Sequence[int], visitor: Visitor) -> None:
        """Runs the model exactly and shows every layer's queries, keys and values."""
        order = self.reference.key_order

        def hook(il: int, q: Any, k: Any, v: Any, scale: float) -> Any:
            visitor(il, q[0].numpy()[:, :, order], k[0].numpy()[:, :, order], v[0].numpy())
            return attend(q, k, v, None, scale, 0, 0)

        with self.reference.hooked(hook):
            self.reference.logits(tokens, len(tokens) - 1)


def paired(one: Cache, other: Cache) -> tuple[float, float]:
    """Mean of KLD of `one` less that of `other` over the same tokens, and its standard error."""
    difference = np.concatenate(one.scores.kld) - np.concatenate(other.scores.kld)
    return float(difference.mean()), float(difference.std() / np.sqrt(max(1, len(difference) - 1)))
