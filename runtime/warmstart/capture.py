"""Keys, values and last queries of whole prompts, decoded natively."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.shapes import F32
from runtime.warmstart.trained import HeadShape
from subkv.base.threads import default_threads
from subkv.engine.cache import choose_cache
from subkv.engine.model import Model
from subkv.engine.observer import PAUSE, SAMPLE, UBATCH, ObservedLayer, Observer


@dataclass(frozen=True, eq=False)
class Captured:
    """Rows of one prompt of T tokens, by layer, rotated: k [T, n_head_kv, d_k], v [T, n_head_kv, d_v], and q [n_last,
    n_head, d_k] of its last tokens. scale: what the layer multiplies q·k with."""

    k: list[F32]
    v: list[F32]
    q: list[F32]
    scale: list[float]

    @property
    def shapes(self) -> list[HeadShape]:
        return [HeadShape(k.shape[1], k.shape[2], v.shape[2]) for k, v in zip(self.k, self.v, strict=True)]


class Capture:
    """A model that shows what it computes for prompts. A context manager; a Model given is left open.

    Raises SubkvError for a model that cannot be run with an ordinary cache.
    """

    def __init__(self, model: Path | Model, n_ctx: int, n_threads: int | None = None) -> None:
        self.n_ctx = n_ctx
        with contextlib.ExitStack() as cleanup:
            self.model = model if isinstance(model, Model) else cleanup.enter_context(Model(str(model)))
            self._observer = Observer(0)
            cleanup.callback(self._observer.close)
            self._context = self.model.context(
                choose_cache(self.model.path, "f16"),
                n_ctx=n_ctx,
                n_batch=UBATCH,
                n_ubatch=UBATCH,
                n_threads=n_threads or default_threads(),
                observer=self._observer,
            )
            cleanup.callback(self._context.close)
            self._cleanup = cleanup.pop_all()

    def close(self) -> None:
        self._cleanup.close()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prompt(self, tokens: Sequence[int], n_last: int = 0) -> Captured:
        """Decode a prompt from position 0 and return its rows. n_last: tokens whose queries are wanted.

        Raises WarmStartError for an empty prompt, one longer than n_ctx, and a model whose layers do not all have
        ordinary attention; CacheError when it cannot be decoded.
        """
        n = len(tokens)
        if not 1 <= n <= self.n_ctx:
            raise WarmStartError("prompt", f"expected 1 to {self.n_ctx} tokens (the context), found {n}")
        self._context.clear()
        self._observer.forget()
        self._observer.mode(SAMPLE, range(n), range(n - min(n_last, n), n))
        try:
            for start in range(0, n, self._context.n_batch):
                piece = tokens[start : start + self._context.n_batch]
                self._context.decode(piece, start, len(piece))
            self._context.synchronize()
            return self._read(self._observer, n)
        finally:
            self._observer.mode(PAUSE)
            self._observer.forget()

    def _read(self, observer: Observer, n: int) -> Captured:
        layers = observer.layers()
        found = [layer.il for layer in layers]
        if not layers or found != list(range(layers[-1].il + 1)):
            raise WarmStartError("-m", f"expected attention in every layer, found it in {found}")

        def rows(layer: ObservedLayer, what: str) -> F32:
            return observer.get(layer, what).astype(np.float32)

        for layer in layers:
            if layer.n_key != n:
                raise WarmStartError("-m", f"layer {layer.il}: expected {n} rows, found {layer.n_key}")
        return Captured(
            k=[rows(layer, "ks") for layer in layers],
            v=[rows(layer, "vs") for layer in layers],
            q=[rows(layer, "qs") for layer in layers],
            scale=[layer.scale for layer in layers],
        )


def attention(q: F32, k: F32, v: F32, scale: float) -> F32:
    """[r, n_head, d_v]: attention of the last r of T tokens, q [r, n_head, d_k], over k and v [T, n_head_kv, d]."""
    r, n_head, _ = q.shape
    n_head_kv = k.shape[1]
    grouped = q.reshape(r, n_head_kv, n_head // n_head_kv, -1)
    logits = scale * np.einsum("rkgd,tkd->kgrt", grouped, k, optimize=True)
    n = len(k)
    logits += np.where(np.arange(n)[None] > np.arange(n - r, n)[:, None], -np.inf, 0.0)  # no token sees a later one
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: F32 = np.einsum("kgrt,tkd->rkgd", weights, v, optimize=True).reshape(r, n_head, -1)
    return out
