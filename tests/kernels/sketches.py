"""The sketch functions of libsubkv through ctypes, for tests."""

from __future__ import annotations

import capi
import numpy as np
import numpy.typing as npt

from research.experiments.sketch import SketchParams
from subkv.native.library import last_error

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
COVARIANCE, FREQUENT_DIRECTIONS, OJA = range(3)
KINDS = (COVARIANCE, FREQUENT_DIRECTIONS, OJA)


class Refused(Exception):
    """subkv_last_error()."""


class Sketch:
    """One sketch."""

    def __init__(self, kind: int, d: int, rows: int, decay: float = 1.0, rate: float = 0.1) -> None:
        self.d, self.rows = d, rows
        self.handle = capi.load().subkv_sketch_new(SketchParams(kind, d, rows, decay, rate))
        if not self.handle:
            raise Refused(last_error())

    def __del__(self) -> None:
        if self.handle:
            capi.load().subkv_sketch_free(self.handle)

    @property
    def count(self) -> int:
        return int(capi.load().subkv_sketch_count(self.handle))

    @property
    def energy(self) -> float:
        return float(capi.load().subkv_sketch_energy(self.handle))

    @property
    def bytes(self) -> int:
        return int(capi.load().subkv_sketch_bytes(self.handle))

    def absorb(self, x: F32) -> int:
        """x [n, d]; the number of rows left out."""
        x = np.ascontiguousarray(x, np.float32)
        assert x.shape[1] == self.d
        return int(capi.load().subkv_sketch_absorb(self.handle, x.ctypes.data, len(x)))

    def top(self, r: int) -> tuple[F64, F64]:
        """Rows [r, d] and energies [r]. Raises Refused."""
        rows, energy = np.empty((max(r, 1), self.d)), np.empty(max(r, 1))
        if not capi.load().subkv_sketch_top(self.handle, r, rows.ctypes.data, energy.ctypes.data):
            raise Refused(last_error())
        return rows, energy

    def sketch_rows(self) -> F64:
        """S [in use, d] of frequent directions."""
        s = np.empty((2 * self.rows, self.d), np.float32)
        return s[: capi.load().subkv_sketch_rows(self.handle, s.ctypes.data)].astype(np.float64)


def eigen(a: F64) -> tuple[F64, F64]:
    """Eigenvalues, largest first, and eigenvectors as rows. Raises Refused."""
    vectors = np.ascontiguousarray(a, np.float64).copy()
    values = np.empty(len(a))
    if not capi.load().subkv_eigen(vectors.ctypes.data, values.ctypes.data, len(a)):
        raise Refused(last_error())
    return values, vectors
