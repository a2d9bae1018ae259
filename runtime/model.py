"""Opens a program's model: the one of -m, or the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from runtime import demo
from runtime.options import gpu_layers, note
from subkv.base.errors import CacheError, concerning
from subkv.base.threads import default_threads
from subkv.engine.cache import AUTO, CODED, CacheOptions, f16_fallback, with_weight_bases
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.native.gguf import check_model_file

L = TypeVar("L", bound=Llama)


def open_coded(model: Path, n_gpu_layers: int, cache: CacheOptions, context: ContextOptions, kind: type[L]) -> L:
    """As open_llama, but `auto` means a coded cache, with bases derived from the weights if there are no others."""
    with concerning(model="model_path"):
        check_model_file(model)
    chosen, reason = with_weight_bases(model, cache)
    try:
        llm = open_llama(model, n_gpu_layers, chosen, context, kind)
    except CacheError as error:
        if reason or chosen is cache or error.key != "kv_cache":
            raise
        chosen, reason = f16_fallback(cache, error)  # the engine does not support the architecture
        llm = open_llama(model, n_gpu_layers, chosen, context, kind)
    if reason:
        note(reason)
    return llm


def open_llama(
    model: Path | str | None,
    n_gpu_layers: int,
    cache: CacheOptions,
    context: ContextOptions,
    kind: type[L],
) -> L:
    """Open `kind`, subkv.Llama or a subclass, as the flags request; model None: the demo model."""
    if not model:  # an ordinary cache needs no bases
        coded = str(cache.type_v).partition(":")[0] in ("None", AUTO, CODED) and cache.bases is None
        model = demo.converted() if coded else demo.model_path()
    n_threads = default_threads(context.n_threads)
    llm = kind(
        model,
        n_ctx=context.n_ctx,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        n_gpu_layers=gpu_layers(n_gpu_layers),
        flash_attn=context.flash_attn,
        verbose=False,
        progress=True,
        **cache.arguments(),
    )
    llm.loaded_model.check_text()
    return llm
