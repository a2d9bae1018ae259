"""Prototypes of ggml's gguf_* functions, which llama_cpp does not bind."""

from __future__ import annotations

import ctypes
import functools

from subkv.native import library

c_str = ctypes.c_char_p
c_ptr = ctypes.c_void_p


class GgufInitParams(ctypes.Structure):
    """struct gguf_init_params, passed by value."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_GGUF: library.Signatures = {
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


@functools.cache
def gguf() -> ctypes.CDLL:
    """ggml's gguf_* functions, which the handle of libsubkv finds in what it is linked with."""
    return library.declare(library.load(), _GGUF)
