"""Saves and restores contexts, and computes the identity to which a state is bound.

A state consists of the tokens and llama.cpp's data (cells; of a coded cache also the exact window, …). Its size
is about `kv_stats().bytes_per_token` + 20 bytes for every used cell, and `bytes_window`. It contains llama_cpp's logits
only with logits_all.
"""

from __future__ import annotations

import ctypes
import uuid
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from subkv.base.errors import CacheError, StateError
from subkv.native.binding import C, captured_log, last_error, last_log_error, llama_cpp
from subkv.native.store import Bytes, Found, identity_parts

_u8_p = ctypes.POINTER(ctypes.c_uint8)


def identity(llm: Any) -> dict[str, Any]:
    """What the context's states depend on (docs/format.md); contexts with equal identities can exchange states.

    llm: a subkv.Llama.
    """
    try:
        parts = identity_parts(llm.ctx)
    except CacheError as error:
        parts = {"model": f"unknown ({error.reason}), {uuid.uuid4()}"}  # of this context only
    return {**parts, "lora": llm.lora_identity}


def save(llm: llama_cpp.Llama, identity: dict[str, Any], logits: bool) -> llama_cpp.LlamaState:
    """A copy of the context, bound to `identity`. logits: include the used rows of `scores`."""
    room = C.llama_state_get_size(llm.ctx)
    buffer = (ctypes.c_uint8 * room)()
    size = C.llama_state_get_data(llm.ctx, buffer, room)
    if not 0 < size <= room:
        raise StateError("state", last_error() or f"expected a state of at most {room} bytes, found {size}")
    state = llama_cpp.LlamaState(
        input_ids=llm._input_ids.copy(),
        scores=llm._scores.copy() if logits else llm.scores[:0].copy(),
        n_tokens=llm.n_tokens,
        llama_state=bytes(memoryview(buffer)[:size]),
        llama_state_size=size,
        seed=llm._seed,
    )
    state.identity = identity
    state.evaluated = not llm._ctx.moved  # a prompt cache may store it, because its cells are of this text
    state.checksum = checksum(state)
    return state


def checksum(state: llama_cpp.LlamaState) -> int:
    """CRC-32 over the tokens and llama.cpp's state, which has no checksum."""
    return zlib.crc32(state.llama_state, zlib.crc32(np.asarray(state.input_ids[: state.n_tokens]).tobytes()))


def load(llm: llama_cpp.Llama, identity: dict[str, Any], state: llama_cpp.LlamaState, logits: bool) -> None:
    """Restore a state of save(). Raises StateError; the context is then unchanged or empty."""
    if state.n_tokens > llm.n_ctx():
        raise StateError("state", f"expected at most {llm.n_ctx()} tokens, found {state.n_tokens}")
    # States of the parent class have neither, and the native code checks them.
    if getattr(state, "checksum", None) not in (None, checksum(state)):
        raise StateError("state", "expected an unchanged state of save_state(), found another checksum")
    saved = getattr(state, "identity", identity)
    for key, expected in identity.items():
        if saved.get(key) != expected:
            raise StateError("state", f"{key}: expected {expected}, found {saved.get(key)}")
    size = len(state.llama_state)
    data = ctypes.cast(ctypes.c_char_p(state.llama_state), ctypes.POINTER(ctypes.c_uint8))
    _restore(llm, state.input_ids[: state.n_tokens], size, lambda: C.llama_state_set_data(llm.ctx, data, size))
    llm._seed = state.seed
    if logits:
        rows = min(state.n_tokens, state.scores.shape[0])
        llm.scores[:rows] = state.scores[:rows]
        llm.scores[rows:] = np.float32(0)


def _restore(llm: llama_cpp.Llama, tokens: Any, size: int, read: Callable[[], int]) -> None:
    """Replace the context by a state of `size` bytes with these tokens. read: returns how many bytes it has read."""
    n_tokens = len(tokens)
    llm.reset()  # an interrupt must not leave tokens of one text and cells of another
    with captured_log(forward=llm.verbose) as log:
        n_read = read()
    if n_read != size:
        reason = last_log_error(log) or last_error() or f"read {n_read} of {size} bytes"
        llm._ctx.kv_cache_clear()
        raise StateError("state", reason)
    memory = llm._ctx.memory
    n_cells = n_tokens if memory is None else C.llama_memory_seq_pos_max(memory, 0) + 1
    if n_cells < n_tokens:
        llm._ctx.kv_cache_clear()
        raise StateError("state", f"expected cells of its {n_tokens} tokens, found {n_cells}")
    llm.input_ids[:n_tokens] = tokens
    llm.n_tokens = n_tokens


def save_sequence(llm: llama_cpp.Llama) -> Bytes:
    """A copy of the context's sequence, without its tokens, for a prompt store. Raises StateError."""
    size = C.llama_state_seq_get_size(llm.ctx, 0)
    state = np.empty(size, np.uint8)
    n_written = C.llama_state_seq_get_data(llm.ctx, state.ctypes.data_as(_u8_p), size, 0)
    if n_written != size:
        raise StateError("state", last_error() or f"expected a state of {size} bytes, found {n_written}")
    return state


def load_sequence(llm: llama_cpp.Llama, found: Found) -> None:
    """Restore a stored prompt with its checkpoints. Raises StateError; the context is then empty."""
    size = found.state.size
    data = ctypes.cast(found.state.data, _u8_p)
    _restore(llm, found.tokens, size, lambda: C.llama_state_seq_set_data(llm.ctx, data, size, 0))
    if llm._ctx.checkpoints is not None:
        llm._ctx.checkpoints.restore((point.n_tokens, point.data[0].data, point.data[0].size) for point in found.points)
