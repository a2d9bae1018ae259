"""The number of threads, and blocks in which numpy uses one thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

MAX_THREADS = 512  # of ggml, which ends the process with more


def default_threads(requested: int | None = None) -> int:
    """`requested` as llama.cpp reads -t: None or not positive means all processors that this process may use."""
    if requested is not None and requested > 0:
        return requested
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Functions that read and set the number of threads of numpy's OpenBLAS; None if numpy uses another library."""
    module = importlib.import_module("numpy.linalg._umath_linalg")  # linked with OpenBLAS
    wheel = Path(str(module.__file__)).parents[2] / "numpy.libs"  # on Windows only the library itself has the symbols
    for file in (str(module.__file__), *map(str, wheel.glob("*openblas*"))):
        library = ctypes.CDLL(file)
        for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "")):
            getter, setter = (f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set"))
            if hasattr(library, setter):
                return getattr(library, getter), getattr(library, setter)
    return None


class _OneThread(contextlib.ContextDecorator):
    """Counts the active blocks in all threads. The first one limits BLAS to one thread; the last one restores it."""

    def __init__(self) -> None:
        self.lock, self.n_blocks, self.n_before = threading.Lock(), 0, 1

    def __enter__(self) -> None:
        with self.lock:
            blas = _openblas()
            if blas is not None and self.n_blocks == 0:
                read, change = blas
                self.n_before = read()
                change(1)
            self.n_blocks += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            blas = _openblas()
            self.n_blocks -= 1
            if blas is not None and self.n_blocks == 0:
                blas[1](self.n_before)


_one_thread = _OneThread()


def one_blas_thread() -> _OneThread:
    """Inside a block or decorated function, numpy's matrix functions use only the calling thread, in the whole process.

    For many small matrices of a head's size, threads cost more than they save, and on busy cores they wait for each
    other.
    """
    return _one_thread
