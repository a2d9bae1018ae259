"""What becomes of memory that the process has freed."""

from __future__ import annotations

import ctypes
import sys

M_MMAP_THRESHOLD, LARGE = -3, 1 << 20  # of mallopt; bytes


def return_freed() -> None:
    """Give blocks of 1 MiB and more back to the system when they are freed, from now on and in the whole process.

    glibc would keep those of up to 32 MiB for later ones, among small blocks that then hold them in place: 240 MB of an
    8B model's matrices, and after twenty minutes a quarter of a server's memory.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
