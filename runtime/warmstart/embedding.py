"""A vector for a prompt, which similar prompts share.

`tokens` averages the model's input embeddings, rows of one tensor: no part of the model is run. `hidden` averages the
last hidden states, which costs a prefill of its own, the very thing that a warm start wants to avoid. Neither is
centred: unrelated texts have cosines of 0.99, and only what differs from the mean of many prompts says anything
(library.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.shapes import F32
from subkv.engine.model import decode_batch
from subkv.native.binding import C, captured_log, last_log_error
from subkv.native.gguf import Gguf

TOKENS, HIDDEN, CALLABLE = "tokens", "hidden", "callable"
TABLE = "token_embd.weight"
N_BATCH = 512


class Embedder(Protocol):
    """kind: what a trained file and a library remember of it."""

    kind: str

    def embed(self, tokens: Sequence[int]) -> F32:
        """[n], not centred, of at least one token. Raises WarmStartError."""

    def close(self) -> None:
        """Free what it holds; the model stays open."""


def embedder(
    kind: str | Callable[[Sequence[int]], Any], model_path: Path, model: Any = None, n_threads: int = 1
) -> Embedder:
    """`tokens`, `hidden` (of a loaded model: llama_model*) or any function from tokens to a vector.

    Raises WarmStartError for another kind, SubkvError for a file without embeddings.
    """
    if callable(kind):
        return Called(kind)
    if kind == TOKENS:
        return Tokens(model_path)
    if kind == HIDDEN and model is not None:
        return Hidden(model, n_threads)
    raise WarmStartError("embedding", f"expected {TOKENS}, {HIDDEN} or a function, found {kind!r}")


def _checked(vector: Any) -> F32:
    found = np.asarray(vector, dtype=np.float32)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise WarmStartError("embedding", f"expected a finite vector, found {list(found.shape)} or NaN")
    return found


def _some(tokens: Sequence[int]) -> None:
    if not len(tokens):
        raise WarmStartError("prompt", "expected at least one token, found none")


class Called:
    """A function of the caller's."""

    kind = CALLABLE

    def __init__(self, function: Callable[[Sequence[int]], Any]) -> None:
        self._function = function

    def embed(self, tokens: Sequence[int]) -> F32:
        _some(tokens)
        return _checked(self._function(tokens))

    def close(self) -> None:
        pass


class Tokens:
    """Mean of the model's input embeddings."""

    kind = TOKENS

    def __init__(self, model_path: Path) -> None:
        with Gguf(model_path) as base:
            self._table = base.matrix(TABLE, "warm starts compare prompts by it")

    def embed(self, tokens: Sequence[int]) -> F32:
        _some(tokens)
        found, counts = np.unique(np.asarray(tokens), return_counts=True)
        if found[0] < 0 or found[-1] >= len(self._table.raw):
            raise WarmStartError("prompt", f"expected tokens below {len(self._table.raw)}, found {found[-1]}")
        weights = (counts / counts.sum()).astype(np.float32)
        return _checked(weights @ self._table.rows(found))

    def close(self) -> None:
        pass


class Hidden:
    """Mean of the hidden states behind the last layer."""

    kind = HIDDEN

    def __init__(self, model: Any, n_threads: int) -> None:
        self._model = model
        self._n_threads = n_threads
        self._n_embd: int = C.llama_model_n_embd(model)

    def embed(self, tokens: Sequence[int]) -> F32:
        _some(tokens)
        params = C.llama_context_default_params()
        params.n_ctx = len(tokens)
        params.n_batch = params.n_ubatch = min(N_BATCH, len(tokens))
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = self._n_threads
        params.embeddings, params.pooling_type = True, C.LLAMA_POOLING_TYPE_NONE
        with captured_log(forward=False) as log:
            handle = C.llama_init_from_model(self._model, params)
            if not handle:
                raise WarmStartError("embedding", last_log_error(log) or "the model gives no hidden states")
            batch = C.llama_batch_init(params.n_batch, 0, 1)
            try:
                return self._mean(handle, batch, tokens, params.n_batch)
            finally:
                C.llama_batch_free(batch)
                C.llama_free(handle)

    def _mean(self, handle: Any, batch: Any, tokens: Sequence[int], n_batch: int) -> F32:
        total = np.zeros(self._n_embd)
        for start in range(0, len(tokens), n_batch):
            piece = tokens[start : start + n_batch]
            n = len(piece)
            decode_batch(handle, batch, piece, np.arange(start, start + n), [0] * n, np.ones(n, np.int8))
            total += np.ctypeslib.as_array(C.llama_get_embeddings(handle), (n, self._n_embd)).sum(0, dtype=np.float64)
        return _checked(total / len(tokens))

    def close(self) -> None:
        pass
