"""A loaded GGUF: weights, tokenizer and contexts; for the programs and `subkv.Llama`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.base.closed import mark_closed
from subkv.base.errors import ModelFileError, SubkvError
from subkv.base.text import encodable
from subkv.engine.cache import CacheChoice
from subkv.engine.context import Context, ContextOptions
from subkv.native.binding import C, captured_log, last_log_error, loading, model_meta
from subkv.native.gguf import check_model_file

ALL_LAYERS = 0x7FFFFFFF


class Model:
    """A GGUF loaded by llama.cpp. Close it after its contexts.

    path: the file, the first of a split model; handle: llama.cpp's. arch, name: from its metadata, "" if missing.
    Raises ModelFileError about `model`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_gpu_layers: int = 0,
        handle: Any = None,
        mapped: bool = True,
        checked: bool = False,
    ) -> None:
        """handle: of a model that the caller has loaded and will free; None: load the model.

        n_gpu_layers: negative for all. mapped: map the file into memory; weights that llama.cpp repacks are then in
        memory twice. Else it is read. checked: the caller has called check_model_file().
        """
        self.path, self.n_gpu_layers = Path(path), n_gpu_layers
        if handle is None:
            if not checked:
                check_model_file(self.path)
            with captured_log(forward=False):  # separate backend libraries log that they are loaded
                C.llama_backend_init()
            params = C.llama_model_default_params()
            params.n_gpu_layers = ALL_LAYERS if n_gpu_layers < 0 else n_gpu_layers
            if not mapped:
                params.load_mode = C.LLAMA_LOAD_MODE_NONE
            with captured_log(forward=False) as log, loading(self.path) as params.progress_callback:
                handle = C.llama_model_load_from_file(os.fsencode(self.path), params)
            if not handle:
                raise ModelFileError("model", last_log_error(log) or f"llama.cpp cannot load {self.path}")
        self.handle = handle
        self.vocab = C.llama_model_get_vocab(handle)
        self.n_vocab: int = C.llama_vocab_n_tokens(self.vocab)
        self.add_bos: bool = C.llama_vocab_get_add_bos(self.vocab)
        self.bos: int = C.llama_vocab_bos(self.vocab)
        self.n_ctx_train: int = C.llama_model_n_ctx_train(handle)
        self.n_layer: int = C.llama_model_n_layer(handle)
        self.arch = self.meta("general.architecture")
        self.name = self.meta("general.name")

    def close(self) -> None:
        """Free the weights; do not call it for a handle of the caller."""
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None
        mark_closed(self)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def meta(self, key: str) -> str:
        """A value of the file's metadata as text, "" if missing."""
        return model_meta(self.handle, key)

    #
    # tokens
    #

    def check_text(self) -> None:
        """Reject a model without a text vocabulary, on which llama.cpp would abort. Raises ModelFileError."""
        if C.llama_vocab_type(self.vocab) == C.LLAMA_VOCAB_TYPE_NONE:
            raise ModelFileError("model", f"expected a model with a vocabulary of text, found {self.path} without one")

    def tokenize(self, text: bytes, special: bool = True, markup: bool = False) -> npt.NDArray[np.int32]:
        """Tokens of a text in UTF-8, [n] i32. special: add BOS and EOS as the model requires; markup: parse special
        tokens in the text. Raises ModelFileError.
        """
        self.check_text()
        text = encodable(text)
        n = -max(len(text) + 2, 8)  # a token has at least one byte, unless the text is no UTF-8
        for _ in range(2):
            tokens = np.empty(-n, dtype=np.int32)
            pointer = tokens.ctypes.data_as(ctypes.POINTER(C.llama_token))
            n = C.llama_tokenize(self.vocab, text, len(text), pointer, len(tokens), special, markup)
            if n >= 0:
                return tokens[:n].copy()
            if n == -(2**31):  # more tokens than an int counts
                break
        raise ModelFileError("files", f"the text cannot be tokenized ({n})")

    def tokenize_chat(self, text: str) -> list[int]:
        """Tokens of a conversation rendered by a chat template; drops a second BOS."""
        tokens: list[int] = self.tokenize(text.encode("utf-8", "replace"), markup=True).tolist()
        return tokens[1:] if len(tokens) > 1 and tokens[0] == tokens[1] == self.bos else tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token; empty for control tokens, unless `special`."""
        buffer = ctypes.create_string_buffer(512)
        n = C.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if n > -len(buffer):
            return buffer.raw[: max(n, 0)]
        buffer = ctypes.create_string_buffer(-n)
        return buffer.raw[: C.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)]

    def is_end(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return bool(C.llama_vocab_is_eog(self.vocab, token))

    def chat_template(self) -> str:
        """The model's own chat template. Raises SubkvError if it has none."""
        text = C.llama_model_chat_template(self.handle, None)
        if not text:
            raise SubkvError("tokenizer.chat_template", "expected a chat template in the model's metadata, found none")
        return str(text.decode("utf-8", "replace"))

    #
    # contexts
    #

    def context(self, choice: CacheChoice, options: ContextOptions) -> Context:
        """A context with this cache. Raises CacheError with the native reason, or with the sizes if it does not fit in
        memory.
        """
        return Context(self.path, self.handle, self.n_vocab, self.n_gpu_layers, choice, options)
