"""The adaptive coder of libsubkv (runtime/native/adapt.h) over whole texts, one head at a time."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter import metadata, native
from converter.calib_io import Calibration
from converter.codec import F32
from converter.errors import ConverterError
from converter.gguf_io import Gguf, write_sidecar
from converter.layout import Account
from converter.metadata import CodedLayer, Settings

KINDS = ("covariance", "fd", "oja")  # in the order of subkv.h


@dataclass(frozen=True)
class Adapt:
    """When a head gets a new basis, and from which sketch; runtime/native/adapt.h has the details.

    kind: of the sketch; rank, rows: its r and ℓ, 0: by default; decay: of a row's weight per token; rate: Oja's η.
    block: B; length: L, 0: never for its length; warm: W; max_chunks: J_max; tau: relative residual of a block that
    asks for a new basis, 1: none does; gain: a new basis must bring it to this times the old one's.
    """

    kind: str = "covariance"
    rank: int = 0
    rows: int = 0
    decay: float = 1.0
    rate: float = 0.05
    block: int = 32
    length: int = 256
    warm: int = 256
    max_chunks: int = 4
    tau: float = 1.0
    gain: float = 0.97


@dataclass(frozen=True)
class Replayed:
    """What became of n rows.

    seen [n, d]: what attention sees. chunk_of [n]: slot of a row's basis, 0: the static one. rho [n]: relative residual
    of a row's block when it was coded, 0 where it was not coded as one. stats: fields of subkv_adapt_stats.
    """

    seen: F32
    chunk_of: NDArray[np.int32]
    rho: F32
    stats: dict[str, int]


class Layout:
    """A subkv_layout of libsubkv."""

    def __init__(self, path: Path) -> None:
        self.handle = native.subkv().subkv_layout_load(str(path).encode())
        if not self.handle:
            raise ConverterError(_last_error())

    def close(self) -> None:
        native.subkv().subkv_layout_free(self.handle)

    def replay(self, params: Adapt, il: int, head: int, value: bool, x: F32) -> Replayed:
        """Rows x [n, d] of positions 0 to n − 1 through the coder. Raises ConverterError."""
        from subkv import _lib

        x = np.ascontiguousarray(x, dtype=np.float32)
        out = Replayed(np.empty_like(x), np.empty(len(x), np.int32), np.empty(len(x), np.float32), {})
        stats = _lib.AdaptStats()
        arrays = (out.seen.ctypes.data, out.chunk_of.ctypes.data, out.rho.ctypes.data)
        if not native.subkv().subkv_adapt_replay(
            self.handle, native_params(params), il, head, value, x.ctypes.data, len(x), *arrays, stats
        ):
            raise ConverterError(_last_error())
        out.stats.update({field[0]: int(getattr(stats, field[0])) for field in stats._fields_})
        return out


def native_params(params: Adapt) -> ctypes.Structure:
    """subkv_adapt_params. Raises ConverterError for an unknown kind; the rest is checked by libsubkv."""
    from subkv import _lib

    if params.kind not in KINDS:
        raise ConverterError(f"adapt: kind: expected one of {', '.join(KINDS)}, found {params.kind!r}")
    fields: dict[str, Any] = {**vars(params), "kind": KINDS.index(params.kind)}
    return _lib.AdaptParams(**fields)


@contextlib.contextmanager
def loaded(
    base: Gguf, calibration: Calibration, settings: Settings, counted: Account, layers: Sequence[CodedLayer]
) -> Iterator[Layout]:
    """Coded layers as libsubkv reads them from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sidecar.gguf"
        values = metadata.keys(layers, calibration, settings, counted, "converter.adapt")
        write_sidecar("--adapt", base, path, values)
        layout = Layout(path)
    try:
        yield layout
    finally:
        layout.close()


def _last_error() -> str:
    return (native.subkv().subkv_last_error() or b"unknown error").decode("utf-8", "replace")
