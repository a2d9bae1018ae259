"""A context whose prompts can begin with planted rows, and whose own rows can be read.

A warm batch is [the first tokens][dummies, whose rows are those of the slots][the last tokens] at consecutive
positions that end where the prompt ends, in an empty sequence: llama.cpp allows no gaps, but an empty sequence may
begin anywhere, and the key in a cell may be rotated for another position than the cell's. So the first tokens' own
rows, which belong to positions 0, 1, …, are planted, too. They depend on these tokens alone, and prompts of one chat
template share them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.scoring import F32
from research.warmstart.planter import Planter
from research.warmstart.pooled import Plan
from research.warmstart.trained import HeadShape, Placed
from subkv.base.errors import SubkvError
from subkv.engine.cache import also_attach
from subkv.engine.context import decode_batch
from subkv.engine.observer import PAUSE, SAMPLE, Observer
from subkv.native.binding import C

N_SINKS_KEPT = 16  # beginnings of prompts whose rows are kept


@dataclass(frozen=True, eq=False)
class Rows:
    """What the model computed for T tokens, by layer, keys rotated: k [T, n_head_kv, d_k], v [T, n_head_kv, d_v], and
    q [n, n_head, d_k] of the tokens whose queries were expected. scale: what the layer multiplies q·k with."""

    k: list[F32]
    v: list[F32]
    q: list[F32]
    scale: list[float]

    @property
    def shapes(self) -> list[HeadShape]:
        return [HeadShape(k.shape[1], k.shape[2], v.shape[2]) for k, v in zip(self.k, self.v, strict=True)]


class Planting:
    """The planter and the observer of one context.

    with planting.attach():
        …  # create the context on this thread
    planting.bind(handle, batch, coded)
    planting.decode(tokens, plan, placed)
    …  # close the context
    planting.close()

    Everything is about sequence 0. No more thread-safe than the context.
    """

    def __init__(self) -> None:
        self.planter = Planter()
        self.observer = Observer(0)
        self._handle: Any = None
        self._batch: Any = None
        self._coded = False
        self._recording = False
        self._is_checked = False
        self._sinks: OrderedDict[tuple[int, ...], Rows] = OrderedDict()

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """The next context that this thread creates inside the block is this one's. Raises as Planter.attach."""
        with self.planter.attach(), also_attach(self.observer.attach):
            yield

    def bind(self, handle: Any, batch: Any, coded: bool = False) -> None:
        """The context (llama_context*), and a llama_batch with room for its n_batch. coded: its cache is."""
        self._handle, self._batch, self._coded = handle, batch, coded

    def close(self) -> None:
        """After the context is closed; a second call does nothing."""
        self.observer.close()

    def empty(self) -> None:
        """Remove all cells."""
        C.llama_memory_seq_rm(C.llama_get_memory(self._handle), 0, -1, -1)

    def decode(self, tokens: Sequence[int], plan: Plan, placed: list[Placed]) -> None:
        """Replace what the context holds by the warm cells of a prompt; its last token gives logits (at index -1).

        placed: Trained.place(slots, len(tokens)); empty: only the first and last tokens, which a prompt must have at
        least. Raises SubkvError and CacheError; the context is then empty.
        """
        n_sink, n_slots = plan.n_sink, plan.n_slots if placed else 0
        n = n_sink + n_slots + plan.n_last
        begin = len(tokens) - n
        if begin < 0:
            raise SubkvError("prompt", f"expected {n} tokens or more, found {len(tokens)}")
        sinks = self.sinks(tokens[:n_sink]) if n_sink else None
        batch = [*tokens[:n_sink], *[tokens[n_sink]] * n_slots, *tokens[len(tokens) - plan.n_last :]]
        parts = [list(zip(sinks.k, sinks.v, strict=True))] if sinks else []
        rows = self._joined([*parts, placed] if placed else parts)
        try:
            self.empty()
            with self.planter.planting(rows), self._checked(begin, rows):
                self._decode(batch, begin, last=True)
        except BaseException:
            self.empty()
            raise

    def _joined(self, parts: list[list[Placed]]) -> list[Placed]:
        """Rows of all parts, by layer."""
        n_layer = C.llama_model_n_layer(C.llama_get_model(self._handle))
        for part in parts:
            if len(part) != n_layer:
                raise SubkvError("model", f"expected rows of {n_layer} layers, found {len(part)}")
        if not parts:
            return []
        joined = [np.concatenate([part[il][side] for part in parts]) for il in range(n_layer) for side in (0, 1)]
        return list(zip(joined[::2], joined[1::2], strict=True))

    @contextlib.contextmanager
    def _checked(self, begin: int, rows: list[Placed]) -> Iterator[None]:
        """Once per context: what the cache was given for the tokens from `begin` on is what was to be planted."""
        if self._is_checked or self._recording or not rows:
            yield
            return
        with self.recording(range(begin, begin + len(rows[0][0]))):
            yield
            found = self.rows()
        for il, (expected, read) in enumerate(zip(rows, zip(found.k, found.v, strict=True), strict=True)):
            if not all(np.array_equal(w.astype(np.float32), s) for w, s in zip(expected, read, strict=True)):
                raise SubkvError("model", f"layer {il}: expected the planted rows in its cache, found others")
        self._is_checked = True

    def sinks(self, tokens: Sequence[int]) -> Rows:
        """Rows of the first tokens of a prompt at positions 0, 1, …; evaluated, in an emptied context, if new."""
        key = tuple(tokens)
        if key not in self._sinks:
            self.empty()
            try:
                with self.recording(range(len(key))):
                    self._decode(key, 0, last=False)
                    self._sinks[key] = self.rows()
            finally:
                self.empty()
            if len(self._sinks) > N_SINKS_KEPT:
                self._sinks.popitem(last=False)
        self._sinks.move_to_end(key)
        return self._sinks[key]

    def _decode(self, tokens: Sequence[int], begin: int, last: bool) -> None:
        n_batch = C.llama_n_batch(self._handle)
        for start in range(0, len(tokens), n_batch):
            piece = tokens[start : start + n_batch]
            n = len(piece)
            logits = np.zeros(n, dtype=np.int8)
            logits[-1] = last and start + n == len(tokens)
            where = np.arange(begin + start, begin + start + n)
            decode_batch(self._handle, self._batch, piece, where, [0] * n, logits, coded=self._coded)
        C.llama_synchronize(self._handle)

    @contextlib.contextmanager
    def recording(self, positions: Sequence[int], queries: Sequence[int] = ()) -> Iterator[None]:
        """Keys and values decoded inside the block at these positions are kept for rows(), and these queries."""
        self.observer.forget()
        self.observer.mode(SAMPLE, positions, queries)
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            self.observer.mode(PAUSE)
            self.observer.forget()

    def rows(self) -> Rows:
        """What was recorded so far, in the order of decoding; inside recording()."""
        C.llama_synchronize(self._handle)
        layers = self.observer.layers()
        k, v, q = (
            [self.observer.get(layer, what).astype(np.float32) for layer in layers] for what in ("ks", "vs", "qs")
        )
        return Rows(k, v, q, [layer.scale for layer in layers])

    def logits(self, n_vocab: int) -> F32:
        """A copy of the logits [n_vocab] of the last token that decode() evaluated."""
        return np.ctypeslib.as_array(C.llama_get_logits_ith(self._handle, -1), (n_vocab,)).copy()

    def follow(self, tokens: Sequence[int], begin: int) -> None:
        """Evaluate tokens behind what the context holds, the first at position `begin`; the last one gives logits."""
        self._decode(tokens, begin, last=True)
