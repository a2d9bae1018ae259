"""The model of a conversation, in a terminal or over HTTP: the one of -m, or the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from runtime import demo
from runtime.options import gpu_layers, note
from subkv.base.errors import CacheError, concerning
from subkv.base.threads import default_threads
from subkv.engine.cache import AUTO, CODED, CacheOptions, f16_instead, or_of_weights
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.native.gguf import check_model_file

L = TypeVar("L", bound=Llama)


def open_coded(
    model: Path, n_gpu_layers: int, cache: CacheOptions, context: ContextOptions, kind: type[L], **more: Any
) -> L:
    """As open_llama, but `auto` is a coded cache, with bases of the weights, of every model that has a use for one."""
    with concerning(model="model_path"):
        check_model_file(model)
    wanted, why_not = or_of_weights(model, cache)
    try:
        llm = open_llama(model, n_gpu_layers, wanted, context, kind, **more)
    except CacheError as error:
        if why_not or wanted is cache or error.key != "kv_cache":
            raise
        wanted, why_not = f16_instead(cache, error)  # an architecture that the engine refuses
        llm = open_llama(model, n_gpu_layers, wanted, context, kind, **more)
    if why_not:
        note(why_not)
    return llm


def open_llama(
    model: Path | str | None,
    n_gpu_layers: int,
    cache: CacheOptions,
    context: ContextOptions,
    kind: type[L],
    **more: Any,
) -> L:
    """subkv.Llama for the flags; model None: the demo model.

    kind: Llama or a subclass; more: arguments of its constructor that no flag sets.
    """
    if not model:  # an ordinary cache asked for by name needs no bases
        coded = cache.type_v in (None, AUTO, CODED) and cache.bases is None
        model = demo.converted() if coded else demo.model_path()
    n_threads = default_threads(context.n_threads)
    more |= cache.arguments()
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
        **more,
    )
    llm.opened.check_text()
    return llm
