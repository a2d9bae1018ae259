"""Makes libsubkv usable in forked children, where OpenMP would wait forever for threads that the child does not have.

Therefore OpenMP's threads are released before every fork; the next computation starts new ones.
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
    """The library of ggml's CPU backend, if ggml has loaded it at run time (GGML_BACKEND_DL)."""
    find = lib.ggml_backend_reg_by_name
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    backend = find(b"CPU")
    symbol = _Symbol()
    if not backend or not lib.dladdr(ctypes.c_void_p(backend), ctypes.byref(symbol)):
        return None
    return ctypes.CDLL(os.fsdecode(symbol.file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def survive_forks(lib: ctypes.CDLL) -> None:
    """Register the release of threads. lib: libllama; symbols of libraries that it links are visible, too."""
    if not hasattr(os, "register_at_fork"):
        return
    backend: ctypes.CDLL | None = lib if hasattr(lib, "ggml_backend_cpu_init") else None  # else loaded later

    def pause() -> None:
        nonlocal backend
        backend = backend or _loaded_backend(lib)
        release: Callable[[int], int] | None = getattr(backend, PAUSE, None)
        if release is not None:  # built with OpenMP
            release(SOFT)

    os.register_at_fork(before=pause)
