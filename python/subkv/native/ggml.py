"""The native libraries as the converter uses them: libsubkv, llama_cpp, and prototypes for ggml's gguf_* functions.

libllama is bound by llama_cpp; a symbol of libggml-base is found through its handle, because dlsym also searches the
libraries it depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from subkv.base.errors import SubkvError

c_str = ctypes.c_char_p
c_ptr = ctypes.c_void_p


class GgufInitParams(ctypes.Structure):
    """struct gguf_init_params, passed by value."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


Prototypes = dict[str, tuple[Any, list[Any]]]  # function -> (result type, argument types)

_GGUF: Prototypes = {
    "gguf_init_from_file": (c_ptr, [c_str, GgufInitParams]),
    "gguf_init_empty": (c_ptr, []),
    "gguf_free": (None, [c_ptr]),
    "gguf_get_alignment": (ctypes.c_size_t, [c_ptr]),
    "gguf_get_data_offset": (ctypes.c_size_t, [c_ptr]),
    "gguf_get_n_kv": (ctypes.c_int64, [c_ptr]),
    "gguf_find_key": (ctypes.c_int64, [c_ptr, c_str]),
    "gguf_get_key": (c_str, [c_ptr, ctypes.c_int64]),
    "gguf_get_kv_type": (ctypes.c_int, [c_ptr, ctypes.c_int64]),
    "gguf_get_arr_type": (ctypes.c_int, [c_ptr, ctypes.c_int64]),
    "gguf_get_arr_n": (ctypes.c_size_t, [c_ptr, ctypes.c_int64]),
    "gguf_get_arr_data": (c_ptr, [c_ptr, ctypes.c_int64]),
    "gguf_get_val_data": (c_ptr, [c_ptr, ctypes.c_int64]),
    "gguf_get_val_str": (c_str, [c_ptr, ctypes.c_int64]),
    "gguf_get_n_tensors": (ctypes.c_int64, [c_ptr]),
    "gguf_find_tensor": (ctypes.c_int64, [c_ptr, c_str]),
    "gguf_get_tensor_offset": (ctypes.c_size_t, [c_ptr, ctypes.c_int64]),
    "gguf_get_tensor_type": (ctypes.c_int, [c_ptr, ctypes.c_int64]),
    "gguf_get_tensor_size": (ctypes.c_size_t, [c_ptr, ctypes.c_int64]),
    "gguf_get_tensor_ne": (ctypes.POINTER(ctypes.c_int64), [c_ptr, ctypes.c_int64]),
    "gguf_set_val_u32": (None, [c_ptr, c_str, ctypes.c_uint32]),
    "gguf_set_val_u64": (None, [c_ptr, c_str, ctypes.c_uint64]),
    "gguf_set_val_f32": (None, [c_ptr, c_str, ctypes.c_float]),
    "gguf_set_val_str": (None, [c_ptr, c_str, c_str]),
    "gguf_get_meta_size": (ctypes.c_size_t, [c_ptr]),
    "gguf_get_meta_data": (None, [c_ptr, c_ptr]),
}

_LLAMA_LOG: Prototypes = {
    "llama_log_get": (None, [ctypes.POINTER(c_ptr), ctypes.POINTER(c_ptr)]),
    "llama_log_set": (None, [c_ptr, c_ptr]),
}

_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, c_str, c_ptr)
_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class Functions:
    """Own prototypes for a handle's functions, so that no other user of the same handle can change them."""

    def __init__(self, handle: ctypes.CDLL, prototypes: Prototypes) -> None:
        for name, (result, arguments) in prototypes.items():
            address = ctypes.cast(getattr(handle, name), c_ptr).value
            setattr(self, name, ctypes.CFUNCTYPE(result, *arguments)(address or 0))

    def __getattr__(self, name: str) -> Any:  # only reached for a missing name; tells mypy that any may exist
        raise AttributeError(name)


@functools.cache
def subkv() -> ctypes.CDLL:
    """libsubkv with the functions of subkv.h declared. Raises SubkvError when it is not installed."""
    from subkv.native import library as _lib

    try:
        return _lib.load()
    except ImportError as error:
        raise SubkvError("", str(error)) from error


@functools.cache
def llama() -> Any:
    """The llama_cpp low-level module, bound to the libllama that libsubkv was built with."""
    subkv()  # first: it decides which libllama llama_cpp binds
    from llama_cpp import llama_cpp

    return llama_cpp


@functools.cache
def gguf() -> Any:
    """ggml's gguf_* functions."""
    return Functions(llama()._lib, _GGUF)


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect what llama.cpp logs at level error inside the block, instead of printing anything."""
    lines: list[str] = []

    def collect(level: int, text: bytes | None, _user: Any) -> None:
        if level == _LOG_LEVEL_ERROR and text:
            lines.append(text.decode("utf-8", "replace").strip())

    functions = Functions(llama()._lib, _LLAMA_LOG)
    callback, user = c_ptr(), c_ptr()
    functions.llama_log_get(ctypes.byref(callback), ctypes.byref(user))
    own = _LOG_CALLBACK(collect)
    functions.llama_log_set(ctypes.cast(own, c_ptr), None)
    try:
        yield lines
    finally:
        functions.llama_log_set(callback, user)
