"""Returns freed memory to the system."""

from __future__ import annotations

import ctypes
import sys

M_MMAP_THRESHOLD, LARGE = -3, 1 << 20  # of mallopt; bytes


def return_freed() -> None:
    """From now on, return freed blocks of at least 1 MiB to the system, in the whole process.

    By default, glibc keeps freed blocks of up to 32 MiB: 240 MB for the matrices of an 8B model, and a quarter of a
    server's memory after twenty minutes.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
