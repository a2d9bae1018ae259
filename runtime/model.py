"""Opens a program's model: the one of -m, or the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from runtime import demo
from runtime.options import gpu_layers
from subkv.base.threads import default_threads
from subkv.engine.announced import unannounced
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.engine.request import CacheRequest
from subkv.native.bases import AUTO, CODED

L = TypeVar("L", bound=Llama)


def open_llama(
    model: Path | str | None,
    n_gpu_layers: int,
    cache: CacheRequest,
    context: ContextOptions,
    kind: type[L],
    swa_full: bool = False,
) -> L:
    """Open `kind`, subkv.Llama or a subclass, as the flags request; model None: the demo model.

    swa_full: as of llama.cpp's programs, whose default differs from llama_cpp's. The program prints a line about the
    cache.
    """
    if not model:  # an ordinary cache needs no bases
        coded = str(cache.type_v).partition(":")[0] in ("None", AUTO, CODED) and cache.bases is None
        model = demo.usable() if coded else demo.model_path()
    n_threads = default_threads(context.n_threads)
    with unannounced():
        llm = kind(
            model,
            n_ctx=context.n_ctx,
            n_batch=context.n_batch,
            n_ubatch=context.n_ubatch,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            n_gpu_layers=gpu_layers(n_gpu_layers),
            flash_attn=context.flash_attn,
            swa_full=swa_full,
            verbose=False,
            progress=True,
            **cache.arguments(),
        )
    llm.loaded_model.check_text()
    return llm
