"""Planted rows: K and V computed elsewhere, in a context's cache as if its tokens had made them.

    planter = Planter()
    with planter.attach():
        llm = subkv.Llama(path)
    with planter.planting(rows):  # by layer
        …  # decode as many tokens, any ones

llama.cpp shows what it computes to a callback of the context (`cb_eval`) before anything reads it. The planter's
callback overwrites the keys and values of the tokens, which llama.cpp calls Kcur and Vcur, the last time after their
rotation. The cache, its window, its codes, its states and an observer then hold the rows as if the tokens had made
them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
from numpy.typing import ArrayLike, NDArray

from converter.scoring import F32
from subkv.base.errors import SubkvError
from subkv.native.binding import C
from subkv.native.library import Signatures, declare, ggml

__all__ = ["Planter"]

SIDES = {"Kcur": 0, "Vcur": 1}  # names of the tensors, as "Kcur-3" of layer 3
_GGML: Signatures = {
    "ggml_get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_tensor_set": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
}


class Tensor(ctypes.Structure):
    """The beginning of ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


class Planter:
    """The callback of contexts, which it must outlive. No more thread-safe than they are."""

    def __init__(self) -> None:
        self._ggml = declare(ggml(), _GGML)
        self._callback = C.ggml_backend_sched_eval_callback(self._on_node)
        self._rows: list[tuple[F32, F32]] = []  # by layer and side: [n, elements of a row]
        self._first = b""  # name of the graph's first node: where it comes again, another part of the tokens follows
        self._start = self._n = 0  # tokens of the parts before, and of this one
        self._written: dict[tuple[int, int], int] = {}  # rows by layer and side
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """Contexts that are created inside the block show this planter what they compute."""
        defaults = C.llama_context_default_params

        def with_callback() -> C.llama_context_params:
            params = defaults()
            params.cb_eval = self._callback
            return params

        with mock.patch.object(C, "llama_context_default_params", with_callback):
            yield

    @contextlib.contextmanager
    def planting(self, rows: Sequence[tuple[ArrayLike, ArrayLike]]) -> Iterator[None]:
        """The first n tokens that a context decodes inside the block, all of one sequence, get these rows.

        rows, by layer: k [n, n_head_kv, d_k] and v [n, n_head_kv, d_v], post-RoPE, taken as f32. Without rows tokens
        keep their own. Raises SubkvError for rows that are not finite or differ in n and, at the end of the block, for
        rows that did not get to their tokens.
        """
        self._rows = [(_flat(il, "k", k), _flat(il, "v", v)) for il, (k, v) in enumerate(rows)]
        lengths = {len(x) for pair in self._rows for x in pair}
        if len(lengths) > 1:
            self._rows = []
            raise SubkvError("rows", f"expected as many of every layer, found {sorted(lengths)}")
        self._first, self._start, self._n, self._written, self._error = b"", 0, 0, {}, None
        try:
            yield
            if self._error:
                raise self._error
            for il, pair in enumerate(self._rows):
                for side, x in enumerate(pair):
                    if (n := self._written.get((il, side), 0)) != len(x):
                        raise SubkvError("model", f"layer {il}: expected {len(x)} rows planted, found {n}")
        finally:
            self._rows = []

    def _on_node(self, node: int, ask: bool, _user: object) -> bool:
        """llama.cpp's question whether a node is of interest, and then, once that is computed, the node."""
        if not self._rows or self._error:
            return not ask
        try:
            return self._shown(node, ask)
        except BaseException as error:  # nothing may be thrown into C: planting() raises it
            self._error = error
            return not ask

    def _shown(self, node: int, ask: bool) -> bool:
        name = self._ggml.ggml_get_name(node)
        if ask:
            self._first = self._first or name
            if name == self._first:
                self._start, self._n = self._start + self._n, 0
        kind, _, il = name.decode().partition("-")
        if kind not in SIDES or not il.isdigit() or int(il) >= len(self._rows):
            return not ask
        if not ask:
            self._write(node, int(il), SIDES[kind])
        return True

    def _write(self, node: int, il: int, side: int) -> None:
        tensor, rows = Tensor.from_address(node), self._rows[il][side]
        width = rows.shape[1]
        ne, nb = tensor.ne, tensor.nb
        tokens = 2 if ne[0] * ne[1] == width and ne[3] == 1 else 1  # the dimension; heads may have one of their own
        heads = ne[1] if tokens == 2 else 1
        whole = heads == 1 or nb[1] == nb[0] * ne[0]
        if tensor.type != 0 or heads * ne[0] != width or nb[0] != 4 or not whole:
            found = f"{list(ne)} of type {tensor.type}"
            raise SubkvError(
                "model", f"layer {il}: expected rows of {width} floats in llama.cpp's graph, found {found}"
            )
        self._n = ne[tokens]
        last = min(self._start + self._n, len(rows))
        step = last - self._start if nb[tokens] == 4 * width else 1  # rows that lie together
        for i in range(self._start, last, max(step, 1)):
            at = (i - self._start) * nb[tokens]
            self._ggml.ggml_backend_tensor_set(node, rows[i].ctypes.data, at, 4 * width * step)
        self._written[il, side] = max(last, self._written.get((il, side), 0))


def _flat(il: int, side: str, given: ArrayLike) -> NDArray[np.float32]:
    """[n, n_head_kv, d] as [n, elements of a row], finite."""
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
        rows = np.ascontiguousarray(given, np.float32)
    if rows.ndim != 3:
        raise SubkvError(side, f"layer {il}: expected rows [n, n_head_kv, d], found {list(rows.shape)}")
    if not np.isfinite(rows).all():
        raise SubkvError(side, f"layer {il}: expected finite numbers, found NaN or Inf")
    return rows.reshape(len(rows), -1)
