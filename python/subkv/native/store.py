"""ctypes over runtime/native/include/subkv_store.h: a folder of evaluated prompts, for several processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.base.errors import CacheError
from subkv.native import library
from subkv.native.library import Signatures, members

Tokens = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

N_IDENTITY = 32  # bytes
SECONDS = 30.0  # timeout of reads and of pending writes

_bool, _str, _ptr = ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p
_i32, _i64, _u64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_i32_p = ctypes.POINTER(_i32)


class BytesStruct(ctypes.Structure):
    """subkv_store_bytes."""

    _fields_ = [("data", _ptr), ("size", ctypes.c_size_t)]


class PointStruct(ctypes.Structure):
    """subkv_store_point."""

    _fields_ = [("n_tokens", _i64), *members(_i32, "pos_min", "pos_max"), ("data", BytesStruct * 3)]


class PromptStruct(ctypes.Structure):
    """subkv_store_prompt."""

    _fields_ = [
        ("tokens", _i32_p),
        ("n_tokens", _i64),
        ("state", BytesStruct * 2),
        ("points", ctypes.POINTER(PointStruct)),
        *members(_i64, "n_points", "n_removable"),
    ]


class QueryStruct(ctypes.Structure):
    """subkv_store_query."""

    _fields_ = [
        ("tokens", _i32_p),
        *members(_i64, "n_tokens", "n_held", "n_max", "n_removable"),
        *members(ctypes.c_double, "seconds_per_token", "seconds"),
        ("n_moved", _i64),
    ]


class StatsStruct(ctypes.Structure):
    """subkv_store_stats."""

    _fields_ = members(
        _u64, "entries", "bytes", "hits", "restored", "written", "dropped", "damaged", "failures"
    )  # without n_


class IdentityPart(ctypes.Structure):
    """subkv_identity_part."""

    _fields_ = members(_str, "name", "value")


SIGNATURES: Signatures = {
    "subkv_store_open": (_ptr, [_str, _u64]),
    "subkv_store_close": (None, [_ptr]),
    "subkv_state_identity": (ctypes.POINTER(IdentityPart), [_ptr, _i32_p]),
    "subkv_store_identity": (_bool, [_ptr, _str]),
    "subkv_model_digest": (_bool, [_ptr, ctypes.c_double, _str]),
    "subkv_store_removable": (_i64, [_ptr]),
    "subkv_store_room": (_i32, [_ptr, _u64]),
    "subkv_store_put": (_bool, [_ptr, _str, ctypes.POINTER(PromptStruct), _bool]),
    "subkv_store_flush": (_bool, [_ptr, ctypes.c_double]),
    "subkv_store_get": (_ptr, [_ptr, _str, ctypes.POINTER(QueryStruct)]),
    "subkv_store_found_prompt": (ctypes.POINTER(PromptStruct), [_ptr]),
    "subkv_store_found_reach": (_i64, [_ptr]),
    "subkv_store_found_free": (None, [_ptr, _ptr, _bool]),
    "subkv_store_common": (_i64, [_ptr, _str, _i32_p, _i64]),
    "subkv_store_failure": (_str, [_ptr]),
    "subkv_store_get_stats": (None, [_ptr, ctypes.POINTER(StatsStruct)]),
}


@functools.cache
def _lib() -> ctypes.CDLL:
    return library.declare(library.load(), SIGNATURES)


def prepare(context: Any) -> None:
    """Start to compute the digest of a context's model in a thread; both functions below need it."""
    _lib().subkv_model_digest(context, 0.0, ctypes.create_string_buffer(65))


def identity_parts(context: Any) -> dict[str, str]:
    """What the states of a context depend on, in named parts, without LoRA weights.

    Raises CacheError about `model` if its digest is unknown: the file was replaced after it was loaded, or cannot be
    read.
    """
    n_parts = _i32()
    parts = _lib().subkv_state_identity(context, n_parts)
    if not parts:
        raise CacheError("model", library.last_failure().reason)
    return {part.name.decode(): part.value.decode(errors="backslashreplace") for part in parts[: n_parts.value]}


def identity(context: Any) -> bytes:
    """The identity of a context's states, without LoRA weights. Raises CacheError if the model's digest is unknown."""
    digest = ctypes.create_string_buffer(N_IDENTITY)
    if not _lib().subkv_store_identity(context, digest):
        raise CacheError("prompt_cache", library.last_error())
    return digest.raw


def n_removable(context: Any) -> int:
    """The longest tail of a restored sequence that can be removed, or -1 for any."""
    return int(_lib().subkv_store_removable(context))


class Found:
    """A stored prompt; `state` and `points` are valid until the end of the `with` block."""

    def __init__(self, prompt: PromptStruct) -> None:
        self.tokens: Tokens = np.ctypeslib.as_array(prompt.tokens, (prompt.n_tokens,)).copy()
        self.state: BytesStruct = prompt.state[0]
        self.points: list[PointStruct] = prompt.points[: prompt.n_points]
        self.is_refused = False  # set by the reader: the context rejects the state


class Store:
    """An open store.

    Warns once about a folder that cannot be read or written, and about every removal of damaged prompts; it then has no
    prompts. Raises CacheError if the path is not a folder, or if other users may write to it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max(max_bytes, 0)
        self._open()

    def _open(self) -> None:
        self._n_damaged = 0
        self._process = os.getpid()
        self._opened = _lib().subkv_store_open(os.fsencode(self.folder), self._max_bytes)  # None if it has no prompts
        if self._opened is None:
            failure = library.last_failure()
            if failure.kind == library.INVALID:
                raise CacheError("prompt_cache", failure.reason)
            _warn(self.folder, f"{failure.reason}; continuing without it")
        else:
            weakref.finalize(self, _close, self._opened, self._process, self.folder)

    @property
    def _handle(self) -> Any:
        if self._process != os.getpid():  # threads of the store do not survive a fork
            self._open()
        return self._opened

    @contextlib.contextmanager
    def get(self, identity: bytes, tokens: Tokens, n_held: int, n_max: int, n_removable: int) -> Iterator[Found | None]:
        """The prompt that saves the most evaluation of these tokens, or None.

        n_held: leading tokens that need no evaluation anyway; n_max: maximum tokens of a stored prompt.
        """
        lib, handle = _lib(), self._handle
        lib.subkv_store_flush(handle, SECONDS)
        query = QueryStruct(tokens.ctypes.data_as(_i32_p), len(tokens), n_held, n_max, n_removable, 0.0, SECONDS, -1)
        answer = lib.subkv_store_get(handle, identity, ctypes.byref(query))
        self._report()
        if answer is None:
            yield None
            return
        found = Found(lib.subkv_store_found_prompt(answer).contents)
        try:
            yield found
        finally:
            lib.subkv_store_found_free(handle, answer, found.is_refused)

    def common(self, identity: bytes, tokens: Tokens) -> int:
        """The longest common prefix with any stored prompt."""
        return int(_lib().subkv_store_common(self._handle, identity, tokens.ctypes.data_as(_i32_p), len(tokens)))

    def put(self, identity: bytes, tokens: Tokens, state: Bytes, n_removable: int) -> None:
        """Store a copy of a prompt in the background; waits until it fits in the queue."""
        prompt = PromptStruct(tokens.ctypes.data_as(_i32_p), len(tokens), n_removable=n_removable)
        prompt.state[0] = BytesStruct(state.ctypes.data, state.nbytes)
        _lib().subkv_store_put(self._handle, identity, ctypes.byref(prompt), True)
        self._report()

    def flush(self) -> None:
        """Wait until everything is written."""
        _lib().subkv_store_flush(self._handle, SECONDS)
        self._report()

    def n_bytes(self) -> int:
        """Bytes of all files of prompts."""
        self.flush()
        self.common(bytes(N_IDENTITY), np.empty(0, np.int32))  # looks at the folder
        return int(self._stats().bytes)

    def _stats(self) -> StatsStruct:
        stats = StatsStruct()
        _lib().subkv_store_get_stats(self._handle, ctypes.byref(stats))
        return stats

    def _report(self) -> None:
        if self._opened is None:
            return
        _report(self._opened, self.folder)
        n, self._n_damaged = self._n_damaged, self._stats().damaged
        if self._n_damaged > n:
            _warn(self.folder, f"removed {self._n_damaged - n} damaged prompt(s)")


def _warn(folder: Path, sentence: str) -> None:
    warnings.warn(f"prompt cache {folder}: {sentence}", stacklevel=2)


def _report(handle: int, folder: Path) -> None:
    if failure := _lib().subkv_store_failure(handle):
        _warn(folder, failure.decode("utf-8", "replace"))


def _close(handle: int, process: int, folder: Path) -> None:
    if process == os.getpid():
        _lib().subkv_store_flush(handle, SECONDS)
        _report(handle, folder)
        _lib().subkv_store_close(handle)
