"""Caches of other projects, for the table of research.evaluate: their codecs, and policies that evict cells."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from research.evictions import keeping
from research.float32.caches import Cache, coded, layer_coder, recent_coder
from research.rivals import registry
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import Fit


def rival_caches(specs: Sequence[registry.Spec], fit: Fit, base: Gguf, sides: str) -> list[Cache]:
    """Rows for other projects' codecs, each with its own exact window and with that of `fit`, all counted.

    Raises SubkvError where a codec does not fit the model, or the window of `fit` is smaller than its tiles.
    """
    window, context = fit.settings.window, fit.overhead.context
    known = registry.knowledge(fit, base)
    rivals = [registry.rival(spec, known) for spec in specs]
    registry.check_window(specs, rivals, window.n_recent)
    caches = []
    for spec, codec in zip(specs, rivals, strict=True):
        rows = codec.row_bits + codec.table_bits / context
        own, ours = (codec.n_sink, codec.n_recent), (window.n_sink, window.n_recent)
        bits = rows + 16.0 * sum(own) / context
        caches.append(Cache(spec.text, registry.coder(codec, own[0], sides), bits, rows, *own))
        if sum(ours):
            bits = rows + fit.overhead.window_bits(fit.heads)
            coder = registry.coder(codec, ours[0], sides)
            caches.append(Cache(f"{spec.text} + window", coder, bits, rows, *ours, recent=recent_coder(fit)))
    return caches


def evicting_caches(specs: Sequence[keeping.Spec], fit: Fit, n_ctx: int) -> list[Cache]:
    """Rows for policies that evict cells, kept in f16 or in our cells. Raises SubkvError where too few are kept."""
    window, d = fit.settings.window, fit.calibration.layers[0].shape.d_k
    caches = []
    for spec in specs:
        keeping.budget(spec, n_ctx)
        if spec.kv_bits is None:
            cache = Cache(spec.text, None, keeping.bits(spec, 16.0, 0.0, d), 16.0)
        else:
            layers, counted = coded(fit, spec.kv_bits)
            bits = keeping.bits(spec, counted.rows, counted.total - counted.rows, d)
            cache = Cache(spec.text, layer_coder(layers), bits, counted.rows, window.n_sink, window.n_recent)
        cache.logits = functools.partial(
            keeping.logits, spec=spec, coder=cache.coder, n_sink=cache.n_sink, n_recent=cache.n_recent
        )
        caches.append(cache)
    return caches
