"""The layout functions of runtime/native/subkv.h through ctypes, for tests."""

from __future__ import annotations

import ctypes
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class MetadataError(Exception):
    """subkv_last_error() of a refused file."""


@cache
def library() -> ctypes.CDLL:
    """libsubkv with the argument types of the layout functions."""
    from subkv import _lib

    lib: ctypes.CDLL = _lib.load()
    lib.subkv_last_error.restype = ctypes.c_char_p
    lib.subkv_layout_present.argtypes = [ctypes.c_char_p]
    lib.subkv_layout_present.restype = ctypes.c_int32
    lib.subkv_layout_load.argtypes = [ctypes.c_char_p]
    lib.subkv_layout_load.restype = ctypes.c_void_p
    lib.subkv_layout_free.argtypes = [ctypes.c_void_p]
    lib.subkv_layout_free.restype = None
    lib.subkv_layout_json.argtypes = [ctypes.c_void_p]
    lib.subkv_layout_json.restype = ctypes.c_char_p
    lib.subkv_layout_fingerprint.argtypes = [ctypes.c_void_p]
    lib.subkv_layout_fingerprint.restype = ctypes.c_char_p
    lib.subkv_layout_basis.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    lib.subkv_layout_basis.restype = ctypes.c_int64
    return lib


def last_error() -> str:
    """The sentence of the last failure; always valid UTF-8."""
    return str(library().subkv_last_error().decode())


class Layout:
    """A loaded layout."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.json: dict[str, Any] = json.loads(library().subkv_layout_json(handle).decode())
        self.fingerprint: str = library().subkv_layout_fingerprint(handle).decode()

    def __del__(self) -> None:
        library().subkv_layout_free(self.handle)

    def basis(self, il: int, head: int, value: bool, decode: bool, n: int) -> npt.NDArray[np.float32]:
        """subkv_layout_basis into room for n values. Raises MetadataError."""
        out = np.full(n, np.nan, np.float32)
        found = library().subkv_layout_basis(self.handle, il, head, value, decode, out.ctypes.data, n)
        if found < 0:
            raise MetadataError(last_error())
        return out[:found]


def load(path: Path | None) -> Layout:
    """Reads a file (None: a null pointer). Raises MetadataError."""
    handle = library().subkv_layout_load(os.fsencode(path) if path else None)
    if not handle:
        raise MetadataError(last_error())
    return Layout(handle)


def present(path: Path) -> int:
    """subkv_layout_present."""
    return int(library().subkv_layout_present(os.fsencode(path)))
