"""Planted rows: K and V computed elsewhere, in a context's cache as if its tokens had made them.

    with Planter() as planter:
        with planter.attach():
            llm = subkv.Llama(path)
        for il, (k, v) in rows.items():
            planter.set(il, positions, k, v)
        …  # decode a batch with any tokens at those positions
        planter.clear()

runtime/native/subkv_research.h, section "planted rows", says what becomes of them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from subkv.base.errors import CacheError, SubkvError
from subkv.native.binding import last_error, native
from subkv.native.library import Signatures, declare

__all__ = ["PlantedLayer", "Planter"]

LAST_POSITION = 2**31 - 1

_ptr, _i32 = ctypes.c_void_p, ctypes.c_int32


class Planted(ctypes.Structure):
    """subkv_planted."""

    _fields_ = [("n_head_kv", _i32), ("d_k", _i32), ("d_v", _i32), ("n_planted", ctypes.c_uint64)]


SIGNATURES: Signatures = {  # of runtime/native/subkv_research.h
    "subkv_planter_new": (_ptr, []),
    "subkv_planter_free": (None, [_ptr]),
    "subkv_plant": (ctypes.c_bool, [_ptr]),
    "subkv_planter_n_layer": (_i32, [_ptr]),
    "subkv_planter_layer": (ctypes.c_bool, [_ptr, _i32, ctypes.POINTER(Planted)]),
    "subkv_planter_set": (ctypes.c_bool, [_ptr, _i32, _ptr, _i32, _ptr, _ptr]),
    "subkv_planter_clear": (None, [_ptr]),
}


@dataclass(frozen=True)
class PlantedLayer:
    """A layer's KV heads and their sizes; n_planted: tokens whose rows were replaced since its latest `set`."""

    il: int
    n_head_kv: int
    d_k: int
    d_v: int
    n_planted: int


class Planter:
    """A subkv_planter. Contexts that it is attached to may outlive it and then keep their tokens' own rows.

    A context manager, which closes it. It is no more thread-safe than the contexts: set and clear between decodes.
    """

    def __init__(self) -> None:
        self._subkv = declare(native(), SIGNATURES)
        self._handle: int | None = self._subkv.subkv_planter_new()

    def __enter__(self) -> Planter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Clear all rows and give the planter back; a second call does nothing."""
        if self._handle:
            self._subkv.subkv_planter_free(self._handle)
        self._handle = None

    @property
    def _open(self) -> int:
        if not self._handle:
            raise SubkvError("planter", "expected an open one, found it closed")
        return self._handle

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """The next context that this thread creates inside the block passes its K and V rows through this planter.

        Contexts made without memory, to learn what one would take, do not count. Raises CacheError at the end of the
        block when no context with a K/V cache was created.
        """
        if not self._subkv.subkv_plant(self._open):
            raise CacheError("planter", last_error())
        try:
            yield
        except BaseException:
            self._subkv.subkv_plant(None)
            raise
        if not self._subkv.subkv_plant(None):
            raise CacheError("", last_error())

    def layers(self) -> list[PlantedLayer]:
        """Layers that rows can be planted in, ascending; none before a context was created."""
        found = []
        for il in range(self._subkv.subkv_planter_n_layer(self._open)):
            layer = self._layer(il)
            if layer:
                found.append(layer)
        return found

    def _layer(self, il: int) -> PlantedLayer | None:
        raw = Planted()
        if not self._subkv.subkv_planter_layer(self._open, il, ctypes.byref(raw)) or not raw.n_head_kv:
            return None
        return PlantedLayer(il, raw.n_head_kv, raw.d_k, raw.d_v, raw.n_planted)

    def set(self, il: int, positions: ArrayLike, k: ArrayLike, v: ArrayLike) -> None:
        """Rows of a layer, instead of its earlier ones, for tokens at strictly increasing positions.

        positions [n] integers; k [n, n_head_kv, d_k] and v [n, n_head_kv, d_v], finite, post-RoPE, taken as f32. Raises
        CacheError for anything else, the layer then keeps what it had.
        """
        layer = self._layer(il)
        if layer is None:
            raise CacheError("il", f"expected a layer with K/V rows of a context made inside attach(), found {il}")
        where = np.asarray(positions)
        if where.ndim != 1 or (where.size and not np.issubdtype(where.dtype, np.integer)):
            raise CacheError("positions", f"expected integers [n], found {where.dtype} {list(where.shape)}")
        if where.size and not 0 <= where.min() <= where.max() <= LAST_POSITION:
            raise CacheError(
                "positions", f"expected 0 to {LAST_POSITION}, found {int(where.min())} to {int(where.max())}"
            )
        where = np.ascontiguousarray(where, np.int32)
        keys = _rows("k", k, (len(where), layer.n_head_kv, layer.d_k))
        values = _rows("v", v, (len(where), layer.n_head_kv, layer.d_v))
        if not self._subkv.subkv_planter_set(
            self._open, il, where.ctypes.data, len(where), keys.ctypes.data, values.ctypes.data
        ):
            raise CacheError("", last_error())

    def clear(self) -> None:
        """No layer has planted rows any more: tokens keep their own."""
        self._subkv.subkv_planter_clear(self._open)


def _rows(key: str, given: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
        rows = np.ascontiguousarray(given, np.float32)
    if rows.shape != shape:
        raise CacheError(key, f"expected rows {list(shape)}, found {list(rows.shape)}")
    return rows
