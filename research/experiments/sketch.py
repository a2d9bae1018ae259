"""The sketches of libsubkv (kernels/include/subkv/sketch.h): what a stream leaves of its second moment."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
from numpy.typing import NDArray

from research.experiments.bounds import F64
from subkv.base.errors import SubkvError
from subkv.format.adapt import KINDS
from subkv.native.library import Signatures, declare, last_error, load


class SketchParams(ctypes.Structure):
    """subkv_sketch_params."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("d", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("decay", ctypes.c_float),
        ("rate", ctypes.c_float),
    ]


SIGNATURES: Signatures = {  # of runtime/native/include/subkv_adapt.h
    "subkv_sketch_new": (ctypes.c_void_p, [ctypes.POINTER(SketchParams)]),
    "subkv_sketch_free": (None, [ctypes.c_void_p]),
    "subkv_sketch_absorb": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
    "subkv_sketch_top": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]),
}


@functools.cache
def _subkv() -> ctypes.CDLL:
    return declare(load(), SIGNATURES)


class Sketch:
    """One sketch of rows [d]. kind: one of subkv.format.adapt.KINDS; rows: ℓ; rate: Oja's η."""

    def __init__(self, kind: str, d: int, rows: int, rate: float = 0.1) -> None:
        self.d = d
        self._handle = _subkv().subkv_sketch_new(SketchParams(KINDS.index(kind), d, rows, 1.0, rate))
        if not self._handle:
            raise SubkvError("", last_error())

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _subkv().subkv_sketch_free(self._handle)

    def absorb(self, x: NDArray[np.float32]) -> None:
        """Rows x [n, d]."""
        x = np.ascontiguousarray(x, np.float32)
        _subkv().subkv_sketch_absorb(self._handle, x.ctypes.data, len(x))

    def top(self, r: int) -> F64:
        """The r directions of most energy, [r, d] with orthonormal rows. Raises SubkvError for r > ℓ."""
        rows, energy = np.empty((r, self.d)), np.empty(r)
        if not _subkv().subkv_sketch_top(self._handle, r, rows.ctypes.data, energy.ctypes.data):
            raise SubkvError("", last_error())
        return rows
