"""The adaptive coder of libsubkv (runtime/native/adapt/adapt.h) over whole texts, one head at a time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import CacheError, SubkvError
from subkv.format import metadata
from subkv.format.adapt import KINDS, Adapt, HeadStats, Params, has_adaptive_bases
from subkv.format.arrays import F32, F64
from subkv.format.bases import CodedHead, CodedLayer
from subkv.format.calibration import Calibration
from subkv.format.codec import rank
from subkv.format.layout import Layout
from subkv.format.metadata import Account, Settings
from subkv.native import library as _lib
from subkv.native.gguf import Gguf, write_sidecar
from subkv.plan.predict import reconstructed

_ptr, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

PROJECT: _lib.Signatures = {  # of runtime/native/capi/subkv_research.h
    "subkv_layout_project": (_i64, [_ptr, _i32, _i32, ctypes.c_bool, _ptr, _i64, _ptr])
}
REPLAY: _lib.Signatures = {  # of runtime/native/include/subkv_adapt.h
    "subkv_adapt_replay": (
        ctypes.c_bool,
        [_ptr, ctypes.POINTER(Params), _i32, _i32, ctypes.c_bool, _ptr, _i64, _ptr, _ptr, _ptr]
        + [ctypes.POINTER(HeadStats)],
    ),
}


@functools.cache
def _subkv() -> ctypes.CDLL:
    return _lib.declare(_lib.load(), {**PROJECT, **(REPLAY if has_adaptive_bases() else {})})


def native_params(params: Adapt) -> Params:
    """subkv_adapt_params. Raises CacheError for an unknown kind."""
    if params.kind not in KINDS:
        raise CacheError("adapt", f"kind: expected one of {', '.join(KINDS)}, found {params.kind!r}")
    return Params(**{**vars(params), "kind": KINDS.index(params.kind)})


def anchored(x: F64, end: int, window: int, lookahead: int) -> tuple[F64, F64]:
    """The directions [n, n], as rows, and energies [n] of a basis that the block before row `end` opens: the reference.

    x [m, n]: coefficients in the file's bases. The anchoring window has the `window` rows up to row end + lookahead; 0:
    all rows (papers/online-subspace-projection.md §7).
    """
    last = end + lookahead
    rows = x[max(0, last - window) if window else 0 : last]
    energy, vectors = np.linalg.eigh(rows.T @ rows)
    return vectors.T[::-1], energy[::-1]


@dataclass(frozen=True)
class Replayed:
    """The coder's result for n rows.

    seen [n, d]: the rows as attention reads them. chunk_of [n]: slot of a row's basis, 0: the static one. rho [n]:
    relative residual of a row's block when it was coded, 0 where it was not coded as one. stats: fields of
    subkv_adapt_stats.
    """

    seen: F32
    chunk_of: NDArray[np.int32]
    rho: F32
    stats: dict[str, int]


class ResearchLayout(Layout):
    """A layout whose rows can be coded without a context."""

    def project(self, il: int, head: int, value: bool, x: F32) -> F32:
        """Coefficients [n, rank] of rows x [n, d], before they are quantized. Raises SubkvError."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        out = np.empty_like(x)  # the rank is at most d
        r = _subkv().subkv_layout_project(self.handle, il, head, value, x.ctypes.data, len(x), out.ctypes.data)
        if r < 0:
            raise SubkvError("", _lib.last_error())
        return out.reshape(-1)[: len(x) * r].reshape(len(x), r)

    def replay(self, params: Adapt, il: int, head: int, value: bool, x: F32) -> Replayed:
        """Rows x [n, d] of positions 0 to n − 1 through the coder. Raises SubkvError."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        seen, chunk_of, rho = np.empty_like(x), np.empty(len(x), np.int32), np.empty(len(x), np.float32)
        stats = HeadStats()
        arrays = (seen.ctypes.data, chunk_of.ctypes.data, rho.ctypes.data)
        if not _subkv().subkv_adapt_replay(
            self.handle, native_params(params), il, head, value, x.ctypes.data, len(x), *arrays, stats
        ):
            raise SubkvError("", _lib.last_error())
        named = {name: getattr(stats, name) for name, *_ in stats._fields_ if name != "residual"}  # rho has it
        return Replayed(seen, chunk_of, rho, named)


def coded_sides(k: F32, v: F32, heads: Sequence[CodedHead], sides: str) -> tuple[F32, F32]:
    """k, v [n_head_kv, n, d] of a coded layer as attention reads them; sides that are not in `sides` stay exact."""
    if "k" in sides:
        k = np.stack([reconstructed(rows, head.k, head.gamma) for rows, head in zip(k, heads, strict=True)])
    if "v" in sides:
        v = np.stack([reconstructed(rows, head.v) for rows, head in zip(v, heads, strict=True)])
    return k, v


@dataclass(eq=False)
class AdaptiveCoder:
    """Coded layers that adapt to the text, as attention reads them; a Coder of reference.py.

    Every call is a separate text, from an empty cache. Rows are those at the end of the text: early queries, too, read
    rows that a merge has coded again later, which overestimates the error. sides: coded; adapted: those of them that
    adapt. tau: of single heads, (il, head), instead of that of `params`.
    """

    layout: ResearchLayout
    layers: Sequence[CodedLayer]
    sides: str
    adapted: str
    params: Adapt
    tau: Mapping[tuple[int, int], float] | None = None
    # (rows, bytes of a basis, stats) of every head and text
    _seen: list[tuple[int, int, dict[str, int]]] = field(default_factory=list, init=False)

    def clear(self) -> None:
        """Reset the counts."""
        self._seen.clear()

    def __call__(self, il: int, k: F32, v: F32) -> tuple[F32, F32]:
        layer = next((layer for layer in self.layers if layer.shape.il == il), None)
        if layer is None:
            return k, v
        k, v = coded_sides(k, v, layer.heads, "".join(side for side in self.sides if side not in self.adapted))
        seen = {"k": k, "v": v}
        for side in self._adapting():
            heads = []
            for h, x in enumerate(seen[side]):
                own = dataclasses.replace(self.params, tau=(self.tau or {}).get((il, h), self.params.tau))
                replayed = self.layout.replay(own, il, h, side == "v", x)
                bands = getattr(layer.heads[h], side).bands
                n = rank(bands)
                self._seen.append((len(x), 2 * n * n + 4 * len(bands), replayed.stats))
                heads.append(replayed.seen)
            seen[side] = np.stack(heads)
        return seen["k"], seen["v"]

    def _adapting(self) -> list[str]:
        return [side for side in "kv" if side in self.sides and side in self.adapted]

    def bits(self, context: int) -> float:
        """Bits per K/V element, at `context` tokens, of the chunks' bases and the sketches.

        8 Σ (alive · bytes of a basis + bytes of the sketch) / (elements of a token · context), summed over the heads
        and sides that adapt, averaged over the texts. alive: chunks at the end of a text of n tokens, at most J_max,
        times max(1, context/n) for those that the rest of the context would open.
        """
        adapting = len(self._adapting()) * sum(len(layer.heads) for layer in self.layers)
        texts = len(self._seen) / max(1, adapting)
        total = 0.0
        for n, basis, stats in self._seen:
            alive = min(self.params.max_chunks, stats["n_chunks"] * max(1.0, context / n))
            complete = alive == self.params.max_chunks and not self.params.merge  # then there is no sketch any more
            total += 8.0 * (alive * basis + (0 if complete else stats["bytes_sketch"]))
        elements = sum(layer.elements for layer in self.layers)
        return total / max(texts, 1.0) / (elements * context)

    def mean(self, name: str) -> float:
        """Mean of a field of subkv_adapt_stats per head, side and text."""
        return float(np.mean([stats[name] for _, _, stats in self._seen])) if self._seen else 0.0


@contextlib.contextmanager
def loaded(
    base: Gguf, calibration: Calibration, settings: Settings, counted: Account, layers: Sequence[CodedLayer]
) -> Iterator[ResearchLayout]:
    """The coded layers, read by libsubkv from a temporary file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sidecar.gguf"
        write_sidecar(base, path, metadata.keys(layers, calibration, settings, counted))
        layout = ResearchLayout(path)
    with layout:
        yield layout
