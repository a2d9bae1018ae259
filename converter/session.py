"""A context with an observer: it decodes tokens and returns statistics, samples, logits and cells."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence

import jinja2

from converter.source import Source
from subkv.base.errors import CacheError, SubkvError
from subkv.base.heap import return_freed
from subkv.engine.cache import also_attach, ordinary
from subkv.engine.context import Context, ContextOptions, Logits
from subkv.engine.observer import PAUSE, UBATCH, Observer
from subkv.engine.template import Template
from subkv.native.binding import C, captured_log, last_error, last_log_error

PROBE, WARM = 32, 1.0  # tokens, seconds


class Session:
    """The engine of statistics and sensitivities (tests replace it by numpy); a context manager.

    It loads the weights of `source`, unless an earlier session has; they stay loaded. model: the weights. mode, layers,
    get, forget: the observer's. Raises SubkvError about `model` if the model cannot run.
    """

    def __init__(self, source: Source, n_ctx: int, n_threads: int, n_skip: int) -> None:
        with contextlib.ExitStack() as opened:
            source.check_positions(n_ctx)
            return_freed()
            params = C.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, UBATCH, UBATCH
            self.source, self.model = source, source.weights(params)
            observer = Observer(n_skip)
            opened.callback(observer.close)
            self._observer = observer
            self._options = ContextOptions(n_ctx, UBATCH, UBATCH, n_threads)
            self._context = self._new_context()
            opened.callback(lambda: self._context.close())
            model = self.model
            # This is from the metadata, because llama.cpp's count leaves out layers that only predict further tokens.
            self.arch, self.block_count = model.arch, int(source.n_layer or 0)
            self.name = model.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            self.bos = model.bos if model.add_bos else None
            self.mode, self.layers, self.get = observer.mode, observer.layers, observer.get
            self.forget = observer.forget
            self._opened = opened.pop_all()

    def _new_context(self) -> Context:
        """An empty context with the observer."""
        try:
            with also_attach(self._observer.attach):
                return self.model.context(ordinary(), self._options)
        except CacheError as error:
            if error.key != "kv_cache":
                raise
            reason = last_error() or error.reason
            raise SubkvError("model", f"{self.model.path}: cannot run this model: {reason}") from error

    @contextlib.contextmanager
    def without_context(self) -> Iterator[None]:
        """Frees the context's memory inside the block; an empty context follows it. Samples are dropped."""
        self.forget()
        self._context.close()
        yield
        self._context = self._new_context()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: bytes, special: bool = False) -> list[int]:
        """As corpus.Tokenizer."""
        tokens: list[int] = self.model.tokenize(text, special=False, markup=special).tolist()
        return tokens

    def speed(self) -> float:
        """Measured tokens per second. It clears the cache and leaves the statistics as they are."""
        self.mode(PAUSE)
        for _ in range(2):  # the first run warms up, and a slow model does without the second
            start = time.monotonic()
            self.clear()
            self.decode([self.bos or 0] * PROBE, 0)
            seconds = time.monotonic() - start
            if seconds > WARM:
                break
        self.clear()
        return PROBE / seconds

    @property
    def template(self) -> Template | None:
        """The model's chat template; None if it is missing or cannot be read."""
        try:
            return Template(self.model)
        except (SubkvError, jinja2.TemplateError):
            return None

    def clear(self) -> None:
        """Remove all decoded tokens from the cache."""
        self._context.clear()

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
        """The state of all decoded tokens as llama.cpp saves it, which includes their keys and values in f16."""
        room = C.llama_state_seq_get_size(self._context.handle, 0)
        saved = bytearray(room)
        size = C.llama_state_seq_get_data(self._context.handle, (ctypes.c_uint8 * room).from_buffer(saved), room, 0)
        if size != room:
            raise SubkvError("model", f"expected a state of {room} bytes, found {size}")
        return saved

    def restore(self, saved: bytearray) -> None:
        """Restore a state from cells(), whose bytes the caller may have changed."""
        size = len(saved)
        with captured_log(forward=False) as log:
            read = C.llama_state_seq_set_data(self._context.handle, (ctypes.c_uint8 * size).from_buffer(saved), size, 0)
        if read != size:
            reason = last_log_error(log) or f"read {read} of {size} bytes"
            raise SubkvError("model", f"its cells cannot be restored: {reason}")
