"""A forked child can compute: OpenMP believes that its threads are still there, and waits for them forever.

So they are given back before every fork; the next computation, in the parent or in the child, starts new ones.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

PAUSE = "omp_pause_resource_all"
SOFT = 1  # omp_pause_soft


class _Symbol(ctypes.Structure):
    """Dl_info of <dlfcn.h>."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _loaded_backend(lib: ctypes.CDLL) -> ctypes.CDLL | None:
    """The library from which ggml has loaded its CPU backend (GGML_BACKEND_DL); None before that."""
    registered = lib.ggml_backend_reg_by_name
    registered.restype, registered.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    backend = registered(b"CPU")
    symbol = _Symbol()
    if not backend or not lib.dladdr(ctypes.c_void_p(backend), ctypes.byref(symbol)):
        return None
    return ctypes.CDLL(os.fsdecode(symbol.file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def survive_forks(lib: ctypes.CDLL) -> None:
    """`lib` is libsubkv: what it is linked with is searched, too."""
    if not hasattr(os, "register_at_fork"):
        return
    backend: ctypes.CDLL | None = lib if hasattr(lib, "ggml_backend_cpu_init") else None  # else loaded with a model

    def pause() -> None:
        nonlocal backend
        backend = backend or _loaded_backend(lib)
        release: Callable[[int], int] | None = getattr(backend, PAUSE, None)
        if release is not None:  # built with OpenMP
            release(SOFT)

    os.register_at_fork(before=pause)
