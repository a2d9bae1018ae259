"""The layout of a converted model or a sidecar as libsubkv reads it: bands, window, bases, fingerprint."""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import CacheError, SubkvError
from subkv.format.adapt import Adapt, native_params
from subkv.format.arrays import F32
from subkv.native import library as _lib
from subkv.native.binding import native


_ptr, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

SIGNATURES: _lib.Signatures = {  # of runtime/native/subkv_research.h
    "subkv_layout_project": (_i64, [_ptr, _i32, _i32, ctypes.c_bool, _ptr, _i64, _ptr]),
    "subkv_adapt_replay": (
        ctypes.c_bool,
        [_ptr, ctypes.POINTER(_lib.AdaptParams), _i32, _i32, ctypes.c_bool, _ptr, _i64, _ptr, _ptr, _ptr]
        + [ctypes.POINTER(_lib.AdaptStats)],
    ),
}


@dataclass(frozen=True)
class Replayed:
    """What became of n rows.

    seen [n, d]: what attention sees. chunk_of [n]: slot of a row's basis, 0: the static one. rho [n]: relative residual
    of a row's block when it was coded, 0 where it was not coded as one. stats: fields of subkv_adapt_stats.
    """

    seen: F32
    chunk_of: NDArray[np.int32]
    rho: F32
    stats: dict[str, int]


class Layout:
    """A subkv_layout. Use as a context manager, or close() it.

    handle: of libsubkv. description: everything but the matrices (FORMAT.md §5). Raises SubkvError with libsubkv's
    sentence, which names the key, when the file cannot be read or any key is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._library = _lib.declare(native(), SIGNATURES)
        self.handle = self._library.subkv_layout_load(os.fsencode(path))
        if not self.handle:
            raise CacheError("path", _lib.last_error())
        self.description: dict[str, Any] = json.loads(self._library.subkv_layout_json(self.handle).decode("utf-8"))

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it; nothing that was made of it may live any more."""
        self._library.subkv_layout_free(self.handle)
        self.handle = None

    @property
    def fingerprint(self) -> str:
        return str(self.description["fingerprint"])

    def project(self, il: int, head: int, value: bool, x: F32) -> F32:
        """Coefficients [n, rank] of rows x [n, d], before they are quantized. Raises SubkvError."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        out = np.empty_like(x)  # the rank is at most d
        rank = self._library.subkv_layout_project(self.handle, il, head, value, x.ctypes.data, len(x), out.ctypes.data)
        if rank < 0:
            raise SubkvError("", _lib.last_error())
        return out.reshape(-1)[: len(x) * rank].reshape(len(x), rank)

    def replay(self, params: Adapt, il: int, head: int, value: bool, x: F32) -> Replayed:
        """Rows x [n, d] of positions 0 to n − 1 through the adaptive coder. Raises SubkvError."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        out = Replayed(np.empty_like(x), np.empty(len(x), np.int32), np.empty(len(x), np.float32), {})
        stats = _lib.AdaptStats()
        arrays = (out.seen.ctypes.data, out.chunk_of.ctypes.data, out.rho.ctypes.data)
        if not self._library.subkv_adapt_replay(
            self.handle, native_params(params), il, head, value, x.ctypes.data, len(x), *arrays, stats
        ):
            raise SubkvError("", _lib.last_error())
        named = {name: getattr(stats, name) for name, *_ in stats._fields_ if name != "residual"}  # rho has it
        out.stats.update(named)
        return out


def present(path: Path) -> bool:
    """Whether a GGUF carries subkv.* keys. Raises SubkvError when it cannot be read."""
    found: int = native().subkv_layout_present(os.fsencode(path))
    if found < 0:
        raise CacheError("path", _lib.last_error())
    return found > 0
