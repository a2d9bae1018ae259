"""subkv.Llama's context: llama_cpp's wrapper of a native context, with checks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from subkv.base.closed import mark_closed
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.checkpoints import Checkpoints, of_window
from subkv.native import library
from subkv.native.binding import C, internals


class GuardedContext:
    """A context that raises errors for unsupported operations, instead of aborting or hanging the process.

    It has the other attributes and methods of the llama_cpp context that it wraps, which frees the native context.
    """

    def __init__(
        self, context: internals.LlamaContext, recurrent: bool, sliding: bool, vocab_only: bool = False
    ) -> None:
        """recurrent: it has recurrent state, from which tokens cannot be removed. sliding: sliding layers keep their
        window only. vocab_only: its model was loaded without weights.
        """
        self._context = context
        self.vocab_only = vocab_only
        self.process = os.getpid()  # that created it
        self.lock = threading.RLock()  # held by the thread that uses the context
        # of sequence 0: cells may have been evaluated behind other tokens than those that are now before them
        self.moved = False
        self.checkpoints: Checkpoints | None = None  # of sequence 0, or None if it is not needed
        if context.memory is not None and (recurrent or sliding):
            points = Checkpoints(context.ctx) if recurrent else of_window(context.ctx, context.model.model)
            self.checkpoints = points

    def __getattr__(self, name: str) -> Any:
        if name == "_context":  # an object whose construction failed
            raise AttributeError(name)
        return getattr(self._context, name)

    def _mark_closed(self) -> None:
        """The native context is freed: from now on methods of both objects raise ClosedError."""
        for shared in (self.checkpoints, self._context, self):
            if shared is not None:
                mark_closed(shared, "Llama")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside the block no other thread may use or close the context. Raises CacheError if one is using it."""
        if not self.lock.acquire(blocking=False):
            raise CacheError(
                "",
                "expected one thread at a time in a Llama, found another at work in it; wait for it, or give every "
                "thread a Llama of its own",
            )
        try:
            if self.ctx is None:
                raise CacheError("", "expected an open Llama, found one that was closed")
            yield
        finally:
            self.lock.release()

    def require_weights(self) -> None:
        """Raises SubkvError where llama.cpp would end the process, because it needs layers that were not loaded."""
        if self.vocab_only:
            raise SubkvError("vocab_only", "expected a model with its weights, found its vocabulary alone")

    def decode(self, batch: Any) -> None:
        self.require_weights()
        if os.getpid() != self.process:
            raise CacheError(
                "",
                f"expected the process {self.process} that created this Llama, found its fork {os.getpid()}: threads "
                "and devices do not survive a fork; create another Llama there",
            )
        with self.exclusive():
            self._context.decode(batch)

    def kv_cache_clear(self) -> None:
        self._context.kv_cache_clear()
        self.moved = False
        if self.checkpoints is not None:
            self.checkpoints.forget()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """With checkpoints, removes more than requested where it must: back to one, or the whole sequence.

        Returns False if nothing is left; else the caller evaluates the missing tokens before p0 again.
        """
        if self.checkpoints is None or seq_id > 0 or p1 >= 0:
            removed = bool(self._context.kv_cache_seq_rm(seq_id, p0, p1))
            if removed and seq_id <= 0:
                self.moved = p1 >= 0 or (self.moved and p0 > 0)
            if removed and self.checkpoints is not None and seq_id <= 0:
                self.checkpoints.forget()
            return removed
        return self.checkpoints.rewind(max(p0, 0)) > 0 or p0 <= 0

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Shift the positions [p0, p1). Raises CacheError, and changes nothing, if the cache cannot."""
        if not C.llama_memory_can_shift(self.memory):
            raise CacheError(
                "kv_cache_seq_shift",
                "expected a cache whose positions can move, found one on a GPU, with adaptive bases, or of a model "
                "whose positions are not plain numbers; evaluate the tokens again or use kv_cache='f16'",
            )
        with self.exclusive():
            if shift == 0:  # llama.cpp does not call the coded cache then
                return
            if self.checkpoints is not None:
                self.checkpoints.forget()
            self._context.kv_cache_seq_shift(seq_id, p0, p1, shift)
            if library.load().subkv_take_refusal(self.ctx, seq_id):
                raise CacheError("kv_cache_seq_shift", library.last_error())
            self.moved = self.moved or seq_id == 0

    def kv_cache_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        """Copy the positions [p0, p1). Raises CacheError, and changes nothing, if the cache cannot."""
        self._context.kv_cache_seq_cp(seq_id_src, seq_id_dst, p0, p1)
        if library.load().subkv_take_refusal(self.ctx, seq_id_dst):
            raise CacheError("kv_cache_seq_cp", library.last_error())
        self.moved = self.moved or seq_id_dst == 0
