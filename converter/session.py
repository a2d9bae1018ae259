"""One model opened in the native engine with an observer attached: what calibration needs from it, and no more."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from converter import native
from converter.errors import ConverterError
from subkv._lib import Observed, last_error
from subkv.progress import loading

PAUSE, ACCUMULATE, SAMPLE = 0, 1, 2  # observer modes of subkv.h
UBATCH = 512  # tokens decoded at once


@dataclass(frozen=True)
class ObservedLayer:
    """Shapes and counts of one observed layer, as subkv_observed."""

    il: int
    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    scale: float
    n_tokens: int
    n_key: int
    n_query: int
    n_nonfinite: int
    coded: int = 0
    plain: int = 0


class Observer:
    """A subkv_observer; it must outlive the context that it is attached to. All methods raise ConverterError."""

    def __init__(self, n_skip: int) -> None:
        self._subkv = native.subkv()
        self._handle = self._subkv.subkv_observer_new(n_skip)
        if not self._handle:
            raise _unobservable()

    def attach(self) -> None:
        """The next context that this thread creates reports to it."""
        if not self._subkv.subkv_observe(self._handle):
            raise _unobservable()

    def close(self) -> None:
        if self._handle:
            self._subkv.subkv_observer_free(self._handle)
        self._handle = None

    def mode(self, mode: int, key_pos: Sequence[int] = (), query_pos: Sequence[int] = ()) -> None:
        """What to do with the tokens decoded from now on."""
        keys = (ctypes.c_int32 * len(key_pos))(*key_pos)
        queries = (ctypes.c_int32 * len(query_pos))(*query_pos)
        if not self._subkv.subkv_observer_mode(self._handle, mode, keys, len(keys), queries, len(queries)):
            raise _unobservable()

    def forget(self) -> None:
        """Drop all samples and their memory; the statistics stay."""
        self._subkv.subkv_observer_forget(self._handle)

    def layers(self) -> list[ObservedLayer]:
        """Layers that were observed, ascending."""
        found = []
        for il in range(self._subkv.subkv_observer_n_layer(self._handle)):
            raw = Observed()
            if not self._subkv.subkv_observer_layer(self._handle, il, ctypes.byref(raw)):
                raise ConverterError(f"-m: layer {il} cannot be read: {last_error()}")
            if raw.n_head:
                found.append(ObservedLayer(il=il, **{entry[0]: getattr(raw, entry[0]) for entry in Observed._fields_}))
        return found

    def get(self, layer: ObservedLayer, what: str) -> NDArray[np.float64]:
        """Statistics or samples of a layer, shaped as in subkv.h (subkv_observer_get)."""
        out = np.zeros(_shape(layer, what), dtype=np.float64)
        n = self._subkv.subkv_observer_get(
            self._handle, layer.il, what.encode(), out.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), out.size
        )
        if n != out.size:
            raise ConverterError(f"-m: layer {layer.il} {what}: expected {out.size} values, found {n}: {last_error()}")
        return out


def _unobservable() -> ConverterError:
    return ConverterError(f"-m: cannot observe this model: {last_error()}")


class Session(Protocol):
    """The engine as calibration sees it; tests have one made of numpy."""

    arch: str
    name: str
    block_count: int
    bos: int | None  # token put before every chunk, None when the model adds none

    def tokenize(self, text: bytes) -> list[int]:
        """Tokens of UTF-8 text, without a BOS token."""

    def mode(self, mode: int, key_pos: Sequence[int] = (), query_pos: Sequence[int] = ()) -> None:
        """What the observer does with the tokens decoded from now on."""

    def clear(self) -> None:
        """Forget all decoded tokens."""

    def decode(self, tokens: Sequence[int], first_pos: int) -> None:
        """Run at most UBATCH tokens at positions first_pos, first_pos + 1, …"""

    def layers(self) -> list[ObservedLayer]:
        """Layers that were observed, ascending."""

    def get(self, layer: ObservedLayer, what: str) -> NDArray[np.float64]:
        """Statistics or samples of a layer, shaped as in subkv.h (subkv_observer_get)."""


class NativeSession:
    """Session on libllama and libsubkv; a context manager. Raises ConverterError when the model cannot be run."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int, n_skip: int) -> None:
        self._observer = Observer(n_skip)
        self._llama = native.llama()
        self._model: Any = None
        self._ctx: Any = None
        self._batch: Any = None
        self._quiet = contextlib.ExitStack()  # llama.cpp's log is captured as long as the session is open
        self._log = self._quiet.enter_context(native.captured_log())
        try:
            self._open(path, n_ctx, n_threads)
        except BaseException:
            self.close()
            raise
        self._vocab = self._llama.llama_model_get_vocab(self._model)
        self.arch = self._meta("general.architecture")
        self.name = self._meta("general.name")
        self.block_count = int(self._llama.llama_model_n_layer(self._model))
        adds_bos = self._llama.llama_vocab_get_add_bos(self._vocab)
        self.bos = int(self._llama.llama_vocab_bos(self._vocab)) if adds_bos else None

    def _open(self, path: Path, n_ctx: int, n_threads: int) -> None:
        llama = self._llama
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        with loading(path) as model_params.progress_callback:
            self._model = llama.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ConverterError(
                f"-m: {path}: expected a model that llama.cpp can load, found one it refuses{self._reason()}"
            )
        if llama.llama_model_has_encoder(self._model):
            raise ConverterError(f"-m: {path}: expected a decoder-only model, found one with an encoder")
        self._observer.attach()
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(UBATCH, n_ctx)
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = n_threads
        self._ctx = llama.llama_init_from_model(self._model, params)
        if not self._ctx:
            detail = last_error()
            raise ConverterError(f"-m: {path}: cannot run this model{': ' + detail if detail else self._reason()}")
        self._batch = llama.llama_batch_init(UBATCH, 0, 1)

    def close(self) -> None:
        llama = self._llama
        if self._batch is not None:
            llama.llama_batch_free(self._batch)
        if self._ctx:
            llama.llama_free(self._ctx)
        self._observer.close()
        if self._model:
            llama.llama_model_free(self._model)
        self._batch = self._ctx = self._model = None
        self._quiet.close()

    def __enter__(self) -> NativeSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reason(self) -> str:
        return f": {self._log[0]}" if self._log else ""

    def _meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(4096)
        n = self._llama.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""

    def tokenize(self, text: bytes) -> list[int]:
        room = len(text) + 16  # a token has at least one byte
        tokens = (self._llama.llama_token * room)()
        n = self._llama.llama_tokenize(self._vocab, text, len(text), tokens, room, False, False)
        if n < 0:
            raise ConverterError(f"-f: the tokenizer needs room for {-n} tokens, expected at most {room}")
        return list(tokens[:n])

    def mode(self, mode: int, key_pos: Sequence[int] = (), query_pos: Sequence[int] = ()) -> None:
        self._observer.mode(mode, key_pos, query_pos)

    def clear(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._ctx), True)

    def decode(self, tokens: Sequence[int], first_pos: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = first_pos + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 0
        self._log.clear()
        status = self._llama.llama_decode(self._ctx, batch)
        if status != 0:
            raise ConverterError(f"-m: decoding failed with status {status}{self._reason()}")

    def layers(self) -> list[ObservedLayer]:
        return self._observer.layers()

    def get(self, layer: ObservedLayer, what: str) -> NDArray[np.float64]:
        return self._observer.get(layer, what)


def _shape(layer: ObservedLayer, what: str) -> tuple[int, ...]:
    """Shape of subkv_observer_get's answer, subkv.h."""
    heads, d = layer.n_head_kv, layer.d_v if what[0] in "vo" else layer.d_k
    if what.endswith("2"):
        return (heads, d, d)
    if what.endswith("1"):
        return (heads, d)
    return (layer.n_query, layer.n_head, d) if what[0] in "qo" else (layer.n_key, heads, d)
