"""One model opened in the native engine with an observer attached: what calibration needs from it, and no more."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

from subkv.base.errors import CacheError, SubkvError
from subkv.engine.cache import CacheOptions, beside, choose_cache
from subkv.engine.context import ContextOptions, Logits
from subkv.engine.model import Model
from subkv.engine.observer import UBATCH, Observer
from subkv.native.binding import C, captured_log, last_error, last_log_error


class Session:
    """The engine as calibration sees it (tests have one made of numpy); a context manager.

    model: the weights. mode, layers, get, forget: the observer's. clear: forget all decoded tokens. Raises SubkvError
    about `model` when it cannot be run.
    """

    def __init__(self, path: Path, n_ctx: int, n_threads: int, n_skip: int) -> None:
        with contextlib.ExitStack() as opened:
            model = self.model = opened.enter_context(Model(path))
            if C.llama_model_has_encoder(model.handle):
                raise SubkvError("model", f"{path}: expected a decoder-only model, found one with an encoder")
            observer = Observer(n_skip)
            opened.callback(observer.close)
            options = ContextOptions(n_ctx, UBATCH, UBATCH, n_threads)
            try:
                with beside(observer.attach):
                    context = model.context(choose_cache(path, CacheOptions("f16")), options)
            except CacheError as error:
                if error.key != "kv_cache":
                    raise
                reason = last_error() or error.reason
                raise SubkvError("model", f"{path}: cannot run this model: {reason}") from error
            self._context = opened.enter_context(context)
            self.arch, self.block_count = model.arch, model.n_layer
            self.name = model.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            self.bos = model.bos if model.add_bos else None
            self.mode, self.layers, self.get = observer.mode, observer.layers, observer.get
            self.forget = observer.forget
            self.clear = context.clear
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: bytes) -> list[int]:
        """Tokens of UTF-8 text, without a BOS token."""
        tokens: list[int] = self.model.tokenize(text, special=False).tolist()
        return tokens

    def decode(self, tokens: Sequence[int], first_pos: int) -> None:
        """Run at most UBATCH tokens at positions first_pos, first_pos + 1, …"""
        self._decode(tokens, first_pos, len(tokens))

    def logits(self, tokens: Sequence[int], first_pos: int) -> Logits:
        """As decode(), and the tokens' logits [n, n_vocab]: a view that the next decode overwrites."""
        self._decode(tokens, first_pos, 0)
        return self._context.logits(len(tokens))

    def _decode(self, tokens: Sequence[int], first_pos: int, first_logits: int) -> None:
        with captured_log(forward=False) as log:
            try:
                self._context.decode(tokens, first_pos, first_logits)
            except CacheError as error:
                raise SubkvError("model", f"decoding failed: {last_log_error(log) or error.reason}") from error

    def cells(self) -> bytearray:
        """All decoded tokens as llama.cpp saves them: among other things their keys and values in f16."""
        room = C.llama_state_seq_get_size(self._context.handle, 0)
        saved = bytearray(room)
        size = C.llama_state_seq_get_data(self._context.handle, (ctypes.c_uint8 * room).from_buffer(saved), room, 0)
        if size != room:
            raise SubkvError("model", f"expected a state of {room} bytes, found {size}")
        return saved

    def restore(self, saved: bytearray) -> None:
        """Be where cells() was called, or where its bytes, changed since, say."""
        size = len(saved)
        with captured_log(forward=False) as log:
            read = C.llama_state_seq_set_data(self._context.handle, (ctypes.c_uint8 * size).from_buffer(saved), size, 0)
        if read != size:
            reason = last_log_error(log) or f"read {read} of {size} bytes"
            raise SubkvError("model", f"its cells cannot be restored: {reason}")
