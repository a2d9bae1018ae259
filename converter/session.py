"""One model opened in the native engine with an observer attached: what calibration needs from it, and no more."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2

from subkv.base.errors import CacheError, SubkvError
from subkv.base.heap import return_freed
from subkv.engine.cache import CacheOptions, also_attach, choose_cache
from subkv.engine.context import Context, ContextOptions, Logits
from subkv.engine.memory import require_weights
from subkv.engine.model import Model
from subkv.engine.observer import PAUSE, UBATCH, Observer
from subkv.engine.template import Template
from subkv.native.binding import C, captured_log, last_error, last_log_error
from subkv.native.gguf import Gguf

PROBE, WARM = 32, 1.0  # tokens, seconds


class Session:
    """The engine as calibration sees it (tests have one made of numpy); a context manager.

    model: the weights. mode, layers, get, forget: the observer's. clear: forget all decoded tokens. Raises SubkvError
    about `model` when it cannot be run.
    """

    def __init__(self, path: Path, n_ctx: int, n_threads: int, n_skip: int) -> None:
        with contextlib.ExitStack() as opened:
            _check_positions(path, n_ctx)
            return_freed()
            choice = choose_cache(path, CacheOptions("f16"))
            params = C.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, UBATCH, UBATCH
            require_weights(path, choice, params, {"statistics": _statistics(path)})
            model = self.model = opened.enter_context(Model(path, mapped=False))
            if C.llama_model_has_encoder(model.handle):
                raise SubkvError("model", f"{path}: expected a decoder-only model, found one with an encoder")
            observer = Observer(n_skip)
            opened.callback(observer.close)
            self._observer, self._choice = observer, choice
            self._options = ContextOptions(n_ctx, UBATCH, UBATCH, n_threads)
            self._context = self._made()
            opened.callback(lambda: self._context.close())
            self.arch, self.block_count = model.arch, _block_count(path)
            self.name = model.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            self.bos = model.bos if model.add_bos else None
            self.mode, self.layers, self.get = observer.mode, observer.layers, observer.get
            self.forget = observer.forget
            self._opened = opened.pop_all()

    def _made(self) -> Context:
        """An empty context, observed."""
        try:
            with also_attach(self._observer.attach):
                return self.model.context(self._choice, self._options)
        except CacheError as error:
            if error.key != "kv_cache":
                raise
            reason = last_error() or error.reason
            raise SubkvError("model", f"{self.model.path}: cannot run this model: {reason}") from error

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within, there is no context, and its memory is free; behind, an empty one. Samples are dropped."""
        self.forget()
        self._context.close()
        yield
        self._context = self._made()

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
        """Tokens per second, measured on a few; the cache is empty afterwards, and the statistics are as before."""
        self.mode(PAUSE)
        for _ in range(2):  # the first time warms up, which a slow model's takes no notice of
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
        """The model's chat template; None where it has none, or one that cannot be read."""
        try:
            return Template(self.model)
        except (SubkvError, jinja2.TemplateError):
            return None

    def clear(self) -> None:
        """Forget all decoded tokens."""
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


def _block_count(path: Path) -> int:
    """Layers of the file: llama.cpp's own count leaves out those that only predict further tokens."""
    with Gguf(path) as file:
        return int(file.get(f"{file.get('general.architecture')}.block_count"))


def _check_positions(path: Path, n_ctx: int) -> None:
    """Refuse chunks beyond the positions that a model has learned, where llama.cpp would end the process."""
    with Gguf(path) as file:
        trained = file.get(f"{file.get('general.architecture')}.context_length")
        if file.has_tensor("position_embd.weight") and trained and n_ctx > trained:
            raise SubkvError("n_ctx", f"expected at most the {trained} positions that the model has, found {n_ctx}")


def _statistics(path: Path) -> float:
    """Bytes of second moments in the observer and on their way to the file; a guess where heads differ by layer."""
    with Gguf(path) as file:
        arch = file.get("general.architecture")
        found = [file.get(f"{arch}.{key}") for key in ("block_count", "embedding_length", "attention.head_count")]
        n_head_kv = file.get(f"{arch}.attention.head_count_kv")
    if not all(isinstance(number, int) and number for number in found):
        return 0.0
    n_layer, n_embd, n_head = found
    heads = n_head_kv if isinstance(n_head_kv, int) else n_head
    return float(n_layer * heads * 3 * (n_embd // n_head) ** 2 * 8 * 2)
