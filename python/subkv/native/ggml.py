"""Prototypes of ggml's gguf_* functions, which llama_cpp does not bind."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

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


class Functions:
    """Own prototypes for a handle's functions, so that no other user of the same handle can change them.

    libllama is bound by llama_cpp; a symbol of libggml-base is found through its handle, because dlsym also searches
    the libraries it depends on.
    """

    def __init__(self, handle: ctypes.CDLL, prototypes: Prototypes) -> None:
        for name, (result, arguments) in prototypes.items():
            address = ctypes.cast(getattr(handle, name), c_ptr).value
            setattr(self, name, ctypes.CFUNCTYPE(result, *arguments)(address or 0))

    def __getattr__(self, name: str) -> Any:  # only reached for a missing name; tells mypy that any may exist
        raise AttributeError(name)


@functools.cache
def gguf() -> Any:
    """ggml's gguf_* functions."""
    from subkv.native.binding import C  # loads the native libraries: not for a --help

    return Functions(C._lib, _GGUF)
