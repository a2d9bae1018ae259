"""`subkv.Llama`: llama_cpp.Llama whose KV cache can hold coefficients.

    llm = subkv.Llama("model.subkv.gguf", n_ctx=8192)            # kv_cache="auto": the file carries bases
    llm = subkv.Llama("model.gguf", bases="bases.gguf")          # bases from a sidecar
    llm = subkv.Llama("model.gguf", kv_cache="q8_0")             # llama.cpp's own cache types work too

Differences to the parent class, all of them wanted: unknown keyword arguments are errors, flash attention is "auto" as
on llama.cpp's command line (llama_cpp's default disables it, and then a quantized V cache fails without a reason),
failures carry the native reason, and a state without logits_all does not copy unused logits.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subkv.cache import (
    C,
    CacheChoice,
    CacheError,
    StateError,
    SubkvError,
    attached,
    captured_log,
    check_model_file,
    choose_cache,
    creation_error,
    flash_attention,
    internals,
    last_error,
    last_log_error,
    llama_cpp,
)
from subkv.progress import loading
from subkv.stats import AdaptStats, KVStats, adapt_stats, cache_line, context_stats

__all__ = ["CacheError", "KVStats", "Llama", "StateError", "SubkvError"]


class _Context(internals.LlamaContext):
    """A context that refuses what its cache cannot do instead of aborting the process at the next decode."""

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        if not C.llama_memory_can_shift(self.memory):
            raise CacheError(
                "kv_cache_seq_shift",
                "expected a cache whose cells can move, found coded cells (their bases live after RoPE); "
                "evaluate the shifted tokens again or use kv_cache='f16'",
            )
        super().kv_cache_seq_shift(seq_id, p0, p1, shift)


class Llama(llama_cpp.Llama):
    """llama_cpp.Llama with a choice of KV cache.

    kv_cache: "auto" (coefficients when `bases` or the model file carries them, else f16), "subkv", or llama.cpp's own
        ("f16", "q8_0", "q4_0", …) for K and V. type_k and type_v set the two apart and take names or ggml's numbers.
    bases: a converted GGUF or a sidecar made for this model; default: the model file itself.
    n_sink, n_recent: exact window in tokens; default: what the layout says. n_rollback: exact rows kept beyond n_recent
        so that a tail of that many tokens can be removed without evaluating anything again; default 32.
    adapt: bases that follow the text, of keys, values or both: "v", "kv,length=256" (subkv.adapt.Adapt has the fields).
    flash_attn: "auto", "on"/True, "off"/False.
    progress: a bar on stderr, if that is a terminal, while the model is loaded.

    Raises SubkvError (CacheError, …) with one sentence that starts with the argument it concerns; TypeError for unknown
    keyword arguments.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_cache: str = "auto",
        bases: str | os.PathLike[str] | None = None,
        n_sink: int | None = None,
        n_recent: int | None = None,
        n_rollback: int | None = None,
        adapt: str | None = None,
        flash_attn: str | bool | None = "auto",
        type_k: str | int | None = None,
        type_v: str | int | None = None,
        progress: bool = False,
        **kwargs: Any,
    ) -> None:
        known = inspect.signature(llama_cpp.Llama.__init__).parameters
        unknown = sorted(name for name in kwargs if name not in known or name in ("self", "kwargs"))
        if unknown:
            raise TypeError(f"Llama: unknown keyword argument{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}")
        path = check_model_file(model_path, "model_path")
        choice = choose_cache(path, kv_cache, None if bases is None else Path(bases), type_k, type_v)
        self._flash_attn_type = flash_attention(flash_attn, choice)
        self._given = {
            "kv_cache": choice.name if choice.coded else "f16",
            "bases": None if bases is None else os.fspath(bases),
            "n_sink": n_sink,
            "n_recent": n_recent,
            "n_rollback": n_rollback,
            "adapt": adapt,
            "flash_attn": flash_attn,
            "progress": progress,
        }
        verbose = bool(kwargs.get("verbose", True))
        with captured_log(forward=verbose) as log, attached(choice, n_sink, n_recent, n_rollback, adapt):
            try:
                with loading(path, progress) as self._progress_callback:
                    super().__init__(os.fspath(path), type_k=choice.type_k, type_v=choice.type_v, **kwargs)
            except ValueError as error:
                raise creation_error(error, choice, log) from error
        self._ctx.__class__ = _Context
        self._choice = choice
        self._kv_log = [line for _, line in log if line.startswith("llama_kv_cache")]
        if verbose:
            print(cache_line(self.kv_stats()), file=sys.stderr)

    scores: Any  # [n_ctx or n_batch, n_vocab] f32 of the parent

    @property
    def model_params(self) -> Any:
        """The model's parameters. The parent knows no progress callback: setting them puts ours in."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.progress_callback = self._progress_callback
        self._model_params = params

    @property
    def context_params(self) -> Any:
        """The context's parameters. The parent knows flash attention only on or off: each read puts the choice in."""
        params = self._context_params
        params.flash_attn_type = self._flash_attn_type
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params

    @property
    def cache_choice(self) -> CacheChoice:
        """Names and ggml types of this context's cache."""
        return self._choice

    def kv_stats(self) -> KVStats:
        """Sizes of the KV cache as allocated, in bytes, and what it would take as f16."""
        return context_stats(self._model.model, self._ctx.ctx, self._choice, self._kv_log)

    def adapt_stats(self) -> list[AdaptStats]:
        """Per layer and side, what became of bases that follow the text; empty where none do."""
        return adapt_stats(self._ctx.ctx, C.llama_model_n_layer(self._model.model))

    def fingerprint(self) -> str | None:
        """What a saved state is bound to: SHA-256 over layout and bases; None for an ordinary cache."""
        return self.kv_stats().fingerprint

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the current position (`n_tokens`).

        Cells beyond that position are removed first. Where the cache cannot remove them (the tail is longer than the
        exact rows kept for it), everything before it is evaluated again, so the result is the same either way.
        """
        if not self._drop_tail():
            tokens = [*self.input_ids[: self.n_tokens].tolist(), *tokens]
            self.reset()
            self._ctx.kv_cache_clear()
        if self.n_tokens + len(tokens) > self._n_ctx:
            raise CacheError(
                "n_ctx", f"expected at most {self._n_ctx} tokens in the context, found {self.n_tokens + len(tokens)}"
            )
        super().eval(tokens)

    def _drop_tail(self) -> bool:
        return self._ctx.memory is None or self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)

    def save_state(self) -> llama_cpp.LlamaState:
        """A copy of the context for load_state, bound to the cache type and to the layout's fingerprint."""
        scores = self.scores
        if not self._logits_all:
            self.scores = scores[:0]  # logits are only kept with logits_all; without it they are megabytes of nothing
        try:
            state = super().save_state()
        finally:
            self.scores = scores
        state.cache = self._cache_identity()
        return state

    def _cache_identity(self) -> dict[str, str | None]:
        stats = self.kv_stats()
        return {"type_k": stats.type_k, "type_v": stats.type_v, "fingerprint": stats.fingerprint}

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restore what save_state returned.

        Raises StateError with the reason when the state belongs to another layout, cache type, model or context size.
        The context is then unchanged or empty, never half restored.
        """
        if state.n_tokens > self._n_ctx:
            raise StateError("state", f"expected at most {self._n_ctx} tokens, found {state.n_tokens}")
        own = self._cache_identity()
        saved = getattr(state, "cache", own)  # absent in states of the parent class: the native check has the last word
        for key, expected in own.items():
            if saved.get(key) != expected:
                raise StateError("state", f"{key}: expected {expected}, found {saved.get(key)}")
        data = (ctypes.c_uint8 * len(state.llama_state)).from_buffer_copy(state.llama_state)
        with captured_log(forward=self.verbose) as log:
            done = C.llama_state_set_data(self._ctx.ctx, data, len(state.llama_state))
        if done != len(state.llama_state):
            reason = last_log_error(log) or last_error() or f"read {done} of {len(state.llama_state)} bytes"
            self.reset()
            self._ctx.kv_cache_clear()
            raise StateError("state", reason)
        self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        self.n_tokens = state.n_tokens
        self._requires_eval = True
        self._seed = state.seed
        if self._logits_all:
            rows = min(state.n_tokens, state.scores.shape[0])
            self.scores[:rows] = state.scores[:rows]
            self.scores[rows:] = np.float32(0)

    def close(self) -> None:
        """Free context and model now. Safe to call twice and on an object whose construction failed."""
        if "_stack" not in self.__dict__:
            return
        if self.verbose or sys.is_finalizing():
            super().close()
            return
        with captured_log(forward=False):  # llama.cpp reports its buffer sizes on the way out
            super().close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__() | self._given
        if self._choice.coded:
            del state["type_k"], state["type_v"]
        return state
