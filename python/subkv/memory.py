"""Refusing a context that does not fit in memory, with the arithmetic, before anything of it is allocated.

llama.cpp fills the cache with zeros when it makes it, so on a system that promises more memory than it has, a context
too large ends in the process being killed. What it would take is not estimated here: llama.cpp itself makes the context
without memory behind it (`no_alloc`) and says. That takes about as long as reading the vocabulary, so it is asked only
where a bound far above every real model does not fit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from subkv.cache import MIB, C, CacheChoice, CacheError, attached, captured_log, gguf_numbers
from subkv.stats import KVStats, context_stats

FIT = "LLAMA_ARG_FIT"  # llama.cpp's variable; "off": no check

_COMPUTE_LINE = re.compile(r"compute buffer size = +([\d.]+) MiB")


def available_memory() -> int | None:
    """Bytes that this process may still take, swap included; None where the system does not say.

    The least of what the machine has and what every enclosing control group (v2, v1) allows; file pages count as free.
    """
    try:
        system = _fields(Path("/proc/meminfo").read_text())
        found = [1024 * (system["MemAvailable"] + system["SwapFree"])]
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            try:
                limit, usage = ((group / name).read_text().strip() for name in names)
                status = _fields((group / "memory.stat").read_text())
            except OSError:  # not mounted here, or the root group of v2
                continue
            if limit != "max":
                total = "total_" if controllers else ""
                cached = status.get(f"{total}inactive_file", 0) + status.get(f"{total}active_file", 0)
                found.append(int(limit) - int(usage) + cached + 1024 * system["SwapFree"])
    return max(min(found), 0)


def _fields(text: str) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` by line."""
    words = (line.replace(":", " ").split() for line in text.splitlines())
    return {parts[0]: int(parts[1]) for parts in words if len(parts) > 1 and parts[1].isdigit()}


def require_memory(path: Path, choice: CacheChoice, params: Any, window: dict[str, Any], n_gpu_layers: int = 0) -> None:
    """Refuse a context that would not fit. Raises CacheError with the sum.

    params: llama_context_params; window: what attached() takes beside the choice. Devices' memory is not looked at:
    with layers on one nothing is refused, nor where $LLAMA_ARG_FIT is off.
    """
    if os.environ.get(FIT, "").lower() in ("off", "0", "false") or (n_gpu_layers and C.llama_supports_gpu_offload()):
        return
    free = available_memory()
    if free is None or _bound(path, params) <= free:
        return
    stats, compute = _simulate(path, choice, params, window)
    if stats is None or stats.bytes_kv + compute <= free:
        return
    parts = {
        "cells": stats.bytes_kv - stats.bytes_window,
        "exact window": stats.bytes_window,
        "compute buffers": compute,
    }
    listed = " + ".join(f"{name} {size / MIB:.0f} MiB" for name, size in parts.items() if size)
    fits = int((free - stats.bytes_window - compute) / stats.bytes_per_token) if stats.bytes_per_token else 0
    raise CacheError(
        "n_ctx",
        f"expected a context that fits in the {free / MIB:.0f} MiB of memory available, found {stats.n_cells} tokens "
        f"with {choice.name}: {listed} = {(stats.bytes_kv + compute) / MIB:.0f} MiB"
        + (f"; about {fits // 1024 * 1024} tokens would fit" if fits >= 1024 else ""),
    )


def _bound(path: Path, params: Any) -> int:
    """More bytes than a context can take: K and V in f32, twice as wide as the model, for every layer and cell."""
    number = gguf_numbers(path, "block_count", "embedding_length", "context_length")
    n_ctx = params.n_ctx or number.get("context_length", 0)
    width = number.get("block_count", 1024) * number.get("embedding_length", 1 << 16)
    attention = 4 * 128 * params.n_ubatch * n_ctx  # logits of 128 heads
    return n_ctx * width * 16 + attention + 2048 * MIB


def _simulate(path: Path, choice: CacheChoice, params: Any, window: dict[str, Any]) -> tuple[KVStats | None, int]:
    """Sizes of the cache, and of the compute buffers in bytes, of a context that is made without memory.

    None where it cannot be made: making it in earnest gives the reason.
    """
    C.llama_backend_init()
    model_params = C.llama_model_default_params()
    model_params.no_alloc = True
    model_params.load_mode = C.LLAMA_LOAD_MODE_NONE
    with captured_log(forward=False) as log, attached(choice, **window):
        model = C.llama_model_load_from_file(os.fsencode(path), model_params)
        context = C.llama_init_from_model(model, params) if model else None
    try:
        if not context:
            return None, 0
        stats = context_stats(model, context, choice, [line for _, line in log if line.startswith("llama_kv_cache")])
        sizes = [float(match[1]) for _, line in log if (match := _COMPUTE_LINE.search(line))]
        return stats, int(sum(sizes) * MIB)
    finally:
        with captured_log(forward=False):
            if context:
                C.llama_free(context)
            if model:
                C.llama_model_free(model)
