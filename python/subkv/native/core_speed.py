"""How much of a core this process gets (kernels/include/subkv/core_speed.h)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from subkv.native import library

_double = ctypes.c_double
_out = ctypes.POINTER(_double)
SIGNATURES: library.Signatures = {"subkv_core_speed": (ctypes.c_bool, [_double, _out, _out])}


class CoreSpeed(NamedTuple):
    """clock_ghz: additions that wait for each other, one a cycle. additions_per_cycle: independent ones.

    A virtual processor that shares its core with a busy one has fewer additions at the same clock.
    """

    clock_ghz: float
    additions_per_cycle: float


def core_speed(seconds: float = 0.2) -> CoreSpeed:
    """Measure it on one thread for `seconds`. Raises ImportError as library.load(), MemoryError."""
    clock, additions = _double(), _double()
    if not library.declare(library.load(), SIGNATURES).subkv_core_speed(seconds, clock, additions):
        raise MemoryError(library.last_error())
    return CoreSpeed(round(clock.value, 3), round(additions.value, 2))
