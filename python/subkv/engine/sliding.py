"""Which layers of a model have a sliding window, as llama.cpp knows; and their type while others are measured."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from subkv.native.binding import C, captured_log
from subkv.native.library import declare

_LLAMA = declare(
    C._lib,
    {
        "llama_subkv_slides": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int32]),
        "llama_subkv_keep_sliding_f16": (None, []),
    },
)


def keep_f16() -> None:
    """Sliding layers keep f16 in this thread's next context, whatever its cache type."""
    _LLAMA.llama_subkv_keep_sliding_f16()


def sliding_layers(model: Path) -> frozenset[int]:
    """Of a model file, from which no weights are read; empty if llama.cpp cannot load it."""
    params = C.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = C.LLAMA_LOAD_MODE_NONE
    with captured_log(forward=False):
        C.llama_backend_init()
        handle = C.llama_model_load_from_file(os.fsencode(model), params)
    if not handle:
        return frozenset()
    try:
        return frozenset(il for il in range(C.llama_model_n_layer(handle)) if _LLAMA.llama_subkv_slides(handle, il))
    finally:
        with captured_log(forward=False):
            C.llama_model_free(handle)
