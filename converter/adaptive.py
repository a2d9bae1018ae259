"""The adaptive coder of libsubkv (runtime/native/adapt.h) over whole texts, one head at a time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import SubkvError
from subkv.format import metadata
from subkv.format.adapt import Adapt, native_params
from subkv.format.arrays import F32
from subkv.format.bases import CodedLayer
from subkv.format.calibration import Calibration
from subkv.format.codec import rank
from subkv.format.layout import Layout
from subkv.format.metadata import Account, Settings
from subkv.native import library as _lib
from subkv.native.gguf import Gguf, write_sidecar
from subkv.plan.predict import reconstructed

_ptr, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

SIGNATURES: _lib.Signatures = {  # of runtime/native/subkv_research.h
    "subkv_layout_project": (_i64, [_ptr, _i32, _i32, ctypes.c_bool, _ptr, _i64, _ptr]),
    "subkv_adapt_replay": (
        ctypes.c_bool,
        [_ptr, ctypes.POINTER(_lib.AdaptParams), _i32, _i32, ctypes.c_bool, _ptr, _i64, _ptr, _ptr, _ptr]
        + [ctypes.POINTER(_lib.AdaptStats)],
    ),
}


@functools.cache
def _subkv() -> ctypes.CDLL:
    return _lib.declare(_lib.load(), SIGNATURES)


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


class ResearchLayout(Layout):
    """A layout whose rows can be coded apart from a context."""

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
        out = Replayed(np.empty_like(x), np.empty(len(x), np.int32), np.empty(len(x), np.float32), {})
        stats = _lib.AdaptStats()
        arrays = (out.seen.ctypes.data, out.chunk_of.ctypes.data, out.rho.ctypes.data)
        if not _subkv().subkv_adapt_replay(
            self.handle, native_params(params), il, head, value, x.ctypes.data, len(x), *arrays, stats
        ):
            raise SubkvError("", _lib.last_error())
        named = {name: getattr(stats, name) for name, *_ in stats._fields_ if name != "residual"}  # rho has it
        out.stats.update(named)
        return out


class AdaptiveCoder:
    """What attention sees through coded layers that adapt to the text; a Coder of reference.py.

    Every call is a text of its own, from an empty cache. Rows are those at the end of the text: what a merge coded anew
    late is seen so by early queries, too, which is the worse for it. sides: coded; adapted: those of them that adapt.
    tau: of single heads, (il, head), instead of that of `params`.
    """

    def __init__(
        self,
        layout: ResearchLayout,
        layers: Sequence[CodedLayer],
        sides: str,
        adapted: str,
        params: Adapt,
        tau: Mapping[tuple[int, int], float] | None = None,
    ) -> None:
        self._layout, self._sides, self._adapted, self._params = layout, sides, adapted, params
        self._tau = tau or {}
        self._layers = {layer.shape.il: layer for layer in layers}
        self._elements = sum(layer.shape.elements for layer in layers)
        self._seen: list[tuple[int, int, dict[str, int]]] = []  # (rows, bytes of a basis, stats) of every head and text

    def clear(self) -> None:
        """Forget what was counted."""
        self._seen.clear()

    def __call__(self, il: int, k: F32, v: F32) -> tuple[F32, F32]:
        layer = self._layers.get(il)
        if layer is None:
            return k, v
        out = []
        for side, rows in (("k", k), ("v", v)):
            if side not in self._sides:
                out.append(rows)
                continue
            heads = []
            for h, x in enumerate(rows):
                basis = layer.heads[h].k if side == "k" else layer.heads[h].v
                if side in self._adapted:
                    own = dataclasses.replace(self._params, tau=self._tau.get((il, h), self._params.tau))
                    replayed = self._layout.replay(own, il, h, side == "v", x)
                    n = rank(basis.bands)
                    self._seen.append((len(x), 2 * n * n + 4 * len(basis.bands), replayed.stats))
                    heads.append(replayed.seen)
                else:
                    heads.append(reconstructed(x, basis, layer.heads[h].gamma if side == "k" else 1.0))
            out.append(np.stack(heads))
        return out[0], out[1]

    def bits(self, context: int) -> float:
        """Bits per K/V element, at `context` tokens, of the chunks' bases and the sketches.

        8 Σ (alive · bytes of a basis + bytes of the sketch) / (elements of a token · context), summed over the heads
        and sides that adapt, averaged over the texts. alive: chunks at the end of a text of n tokens, at most J_max,
        times max(1, context/n) for those that the rest of the context would open.
        """
        texts = len(self._seen) / max(1, self._heads())
        total = 0.0
        for n, basis, stats in self._seen:
            alive = min(self._params.max_chunks, stats["n_chunks"] * max(1.0, context / n))
            complete = alive == self._params.max_chunks and not self._params.merge  # then there is no sketch any more
            total += 8.0 * (alive * basis + (0 if complete else stats["bytes_sketch"]))
        return total / max(texts, 1.0) / (self._elements * context)

    def _heads(self) -> int:
        """Heads and sides that adapt."""
        adapted = sum(side in self._sides for side in self._adapted)
        return adapted * sum(len(layer.heads) for layer in self._layers.values())

    def mean(self, name: str) -> float:
        """Mean of a field of subkv_adapt_stats per head, side and text."""
        return float(np.mean([stats[name] for _, _, stats in self._seen])) if self._seen else 0.0


@contextlib.contextmanager
def loaded(
    base: Gguf, calibration: Calibration, settings: Settings, counted: Account, layers: Sequence[CodedLayer]
) -> Iterator[ResearchLayout]:
    """Coded layers as libsubkv reads them from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sidecar.gguf"
        write_sidecar(base, path, metadata.keys(layers, calibration, settings, counted))
        layout = ResearchLayout(path)
    with layout:
        yield layout
