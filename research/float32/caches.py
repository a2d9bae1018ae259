"""Caches under test in the float32 reference: how attention reads its rows through them, and the scores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from converter.scoring import Scores, score
from research.float32.adaptive import AdaptiveCoder, coded_sides, loaded
from research.float32.bound import bound_bits
from research.float32.reference import Coder, Reference
from subkv.base.progress import progress_bar
from subkv.engine.sliding import sliding_layers
from subkv.format.adapt import parse
from subkv.format.arrays import F16, F32
from subkv.format.bases import CodedHead, CodedLayer
from subkv.format.layout import Layout
from subkv.format.metadata import Account, heads_of
from subkv.format.recent import rounded
from subkv.native.gguf import Gguf
from subkv.plan import stock
from subkv.plan.latent import Fitted as Latent
from subkv.plan.pipeline import Fit


@dataclass
class Cache:
    """One row of the table. coder None: exact. bpe: everything counted; rows: coded rows alone. recent: coder of the
    exact window's recent rows, None: they are exact. sliding: coder of layers with a sliding window, None: exact.

    logits: of a chunk from its position on, where attention over the cells takes more than a coder.
    bound: bits per element at which the rate-distortion bound has the predicted KLD (bound.py).
    adaptive: the coder of adaptive bases; result() then counts their bits at `context` tokens.
    own: of a plan, the row of a file for this budget alone.
    """

    name: str
    coder: Coder | None
    bpe: float
    rows: float
    n_sink: int = 0
    n_recent: int = 0
    predicted: float | None = None
    scores: Scores = field(default_factory=Scores)
    adaptive: AdaptiveCoder | None = None
    context: int = 0
    bound: float | None = None
    logits: Callable[[Reference, Sequence[int], int], F32] | None = None
    recent: Coder | None = None
    sliding: Coder | None = None
    own: Cache | None = None

    def clear(self) -> None:
        """Forget the texts so far."""
        self.scores = Scores()
        if self.adaptive is not None:
            self.adaptive.clear()


def layer_coder(layers: Sequence[CodedLayer], sides: str = "kv") -> Coder:
    """A coder for coded layers. sides: which of k and v are coded; the others stay exact."""
    return _heads_coder({layer.shape.il: layer.heads for layer in layers}, sides)


def _heads_coder(heads: Mapping[int, tuple[CodedHead, ...]], sides: str) -> Coder:
    """The same for heads by layer."""

    def seen(il: int, k: F32, v: F32) -> tuple[F32, F32]:
        return coded_sides(k, v, heads[il], sides) if il in heads else (k, v)

    return seen


def recent_coder(fit: Fit) -> Coder | None:
    """A coder for recent rows in the window of `fit`; None: they are exact."""
    if fit.settings.window.recent_bits == 16:
        return None
    layers = zip(fit.calibration.layers, fit.layers, strict=True)
    return _recent_of({stats.shape.il: list(layer.mean) for stats, layer in layers if not isinstance(layer, Latent)})


def _recent_of(means: Mapping[int, Sequence[F16]]) -> Coder:
    def seen(il: int, k: F32, v: F32) -> tuple[F32, F32]:
        if il not in means:
            return k, v
        none = np.zeros(v.shape[-1], np.float16)
        keys = np.stack([rounded(rows, mean) for rows, mean in zip(k, means[il], strict=True)])
        return keys, np.stack([rounded(rows, none) for rows in v])

    return seen


def stock_coder(kind: str, sides: str = "kv") -> Coder:
    """A coder for one of llama.cpp's cache types."""

    def seen(il: int, k: F32, v: F32) -> tuple[F32, F32]:
        k = stock.round_trip(kind, k, keys=True) if "k" in sides else k
        return k, stock.round_trip(kind, v, keys=False) if "v" in sides else v

    return seen


def _exact(il: int, k: F32, v: F32) -> tuple[F32, F32]:
    return k, v


def stock_caches(kinds: Sequence[str], fit: Fit, sides: str, layers: str = "all") -> list[Cache]:
    """Rows for llama.cpp's types, each without and with the exact window of `fit`.

    layers: those that are quantized, "all", "full" (those with full attention) or "sliding".
    """
    window = fit.settings.window
    caches = []
    for kind in kinds:
        bits = stock.bits(kind)
        quantized = stock_coder(kind, sides)
        coder, sliding = (_exact if layers == "sliding" else quantized), (None if layers == "full" else quantized)
        predicted = None if layers == "sliding" else fit.stock_error(kind)
        caches.append(Cache(kind, coder, bits, bits, predicted=predicted, sliding=sliding))
        if window.n_sink + window.n_recent:
            all_bits = bits + fit.overhead.window_bits(fit.heads)
            ours = (window.n_sink, window.n_recent)
            held = recent_coder(fit)
            caches.append(Cache(f"{kind} + window", coder, all_bits, bits, *ours, recent=held, sliding=sliding))
    return caches


def coded(fit: Fit, kv_bits: float, derive: bool = False) -> tuple[tuple[CodedLayer, ...], Account]:
    """A layout at a budget, and its size. derive: as a plan of a file, from bases that all plans share."""
    plan, narrow = fit.plan(kv_bits), fit.narrow(kv_bits)
    layers, _ = fit.code(plan, narrow, derive)
    return layers, fit.account(plan, narrow)


def coded_cache(fit: Fit, kv_bits: float, sides: str, name: str | None = None, derive: bool = False) -> Cache:
    """Our row at a budget. derive: as of coded()."""
    layers, counted = coded(fit, kv_bits, derive)
    window = fit.settings.window
    predicted = fit.error(layers) if fit.calibration.sensitivity and sides == "kv" else None
    coder = layer_coder(layers, sides)
    name = name or f"subkv {kv_bits:g}{' plan' if derive else ''}"
    cache = Cache(name, coder, counted.total, counted.rows, window.n_sink, window.n_recent, predicted)
    cache.bound = None if predicted is None else bound_bits(fit, predicted)
    cache.recent = recent_coder(fit)
    return cache


def uncalibrated_cache(base: Gguf, kv_bits: float, sides: str) -> Cache:
    """A row of bases from the weights alone, in the layers with full attention, with their own window and context."""
    with Layout(base.path, kv_bits, derived=True, sliding=sliding_layers(base.path)) as layout:
        heads, described = heads_of(layout), layout.description
    bits, rows = described["bits_per_element"], described["bits_per_element_rows"]
    name, window = f"subkv {kv_bits:g} uncalibrated", (described["n_sink"], described["n_recent"])
    cache = Cache(name, _heads_coder(heads, sides), bits, rows, *window)
    if described["recent_bits"] != 16:
        cache.recent = _recent_of({il: [head.k.mean for head in of_layer] for il, of_layer in heads.items()})
    return cache


def adaptive_cache(fit: Fit, base: Gguf, kv_bits: float, sides: str, text: str, stack: contextlib.ExitStack) -> Cache:
    """Our row at a budget with bases that adapt. text: of --adapt. stack: closes the layout."""
    layers, counted = coded(fit, kv_bits)
    engine = stack.enter_context(loaded(base, fit.calibration, fit.settings, counted, layers))
    coder = AdaptiveCoder(engine, layers, sides, *parse(text))
    window = fit.settings.window.n_sink, fit.settings.window.n_recent
    name = f"subkv {kv_bits:g} adapt {text}"
    return Cache(name, coder, counted.total, counted.rows, *window, adaptive=coder, context=counted.context)


def run(
    reference: Reference, caches: Sequence[Cache], chunks: Sequence[Sequence[int]], n_threads: int, progress: bool
) -> None:
    """Score the second half of every chunk under every cache; the scores are added to the caches'."""
    with (
        ThreadPoolExecutor(n_threads) as pool,
        progress_bar("evaluate", len(chunks) * (len(caches) + 1), "chunk", progress) as bar,
    ):
        for chunk in chunks:
            first = len(chunk) // 2
            targets = np.array(chunk[first + 1 :], dtype=np.int32)
            base = reference.logits(chunk, first)[:-1]
            bar.update()
            for cache in caches:
                logits = base
                if cache.logits is not None:
                    logits = cache.logits(reference, chunk, first)[:-1]
                elif cache.coder is not None:
                    how = (cache.coder, cache.n_sink, cache.n_recent, cache.recent, cache.sliding)
                    logits = reference.coded_logits(chunk, first, *how)[:-1]
                cache.scores.add(score(logits, targets, base, pool, n_threads))
                bar.update()


def result(cache: Cache, text: str, n_ctx: int, chunks: int) -> dict[str, Any]:
    """One JSON object with runtime.perplexity's names. chunks_*: per adapting head and text, None if none adapts."""
    adaptive = cache.adaptive
    bits = adaptive.bits(cache.context) if adaptive else 0.0
    counts = ("opened", "refused", "merged")
    return {
        "name": cache.name,
        **cache.scores.summary(),
        "bpe": round(cache.bpe + bits, 4),
        "bpe_rows": round(cache.rows, 4),
        "bpe_adapt": round(bits, 4),
        "predicted_kld": cache.predicted,
        "bound_bpe": None if cache.bound is None else round(cache.bound, 4),
        **(cache.scores.kld_over(cache.own.scores) if cache.own else {}),
        **{f"chunks_{name}": round(adaptive.mean(f"n_{name}"), 3) if adaptive else None for name in counts},
        "n_sink": cache.n_sink,
        "n_recent": cache.n_recent,
        "text": text,
        "n_ctx": n_ctx,
        "chunks": chunks,
    }
