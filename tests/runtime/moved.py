"""Moves rows of evaluated tokens in a session (llama-subkv-programs.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import engine

LIB = engine.C._lib
LIB.llama_subkv_run_of_sequence.restype = LIB.llama_subkv_run_of_state.restype = ctypes.c_void_p
LIB.llama_subkv_append.restype = LIB.llama_subkv_moves.restype = ctypes.c_bool


@contextmanager
def run_of(s: engine.Session, first: int, n: int, *, seq: int = 0, state: bytes | None = None) -> Iterator[Any]:
    """The rows of positions from `first` on: of a sequence, or of its state."""
    if state is None:
        run = LIB.llama_subkv_run_of_sequence(ctypes.c_void_p(s.ctx), seq, first, n)
    else:
        run = LIB.llama_subkv_run_of_state(ctypes.c_void_p(s.ctx), state, ctypes.c_size_t(len(state)), first, n)
    yield ctypes.c_void_p(run)
    LIB.llama_subkv_run_free(ctypes.c_void_p(run))


def append(s: engine.Session, pos: int, run: Any, seq: int = 0) -> bool:
    return bool(LIB.llama_subkv_append(ctypes.c_void_p(s.ctx), seq, pos, run))


def moves(s: engine.Session) -> bool:
    return bool(LIB.llama_subkv_moves(ctypes.c_void_p(s.ctx), None, False))
