"""The model of a conversation, in a terminal or over HTTP: the one of -m, or the demo model."""

from __future__ import annotations

from typing import Any, TypeVar

from runtime import demo
from runtime.options import gpu_layers
from subkv.base.threads import default_threads
from subkv.engine.cache import AUTO, CODED, CacheOptions
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama

L = TypeVar("L", bound=Llama)


def open_llama(
    model: str | None, n_gpu_layers: int, cache: CacheOptions, context: ContextOptions, kind: type[L], **more: Any
) -> L:
    """subkv.Llama for the flags; model None: the demo model.

    kind: Llama or a subclass; more: arguments of its constructor that no flag sets.
    """
    if not model:  # an ordinary cache asked for by name needs no bases
        coded = cache.type_v in (None, AUTO, CODED) and cache.bases is None
        model = str(demo.converted() if coded else demo.model_path())
    n_threads = default_threads(context.n_threads)
    more |= cache.window.asked()
    llm = kind(
        model,
        kv_cache=cache.kv_cache,
        type_k=cache.type_k,
        type_v=cache.type_v,
        bases=cache.bases,
        adapt=cache.adapt,
        sidecar=cache.sidecar,
        n_ctx=context.n_ctx,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=gpu_layers(n_gpu_layers),
        flash_attn=context.flash_attn,
        verbose=False,
        progress=True,
        **more,
    )
    llm.opened.check_text()
    return llm
