"""A vector for a prompt, which similar prompts share.

`tokens` averages the model's input embeddings, rows of one tensor: no part of the model is run. `hidden` averages the
last hidden states, which costs a prefill of its own, the very thing that a warm start wants to avoid. Neither is
centred: unrelated texts have cosines of 0.99, and only what differs from the mean of many prompts says anything
(summaries.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converter.scoring import F32, F64
from subkv.base.errors import SubkvError
from subkv.engine.context import decode_batch
from subkv.engine.model import Model
from subkv.native.binding import C, captured_log, last_log_error
from subkv.native.gguf import Gguf

TOKENS, HIDDEN = "tokens", "hidden"
TABLE = "token_embd.weight"
N_BATCH = 512

Embedder = Callable[[Sequence[int]], F32]  # tokens, one at least, to a vector [n] that is not centred


def embedder(kind: str, model: Model, n_threads: int = 1) -> Embedder:
    """Of a kind that a trained file names. Raises SubkvError for another one and for a file without embeddings; what it
    returns raises SubkvError for a prompt without tokens and for a vector that is not finite."""
    if kind not in (TOKENS, HIDDEN):
        raise SubkvError("embedding", f"expected {TOKENS} or {HIDDEN}, found {kind!r}")
    mean = input_mean(model.path) if kind == TOKENS else _hidden_mean(model, n_threads)

    def embed(tokens: Sequence[int]) -> F32:
        if not len(tokens):
            raise SubkvError("prompt", "expected at least one token, found none")
        vector = mean(tokens)
        if not np.isfinite(vector).all():
            raise SubkvError("embedding", "expected a finite vector, found NaN or infinity")
        return vector

    return embed


def input_mean(path: Path) -> Embedder:
    """Mean of the input embeddings of the model in a GGUF."""
    with Gguf(path) as base:
        table = base.matrix(TABLE, "warm starts compare prompts by it")

    def mean(tokens: Sequence[int]) -> F32:
        found, counts = np.unique(np.asarray(tokens), return_counts=True)
        if found[0] < 0 or found[-1] >= len(table.raw):
            raise SubkvError("prompt", f"expected tokens below {len(table.raw)}, found {found[-1]}")
        vector: F32 = (counts / counts.sum()).astype(np.float32) @ table.rows(found)
        return vector

    return mean


def _hidden_mean(model: Model, n_threads: int) -> Embedder:
    """Mean of the hidden states behind the last layer, each time in a context of its own."""
    n_embd: int = C.llama_model_n_embd(model.handle)

    def mean(tokens: Sequence[int]) -> F32:
        params = C.llama_context_default_params()
        params.n_ctx = len(tokens)
        params.n_batch = params.n_ubatch = min(N_BATCH, len(tokens))
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = n_threads
        params.embeddings, params.pooling_type = True, C.LLAMA_POOLING_TYPE_NONE
        with captured_log(forward=False) as log:
            handle = C.llama_init_from_model(model.handle, params)
            if not handle:
                raise SubkvError("embedding", last_log_error(log) or "the model gives no hidden states")
            batch = C.llama_batch_init(params.n_batch, 0, 1)
            try:
                return (total(handle, batch, tokens, params.n_batch) / len(tokens)).astype(np.float32)
            finally:
                C.llama_batch_free(batch)
                C.llama_free(handle)

    def total(handle: Any, batch: Any, tokens: Sequence[int], n_batch: int) -> F64:
        found = np.zeros(n_embd)
        for start in range(0, len(tokens), n_batch):
            n = len(piece := tokens[start : start + n_batch])
            decode_batch(handle, batch, piece, np.arange(start, start + n), [0] * n, np.ones(n, np.int8))
            found += np.ctypeslib.as_array(C.llama_get_embeddings(handle), (n, n_embd)).sum(0, dtype=np.float64)
        return found

    return mean
