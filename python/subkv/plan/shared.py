"""Layers that share the K and V rows of an earlier layer (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from subkv.native.gguf import Base


def owner(base: Base, il: int) -> int:
    """The layer whose rows this layer attends to, usually itself.

    As in llama.cpp: all layers after the last one with rows read that one, or with a sliding window the one before it.
    """
    arch = base.get("general.architecture")
    pattern, period = base.get(f"{arch}.attention.sliding_window_pattern"), 5
    if arch == "gemma3n":
        n_own = 20
    elif arch == "gemma4":
        shared = base.get(f"{arch}.attention.shared_kv_layers")
        n_own = int(base.get(f"{arch}.block_count") or 0) - (shared if isinstance(shared, int) else 0)
    else:
        return il
    if isinstance(pattern, list):
        slides = il < len(pattern) and bool(pattern[il])
    else:
        slides = il % (pattern or period) < (pattern or period) - 1
    return il if il < n_own else n_own - (2 if slides else 1)


def readers(base: Base, il: int) -> list[int]:
    """All layers that attend to the rows of this one, itself first."""
    n_layer = int(base.get(f"{base.get('general.architecture')}.block_count") or 0)
    return [il, *(later for later in range(il + 1, n_layer) if owner(base, later) == il)]
