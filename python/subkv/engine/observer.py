"""Observers: collect statistics of a context's queries, keys and values ("calibration" of include/subkv.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subkv.base.closed import mark_closed
from subkv.base.errors import SubkvError
from subkv.native.binding import last_error, native
from subkv.native.library import Observed

PAUSE, ACCUMULATE, SAMPLE = 0, 1, 2  # observer modes of subkv.h
UBATCH = 512  # tokens decoded at once


@dataclass(frozen=True)
class ObservedLayer:
    """Shapes and counts of an observed layer (subkv_observed)."""

    il: int
    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    scale: float
    n_tokens: int
    n_key: int
    n_query: int
    n_nonfinite: int
    coded: int = 0
    plain: int = 0


class Observer:
    """A subkv_observer. It must outlive the context that it is attached to. All methods raise SubkvError."""

    def __init__(self, n_skip: int) -> None:
        self._subkv = native()
        self._handle = self._subkv.subkv_observer_new(n_skip)
        if not self._handle:
            raise _unobservable()

    def attach(self) -> None:
        """Observe the next context that this thread creates."""
        if not self._subkv.subkv_observe(self._handle):
            raise _unobservable()

    def close(self) -> None:
        if self._handle:
            self._subkv.subkv_observer_free(self._handle)
        self._handle = None
        mark_closed(self)

    def mode(self, mode: int, key_pos: Sequence[int] = (), query_pos: Sequence[int] = ()) -> None:
        """Set the mode for the tokens decoded from now on."""
        keys = (ctypes.c_int32 * len(key_pos))(*key_pos)
        queries = (ctypes.c_int32 * len(query_pos))(*query_pos)
        if not self._subkv.subkv_observer_mode(self._handle, mode, keys, len(keys), queries, len(queries)):
            raise _unobservable()

    def forget(self) -> None:
        """Free all samples; the statistics are kept."""
        self._subkv.subkv_observer_forget(self._handle)

    def layers(self) -> list[ObservedLayer]:
        """The observed layers, ascending."""
        layers = []
        for il in range(self._subkv.subkv_observer_n_layer(self._handle)):
            raw = Observed()
            if not self._subkv.subkv_observer_layer(self._handle, il, ctypes.byref(raw)):
                raise SubkvError("model", f"layer {il} cannot be read: {last_error()}")
            if raw.n_head:
                layers.append(ObservedLayer(il=il, **{entry[0]: getattr(raw, entry[0]) for entry in Observed._fields_}))
        return layers

    def get(self, layer: ObservedLayer, name: str) -> NDArray[np.float64]:
        """Statistics or samples of a layer, with names and shapes of subkv_observer_get (subkv.h); float64."""
        values = np.zeros(_shape(layer, name), dtype=np.float64)
        n = self._subkv.subkv_observer_get(
            self._handle, layer.il, name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_double)), values.size
        )
        if n != values.size:
            reason = f"layer {layer.il} {name}: expected {values.size} values, found {n}: {last_error()}"
            raise SubkvError("model", reason)
        return values


def _unobservable() -> SubkvError:
    return SubkvError("model", f"cannot observe this model: {last_error()}")


def _shape(layer: ObservedLayer, name: str) -> tuple[int, ...]:
    """Shape of the result of subkv_observer_get (subkv.h)."""
    heads, d = layer.n_head_kv, layer.d_v if name[0] in "vo" else layer.d_k
    if name.endswith("2"):
        return (heads, d, d)
    if name.endswith("1"):
        return (heads, d)
    return (layer.n_query, layer.n_head, d) if name[0] in "qo" else (layer.n_key, heads, d)
