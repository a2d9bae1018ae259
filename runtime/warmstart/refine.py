"""Exact cells of a prompt, made by another context in a thread."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from subkv.base.errors import CacheError, SubkvError
from subkv.engine.cache import attached, creation_error
from subkv.engine.llama import Llama
from subkv.engine.model import decode_batch
from subkv.native.binding import C, captured_log, last_error, last_log_error


class Refiner:
    """A second context of a Llama's model, with the same cache and parameters, that reads prompts.

    It takes the memory of a whole context, and processor time from whatever the Llama computes meanwhile. Raises
    CacheError when it cannot be made.
    """

    def __init__(self, llm: Llama) -> None:
        self.llm = llm
        choice, stats = llm.cache_choice, llm.kv_stats()
        window: dict[str, Any] = {}
        if choice.coded:
            window = {"n_sink": stats.n_sink, "n_recent": stats.n_recent, "n_rollback": stats.n_rollback}
            window["adapt"] = llm._given["adapt"]
        with captured_log(forward=False) as log, attached(choice, **window):
            self._handle = C.llama_init_from_model(llm.model, llm.context_params)
            if not self._handle:
                raise creation_error(ValueError("context"), choice, log)
        self._batch = C.llama_batch_init(llm.n_batch, 0, 1)
        self._coded = choice.coded
        self._tokens: list[int] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    def begin(self, tokens: list[int]) -> None:
        """Read a prompt in a thread; a former one is given up."""
        self.stop()
        self._tokens, self.error = tokens, None
        self._stopping.clear()
        self._thread = threading.Thread(target=self._read, name="refine", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            C.llama_memory_clear(C.llama_get_memory(self._handle), True)
            for start in range(0, len(self._tokens), self.llm.n_batch):
                if self._stopping.is_set():
                    return
                piece = self._tokens[start : start + self.llm.n_batch]
                n = len(piece)
                where = np.arange(start, start + n)
                decode_batch(self._handle, self._batch, piece, where, [0] * n, np.zeros(n, np.int8), self._coded)
            C.llama_synchronize(self._handle)
        except Exception as error:  # of the prompt's owner, who asks for it
            self.error = error

    @property
    def ready(self) -> bool:
        """Whether the prompt was read, or that failed."""
        return self._thread is not None and not self._thread.is_alive()

    def hand_over(self) -> None:
        """Give the Llama the exact cells of the prompt, instead of what it holds; none, if reading failed."""
        llm = self.llm
        llm.reset()
        llm._ctx.kv_cache_clear()
        if self.error is None:
            try:
                self._move()
            except SubkvError as error:
                self.error = error
                llm._ctx.kv_cache_clear()

    def _move(self) -> None:
        llm, n = self.llm, len(self._tokens)
        size = C.llama_state_seq_get_size(self._handle, 0)
        data = (ctypes.c_uint8 * size)()
        with captured_log(forward=False) as log:
            done = C.llama_state_seq_get_data(self._handle, data, size, 0)
            done = C.llama_state_seq_set_data(llm.ctx, data, done, 0) if done == size else 0
        if done != size:
            raise CacheError("refine", last_log_error(log) or last_error() or f"moved {done} of {size} bytes")
        llm.input_ids[:n] = self._tokens
        llm.n_tokens = n
        llm._requires_eval = True

    def stop(self) -> None:
        """Give up what is being read, after the batch at hand."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Before the model is closed; a second call does nothing."""
        self.stop()
        if self._handle:
            with captured_log(forward=False):
                C.llama_batch_free(self._batch)
                C.llama_free(self._handle)
            self._handle = None
