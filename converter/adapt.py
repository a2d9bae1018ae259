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
from converter.predict import reconstructed

KINDS = ("covariance", "fd", "oja")  # in the order of subkv.h


@dataclass(frozen=True)
class Adapt:
    """When a head gets a new basis, and from which sketch; runtime/native/adapt.h has the details.

    kind: of the sketch; rank, rows: its r and ℓ, 0: by default; decay: of a row's weight per token; rate: Oja's η.
    block: B; length: L, 0: never for its length; warm: W; max_chunks: J_max; tau: relative residual of a block that
    asks for a new basis, 1: none does; gain: a new basis must bring it to this times the old one's; reuse: 1: a block
    takes the best of the bases alive; merge: 1: at J_max the oldest chunks are merged, 0: no more are opened.
    """

    kind: str = "covariance"
    rank: int = 0
    rows: int = 0
    decay: float = 1.0
    rate: float = 0.05
    block: int = 32
    length: int = 512
    warm: int = 512
    max_chunks: int = 4
    tau: float = 1.0
    gain: float = 0.9
    reuse: int = 1
    merge: int = 0


def parse(flag: str, text: str) -> tuple[str, Adapt]:
    """What is adapted, "k", "v" or "kv", and how: `v` or `v,length=512,gain=0.9`, fields of Adapt.

    Raises ConverterError.
    """
    sides, *changes = text.split(",")
    if sides not in ("k", "v", "kv"):
        raise ConverterError(f"{flag}: expected k, v or kv, found {sides!r}")
    kinds = {name: type(value) for name, value in vars(Adapt()).items()}
    given: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds:
            raise ConverterError(f"{flag}: expected one of {', '.join(kinds)}, found {name!r}")
        try:
            given[name] = kinds[name](value)
        except ValueError as error:
            raise ConverterError(f"{flag}: {name}: expected a number, found {value!r}") from error
    return sides, Adapt(**given)


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


class AdaptiveCoder:
    """What attention sees through coded layers that adapt to the text; a Coder of converter/reference.py.

    Every call is a text of its own, from an empty cache. Rows are those at the end of the text: what a merge coded anew
    late is seen so by early queries, too, which is the worse for it. sides: coded; adapted: those of them that adapt.
    """

    def __init__(self, layout: Layout, layers: Sequence[CodedLayer], sides: str, adapted: str, params: Adapt) -> None:
        self._layout, self._sides, self._adapted, self._params = layout, sides, adapted, params
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
                    replayed = self._layout.replay(self._params, il, h, side == "v", x)
                    n = sum(n for n, _ in basis.bands)
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
