"""llama.cpp's context shift: removes tokens in the middle of a text and shifts the later ones."""

from __future__ import annotations

from subkv.base.errors import CacheError, SubkvError
from subkv.native.binding import C, last_error, llama_cpp


def require(llm: llama_cpp.Llama, key: str) -> None:
    """Raises SubkvError about `key` if the model or the cache of a subkv.Llama cannot shift."""
    context = llm._ctx
    plain = context.memory is not None and context.checkpoints is None
    if not plain or not C.llama_memory_can_shift(context.memory):
        raise SubkvError(
            key,
            "expected a model and a cache whose positions can move, found others (recurrent state, positions of "
            "several numbers, or adaptive bases); omit it",
        )


def discard(llm: llama_cpp.Llama, n_keep: int, n_discard: int, logits_all: bool) -> None:
    """Llama.discard(); the calling thread must have the context exclusively. Raises CacheError."""
    context, n, n_remaining = llm._ctx, llm.n_tokens, llm.n_tokens - n_discard
    if n_keep < 0 or not 0 < n_discard <= n - n_keep:
        raise CacheError("n_discard", f"expected tokens after {n_keep} of {n} in the context, found {n_discard}")
    if context.checkpoints is not None:
        raise CacheError("n_discard", "expected a model that can remove tokens, found one with recurrent state")
    ids = llm.input_ids[n_keep + n_discard : n].copy()
    llm.n_tokens = 0  # an error leaves an empty context
    if not (context.kv_cache_seq_rm(0, n, -1) and context.kv_cache_seq_rm(0, n_keep, n_keep + n_discard)):
        raise CacheError("n_discard", last_error() or "expected a cache that can remove tokens, found another")
    context.kv_cache_seq_shift(0, n_keep + n_discard, n, -n_discard)
    llm.input_ids[n_keep:n_remaining] = ids
    if logits_all:
        llm.scores[n_keep:n_remaining] = llm.scores[n_keep + n_discard : n].copy()
    llm.n_tokens = n_remaining
