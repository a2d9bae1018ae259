"""One model opened in the native engine with an observer attached: what calibration needs from it, and no more."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import SubkvError
from subkv.base.progress import loading
from subkv.engine.observer import UBATCH, ObservedLayer, Observer
from subkv.native import ggml as native
from subkv.native.library import last_error


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
    """Session on libllama and libsubkv; a context manager. Raises SubkvError when the model cannot be run."""

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
            raise SubkvError(
                "model", f"{path}: expected a model that llama.cpp can load, found one it refuses{self._reason()}"
            )
        if llama.llama_model_has_encoder(self._model):
            raise SubkvError("model", f"{path}: expected a decoder-only model, found one with an encoder")
        self._observer.attach()
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(UBATCH, n_ctx)
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = n_threads
        self._ctx = llama.llama_init_from_model(self._model, params)
        if not self._ctx:
            detail = last_error()
            raise SubkvError("model", f"{path}: cannot run this model{': ' + detail if detail else self._reason()}")
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
            raise SubkvError("files", f"the tokenizer needs room for {-n} tokens, expected at most {room}")
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
            raise SubkvError("model", f"decoding failed with status {status}{self._reason()}")

    def layers(self) -> list[ObservedLayer]:
        return self._observer.layers()

    def get(self, layer: ObservedLayer, what: str) -> NDArray[np.float64]:
        return self._observer.get(layer, what)
