"""Rejects a context that does not fit in memory, with the sizes in the message, before it is allocated.

llama.cpp fills the cache with zeros, so with overcommitted memory the system would kill the process. The sizes are
exact: llama.cpp creates the context without allocating memory (`no_alloc`). That takes about as long as reading the
vocabulary, so it is done only if an upper bound does not fit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subkv.base.errors import CacheError, SubkvError
from subkv.engine.cache import MIB, CacheChoice, attached
from subkv.engine.stats import KVStats, context_stats
from subkv.native.binding import C, captured_log, native
from subkv.native.gguf import Gguf

FIT = "LLAMA_ARG_FIT"  # llama.cpp's variable; "off": no check
UNKNOWN = (1 << 63) - 1
N_SIMULATED = 1 << 18  # tokens; even with no_alloc, llama.cpp allocates 50 bytes per cell

_COMPUTE_LINE = re.compile(r"compute buffer size = +([\d.]+) MiB")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still allocate, including swap; None if unknown (subkv.h)."""
    n_bytes = int(native().subkv_available_memory(os.fsencode(proc), os.fsencode(cgroup)))
    return None if n_bytes == UNKNOWN else n_bytes


def require_memory(path: Path, choice: CacheChoice, params: Any, n_gpu_layers: int = 0, model: Any = None) -> None:
    """Reject a context that does not fit. Raises CacheError with the sizes.

    path: of the model; model: llama.cpp's handle if it is loaded already; params: llama_context_params. There is no
    check if layers are on a GPU (its memory is not counted) or if $LLAMA_ARG_FIT is off.
    """
    if _is_off() or (n_gpu_layers and C.llama_supports_gpu_offload()):
        return
    free = available_memory()
    numbers = _numbers_of_file(path) if model is None else _numbers_of_model(model)
    n_ctx = params.n_ctx or numbers.get("context_length", 0)
    if free is None or _bound(numbers, n_ctx, params.n_ubatch) <= free:
        return
    if free == 0:  # not even enough to compute the sizes
        raise CacheError("n_ctx", f"expected memory for a context of {n_ctx} tokens, found none available")
    sizes = needed(path, choice, params, n_ctx)
    total = sum(sizes.values())
    if total <= free:
        return
    rows = total - sizes["exact window"]
    fits = int(n_ctx * (1 - (total - free) / rows)) // 1024 * 1024 if rows else 0
    raise CacheError(
        "n_ctx",
        f"expected a context that fits in the {free / MIB:.0f} MiB of memory available, found {n_ctx} tokens "
        f"with {choice.name}: {_sum(sizes)}" + (f"; about {fits} tokens would fit" if fits > 0 else ""),
    )


def keeps_all_cells(swa_full: bool | None, choice: CacheChoice) -> bool:
    """Whether sliding layers keep all cells. swa_full: the user's; None: llama_cpp's default, but not beside coded
    layers.
    """
    return not choice.coded if swa_full is None else swa_full


def expected_params(arguments: Mapping[str, Any], choice: CacheChoice, flash_attn_type: int) -> Any:
    """llama_context_params of a future subkv.Llama, as far as they affect memory. arguments: of llama_cpp.Llama."""
    params = C.llama_context_default_params()
    params.n_ctx = arguments["n_ctx"]
    params.n_batch = min(arguments["n_ctx"] or arguments["n_batch"], arguments["n_batch"])
    params.n_ubatch = min(params.n_batch, arguments["n_ubatch"])
    params.type_k, params.type_v, params.flash_attn_type = choice.type_k, choice.type_v, flash_attn_type
    params.embeddings = arguments["embedding"]
    if params.embeddings:
        params.n_seq_max = 1 if choice.coded else min(params.n_batch, C.llama_max_parallel_sequences())
        params.kv_unified = True
    params.swa_full = keeps_all_cells(arguments["swa_full"], choice)
    return params


def require_beside(base: Gguf, choice: CacheChoice, params: Any, sizes: dict[str, float]) -> None:
    """Reject a model whose `sizes` and context do not fit in memory together. Raises SubkvError with the sizes.

    sizes: bytes by name, of weights that will be read into memory and of further memory. Otherwise as require_memory().
    """
    if _is_off():
        return
    free = available_memory()
    if free is None or sum(sizes.values()) + _bound(_numbers(base), params.n_ctx, params.n_ubatch) <= free:
        return
    sizes = sizes | needed(base.path, choice, params, params.n_ctx)
    if sum(sizes.values()) > free:
        raise SubkvError(
            "model",
            f"expected a model that fits in the {free / MIB:.0f} MiB of memory available, found {_sum(sizes)}",
        )


def _is_off() -> bool:
    return os.environ.get(FIT, "").lower() in ("off", "0", "false")


def _sum(sizes: Mapping[str, float]) -> str:
    """`weights 5 MiB + cells 1 MiB = 6 MiB`."""
    terms = " + ".join(f"{name} {size / MIB:.0f} MiB" for name, size in sizes.items() if size)
    return f"{terms} = {sum(sizes.values()) / MIB:.0f} MiB"


def _numbers(model: Gguf) -> dict[str, int]:
    """The metadata that bound a model's cache, if present."""
    arch = model.get("general.architecture")
    values = {name: model.get(f"{arch}.{name}") for name in ("block_count", "embedding_length", "context_length")}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def trained_context(path: Path) -> int:
    """The context for which a model was trained, or 0 if it is unknown."""
    return _numbers_of_file(path).get("context_length", 0)


def _numbers_of_file(path: Path) -> dict[str, int]:
    with Gguf(path, split=False) as file:
        return _numbers(file)


def _numbers_of_model(handle: Any) -> dict[str, int]:
    return {
        "block_count": C.llama_model_n_layer(handle),
        "embedding_length": C.llama_model_n_embd(handle),
        "context_length": C.llama_model_n_ctx_train(handle),
    }


def _bound(numbers: dict[str, int], n_ctx: int, n_ubatch: int) -> int:
    """Upper bound of a context's bytes: K and V in f32 with twice the model's width, for every layer and cell."""
    width = numbers.get("block_count", 1024) * numbers.get("embedding_length", 1 << 16)
    attention = 4 * 128 * n_ubatch * n_ctx  # logits of 128 heads
    return n_ctx * width * 16 + attention + 2048 * MIB


def needed(path: Path, choice: CacheChoice, params: Any, n_ctx: int) -> dict[str, float]:
    """Bytes of a context by purpose; 0 if it cannot be created (its real creation then reports the reason).

    Sizes beyond N_SIMULATED tokens are extrapolated from two smaller contexts, which does not overestimate them,
    because cache and compute buffers grow at least linearly.
    """
    if n_ctx <= N_SIMULATED:
        return _simulate(path, choice, params, n_ctx)
    half, whole = (_simulate(path, choice, params, n) for n in (N_SIMULATED // 2, N_SIMULATED))
    ratio = (n_ctx - N_SIMULATED) / (N_SIMULATED // 2)
    return {name: size + (size - half[name]) * ratio for name, size in whole.items()}


def simulated_cache(path: Path, choice: CacheChoice, n_ctx: int) -> KVStats | None:
    """The cache that programs would have for n_ctx tokens of one sequence; None if the context cannot be created.

    path: of a model with its weights, which are not read.
    """
    params = C.llama_context_default_params()
    params.type_k, params.type_v, params.swa_full = choice.type_k, choice.type_v, False
    params.n_ubatch = params.n_batch = 512
    return _simulated(path, choice, params, min(n_ctx, N_SIMULATED))[0]


def _simulate(path: Path, choice: CacheChoice, params: Any, n_ctx: int) -> dict[str, float]:
    """As needed(), from a context without allocated memory."""
    stats, compute = _simulated(path, choice, params, n_ctx)
    cells, window = (stats.bytes_kv - stats.bytes_window, stats.bytes_window) if stats is not None else (0, 0)
    return {"cells": float(cells), "exact window": float(window), "compute buffers": compute}


def _simulated(path: Path, choice: CacheChoice, params: Any, n_ctx: int) -> tuple[KVStats | None, float]:
    """The cache of a context without allocated memory, None if it cannot be created; bytes of its compute buffers."""
    with captured_log(forward=False):
        C.llama_backend_init()
    params = type(params).from_buffer_copy(params)
    params.n_ctx = n_ctx
    model_params = C.llama_model_default_params()
    model_params.no_alloc = True
    model_params.load_mode = C.LLAMA_LOAD_MODE_NONE
    model = context = None
    try:
        with captured_log(forward=False) as log, attached(choice):
            model = C.llama_model_load_from_file(os.fsencode(path), model_params)
            context = C.llama_init_from_model(model, params) if model else None
        if not context:
            return None, 0.0
        stats = context_stats(model, context, choice, log)
        sizes = [float(match[1]) for _, line in log if (match := _COMPUTE_LINE.search(line))]
        return stats, sum(sizes) * MIB
    finally:
        with captured_log(forward=False):
            if context:
                C.llama_free(context)
            if model:
                C.llama_model_free(model)
