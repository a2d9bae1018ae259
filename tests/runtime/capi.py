"""libsubkv with the functions of all headers of runtime/native declared."""

from __future__ import annotations

import ctypes
import functools

from subkv.format.adapt import Params, has_adaptive_bases
from subkv.native.library import Signatures, declare
from subkv.native.library import load as public

_ptr, _i32, _i64, _bool = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_bool
_f64_p = ctypes.POINTER(ctypes.c_double)

TEST: Signatures = {  # of subkv_test.h
    "subkv_ops_count": (_i32, []),
    "subkv_ops_name": (ctypes.c_char_p, [_i32]),
    "subkv_ops_table": (_ptr, [_i32]),
    "subkv_ops_function": (_ptr, [ctypes.c_char_p]),
}
ADAPT_TEST: Signatures = {  # of capi/adapt/subkv_adapt_test.h
    "subkv_sketch_bytes": (_i64, [_ptr]),
    "subkv_sketch_count": (_i64, [_ptr]),
    "subkv_sketch_energy": (ctypes.c_double, [_ptr]),
    "subkv_sketch_rows": (_i64, [_ptr, _ptr]),
    "subkv_eigen": (_bool, [_ptr, _ptr, _i32]),
    "subkv_adapt_new": (_ptr, [_ptr, ctypes.POINTER(Params), _i32, _i32, _bool]),
    "subkv_adapt_free": (None, [_ptr]),
    "subkv_adapt_push": (_bool, [_ptr, _ptr, _i64]),
    "subkv_adapt_read": (_i64, [_ptr, _ptr, _ptr, _ptr]),
    "subkv_adapt_query": (_bool, [_ptr, _i32, _ptr, _ptr]),
    "subkv_adapt_lift": (_bool, [_ptr, _i32, _ptr, _ptr]),
    "subkv_adapt_save": (_i64, [_ptr, _ptr, _i64]),
    "subkv_adapt_restore": (_bool, [_ptr, _ptr, _i64]),
}


def research() -> Signatures:
    """subkv_research.h, declared by the programs that call it."""
    from research.experiments import live
    from research.float32 import adaptive
    from subkv.native import core_speed

    return {**live.SIGNATURES, **adaptive.PROJECT, **core_speed.SIGNATURES}


def adapt() -> Signatures:
    """include/subkv_adapt.h, declared by the modules that call it."""
    from research.experiments import live, sketch
    from research.float32 import adaptive
    from subkv.format.adapt import SIGNATURES

    return {**SIGNATURES, **live.SKETCH, **adaptive.REPLAY, **sketch.SIGNATURES}


@functools.cache
def load() -> ctypes.CDLL:
    adaptive = {**adapt(), **ADAPT_TEST} if has_adaptive_bases() else {}
    return declare(public(), {**research(), **adaptive, **TEST})
