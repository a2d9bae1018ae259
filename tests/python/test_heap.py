"""Freed memory is returned to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from subkv.base.heap import return_freed
if sys.argv[1] == "returned":
    return_freed()
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
for _ in range(9):  # glibc learns from what is freed to keep blocks of its size
    block, beside = bytearray(8 << 20), bytearray(64 << 10)
    del block
print(mallinfo2().fordblks >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or later")
@pytest.mark.parametrize("how", ["kept", "returned"])
def test_large_blocks_are_returned(how: str) -> None:
    """kept: glibc's default, to show that the test can fail."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert (int(done.stdout) >= 8) == (how == "kept")
