"""One model, several contexts: the low-level side of perplexity and bench.

subkv.Llama ties a model to one context; the measuring programs compare cache types on the same weights in one process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from subkv.base.errors import CacheError, ModelFileError, SubkvError
from subkv.base.progress import loading
from subkv.engine.cache import CacheChoice, attached, check_model_file, choose_cache, creation_error, flash_attention
from subkv.engine.memory import require_memory
from subkv.engine.stats import KVStats, context_stats
from subkv.format import adapt as adaptive
from subkv.native.binding import C, captured_log, last_error, last_log_error

if TYPE_CHECKING:
    from subkv.engine.observer import Observer

Logits = npt.NDArray[np.float32]


class Model:
    """A loaded GGUF. Close it after its contexts."""

    def __init__(self, path: str, n_gpu_layers: int = 0, key: str = "-m") -> None:
        self.path = check_model_file(path, key)
        self.n_gpu_layers = n_gpu_layers
        C.llama_backend_init()
        params = C.llama_model_default_params()
        params.n_gpu_layers = 0x7FFFFFFF if n_gpu_layers < 0 else n_gpu_layers
        with captured_log(forward=False) as log, loading(self.path) as params.progress_callback:
            self.handle = C.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self.handle:
            raise ModelFileError(key, last_log_error(log) or f"llama.cpp cannot load {self.path}")
        self.vocab = C.llama_model_get_vocab(self.handle)
        self.n_vocab: int = C.llama_vocab_n_tokens(self.vocab)
        self.add_bos: bool = C.llama_vocab_get_add_bos(self.vocab)
        self.bos: int = C.llama_vocab_bos(self.vocab)
        self.n_ctx_train: int = C.llama_model_n_ctx_train(self.handle)

    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: bytes, special: bool = True, markup: bool = False) -> npt.NDArray[np.int32]:
        """Tokens of a text. special: with the model's own special tokens around it; markup: read those in the text."""
        room = max(len(text) + 2, 8)
        out = np.empty(room, dtype=np.int32)
        n = C.llama_tokenize(
            self.vocab, text, len(text), out.ctypes.data_as(ctypes.POINTER(C.llama_token)), room, special, markup
        )
        if n < 0:
            raise ModelFileError("-f", f"the text cannot be tokenized ({n})")
        return out[:n].copy()

    def context(
        self,
        choice: CacheChoice,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        flash_attn: str = "auto",
        n_sink: int | None = None,
        n_recent: int | None = None,
        n_rollback: int | None = None,
        adapt: str | None = None,
        n_seq_max: int = 1,
        observer: Observer | None = None,
    ) -> Context:
        """A context with the given cache, watched by `observer`; sequences share its cells.

        Raises CacheError with the native reason, or with the arithmetic when it would not fit in memory.
        """
        params = C.llama_context_default_params()
        params.n_ctx = n_ctx
        static = choice.adapting(adapt) in (None, adaptive.NONE)  # else every sequence needs cells of its own
        params.n_seq_max, params.kv_unified = n_seq_max, n_seq_max > 1 and static
        params.n_batch = min(n_batch, n_ctx)
        params.n_ubatch = min(n_ubatch, params.n_batch)
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = flash_attention(flash_attn, choice)
        params.type_k, params.type_v = choice.type_k, choice.type_v
        params.no_perf = True
        window: dict[str, Any] = {"n_sink": n_sink, "n_recent": n_recent, "n_rollback": n_rollback, "adapt": adapt}
        require_memory(self.path, choice, params, window, self.n_gpu_layers)
        with captured_log(forward=False) as log, attached(choice, **window):
            if observer is not None:
                observer.attach()
            handle = C.llama_init_from_model(self.handle, params)
            if not handle:
                raise creation_error(ValueError("context"), choice, log)
        kv_log = [line for _, line in log if line.startswith("llama_kv_cache")]
        return Context(self, handle, choice, params.n_batch, context_stats(self.handle, handle, choice, kv_log))

    def close(self) -> None:
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def token_piece(vocab: Any, token: int, special: bool = False) -> bytes:
    """The bytes of one token; control tokens have none unless `special`."""
    buffer = ctypes.create_string_buffer(512)
    n = C.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    if n > -len(buffer):
        return buffer.raw[: max(n, 0)]
    buffer = ctypes.create_string_buffer(-n)
    return buffer.raw[: C.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)]


def decode_batch(
    handle: Any, batch: Any, tokens: Any, pos: Any, seqs: Sequence[int], logits: Any, coded: bool = False
) -> None:
    """llama_decode of tokens at their positions and sequences; `logits` says which of them give logits.

    `batch` has room for them all. coded: the context's cache is, so libsubkv knows why. Raises CacheError.
    """
    n = len(tokens)
    batch.n_tokens = n
    np.ctypeslib.as_array(batch.token, (n,))[:] = tokens
    np.ctypeslib.as_array(batch.pos, (n,))[:] = pos
    np.ctypeslib.as_array(batch.n_seq_id, (n,))[:] = 1
    np.ctypeslib.as_array(batch.logits, (n,))[:] = logits
    for i, seq in enumerate(seqs):
        batch.seq_id[i][0] = seq
    code = C.llama_decode(handle, batch)
    if code != 0:
        refused = last_error() if coded else ""
        why = refused or ("no room in the cache" if code == 1 else f"llama_decode returned {code}")
        raise CacheError("-c", f"cannot evaluate {n} tokens at position {np.min(pos)}: {why}")


class Context:
    """One llama.cpp context; everything concerns sequence 0 unless a method says otherwise."""

    def __init__(self, model: Model, handle: Any, choice: CacheChoice, n_batch: int, stats: KVStats) -> None:
        self.model = model
        self.handle = handle
        self.choice = choice
        self.stats = stats
        self.n_batch = n_batch
        self.memory = C.llama_get_memory(handle)
        self.batch = C.llama_batch_init(n_batch, 0, 1)

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], pos: int, first_logits: int, seq: int = 0) -> int:
        """Evaluate at most n_batch tokens at positions pos, pos+1, …; those at index ≥ first_logits give logits.

        Returns how many rows of logits there are. Raises CacheError when there are more, or llama.cpp cannot decode.
        """
        n = len(tokens)
        self._decode(tokens, np.arange(pos, pos + n), [seq] * n, np.arange(n) >= first_logits)
        return max(n - max(first_logits, 0), 0)

    def decode_each(self, tokens: Sequence[int] | npt.NDArray[np.int32], pos: int) -> None:
        """Evaluate one token for each of the sequences 0, 1, …, all at position pos; all give logits. As decode."""
        self._decode(tokens, pos, range(len(tokens)), True)

    def _decode(self, tokens: Any, pos: Any, seqs: Sequence[int], logits: Any) -> None:
        if len(tokens) > self.n_batch:  # llama.cpp would write past the end of the batch
            raise CacheError("-b", f"expected at most {self.n_batch} tokens at once, found {len(tokens)}")
        decode_batch(self.handle, self.batch, tokens, pos, seqs, logits, self.choice.coded)

    def logits(self, n_rows: int) -> Logits:
        """Logits of the last decode, [n_rows, n_vocab] f32: a view that the next decode overwrites."""
        return np.ctypeslib.as_array(C.llama_get_logits(self.handle), (n_rows, self.model.n_vocab))

    def synchronize(self) -> None:
        C.llama_synchronize(self.handle)

    def clear(self) -> None:
        C.llama_memory_clear(self.memory, True)

    def adopt(self, seq: int, to: int = 0) -> None:
        """Give the cells of a sequence to another one."""
        C.llama_memory_seq_cp(self.memory, seq, to, -1, -1)
        C.llama_memory_seq_rm(self.memory, seq, -1, -1)

    def drop_tail(self, pos: int, seq: int = 0) -> None:
        """Remove the cells at positions ≥ pos. Raises CacheError when the cache keeps too few exact rows for that."""
        if not C.llama_memory_seq_rm(self.memory, seq, pos, -1):
            raise CacheError(
                "n_rollback", f"expected a tail that can be removed, found the cells from position {pos} coded"
            )

    def close(self) -> None:
        if self.handle:
            with captured_log(forward=False):  # llama.cpp reports its buffer sizes on the way out
                C.llama_batch_free(self.batch)
                C.llama_free(self.handle)
            self.handle = None


def parse_cache(spec: str, model: Path, bases: Path | None, key: str = "-ctk") -> CacheChoice:
    """`f16`, `q8_0/q4_0` (K/V), `subkv`, `subkv:FILE` → CacheChoice. Raises CacheError that starts with `key`.

    A coded cache may end with bases that follow the text: `subkv+v`, `subkv+v;length=256` (as --adapt, commas as ;).
    """
    name, plus, sides = spec.rpartition("+")
    if plus and sides.split(";")[0] in adaptive.SIDES:
        choice = parse_cache(name, model, bases, key)
        if not choice.coded:
            raise CacheError(key, f"expected a coefficient cache before '+{sides}', found {spec!r}")
        return dataclasses.replace(choice, adapt=sides.replace(";", ","))
    kind, _, file = spec.partition(":")
    try:
        if file:
            if kind != "subkv":
                raise CacheError(key, f"expected a file only after 'subkv:', found {spec!r}")
            return choose_cache(model, kind, Path(file))
        if "/" in kind:
            type_k, _, type_v = kind.partition("/")
            return choose_cache(model, type_k=type_k, type_v=type_v)
        return choose_cache(model, kind, bases if kind in ("subkv", "auto") else None)
    except SubkvError as error:
        known = {"kv_cache": key, "type_k": key, "type_v": key, "bases": f"{key} {spec}"}
        raise type(error)(known.get(error.key, error.key), error.reason) from error
