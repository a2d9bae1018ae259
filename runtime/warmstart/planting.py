"""A context whose prompts can begin warm: rows are planted in it, and rows of it are read.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.planter import Planter
from runtime.warmstart.shapes import F32, Plan
from subkv.engine.cache import beside
from subkv.engine.model import decode_batch
from subkv.engine.observer import PAUSE, SAMPLE, Observer
from subkv.native.binding import C

if TYPE_CHECKING:
    from runtime.warmstart.trained import Placed

Rows = list[tuple[F32, F32]]  # by layer: k [n, n_head_kv, d_k], v [n, n_head_kv, d_v]

N_SINKS_KEPT = 16  # beginnings of prompts whose rows are kept


class Planting:
    """The planter and the observer of one context.

    with planting.attach():
        …  # create the context on this thread
    planting.bind(handle, batch, coded)
    planting.decode(tokens, plan, placed)
    …  # close the context
    planting.close()

    No more thread-safe than the context.
    """

    def __init__(self) -> None:
        self.planter = Planter()
        self.observer = Observer(0)
        self._handle: Any = None
        self._batch: Any = None
        self._coded = False
        self._sinks: OrderedDict[tuple[int, ...], Rows] = OrderedDict()

    @contextlib.contextmanager
    def attach(self) -> Iterator[None]:
        """The next context that this thread creates inside the block is this one's. Raises as Planter.attach."""
        with self.planter.attach(), beside(self.observer.attach):
            yield

    def bind(self, handle: Any, batch: Any, coded: bool = False) -> None:
        """The context (llama_context*), and a llama_batch with room for its n_batch. coded: its cache is."""
        self._handle, self._batch, self._coded = handle, batch, coded

    def close(self) -> None:
        """After the context is closed; a second call does nothing."""
        self.planter.close()
        self.observer.close()

    def empty(self, seq: int = 0) -> None:
        """Remove all cells of a sequence."""
        C.llama_memory_seq_rm(C.llama_get_memory(self._handle), seq, -1, -1)

    def decode(self, tokens: Sequence[int], plan: Plan, placed: list[Placed], seq: int = 0) -> None:
        """Replace what a sequence holds by the warm cells of a prompt; its last token gives logits (at index -1).

        placed: Trained.place(slots, len(tokens)), whose cells are not looked at; empty: only the first and last tokens,
        which a prompt must have at least. Raises WarmStartError and CacheError; the sequence is then empty.
        """
        if placed:
            plan.span(len(tokens))
        n_slots = plan.n_slots if placed else 0
        n, n_sink = plan.n_sink + n_slots + plan.n_last, plan.n_sink
        begin = len(tokens) - n
        if begin < 0:
            raise WarmStartError("prompt", f"expected {n} tokens or more, found {len(tokens)}")
        sinks = self.sinks(tokens[:n_sink], seq) if n_sink else []
        dummies = [tokens[n_sink]] * n_slots
        cells = np.arange(begin, begin + n_sink + n_slots, dtype=np.int32)
        try:
            self._plant(cells, sinks, placed)
            batch = [*tokens[:n_sink], *dummies, *tokens[len(tokens) - plan.n_last :]]
            self.empty(seq)
            self._decode(batch, begin, seq, last=True)
        except BaseException:
            self.empty(seq)
            raise
        finally:
            self.planter.clear()

    def _plant(self, cells: Any, sinks: Rows, placed: list[Placed]) -> None:
        layers = self.planter.layers()
        parts = [part for part in (sinks, [(k, v) for _, k, v in placed]) if part]
        for part in parts:
            if len(part) != len(layers):
                raise WarmStartError("-m", f"expected rows of {len(layers)} layers, found {len(part)}")
        if parts:
            for i, layer in enumerate(layers):
                k, v = (np.concatenate([part[i][side] for part in parts]) for side in (0, 1))
                self.planter.set(layer.il, cells, k, v)

    def sinks(self, tokens: Sequence[int], seq: int = 0) -> Rows:
        """Rows of the first tokens of a prompt at positions 0, 1, …; evaluated, in an emptied sequence, if new."""
        key = tuple(tokens)
        if key in self._sinks:
            self._sinks.move_to_end(key)
            return self._sinks[key]
        self.empty(seq)
        try:
            with self.recording(range(len(key))):
                self._decode(key, 0, seq, last=False)
                rows = self.rows()
        finally:
            self.empty(seq)
        self._sinks[key] = rows
        while len(self._sinks) > N_SINKS_KEPT:
            self._sinks.popitem(last=False)
        return rows

    def _decode(self, tokens: Sequence[int], begin: int, seq: int, last: bool) -> None:
        n_batch = C.llama_n_batch(self._handle)
        for start in range(0, len(tokens), n_batch):
            piece = tokens[start : start + n_batch]
            n = len(piece)
            logits = np.zeros(n, dtype=np.int8)
            logits[-1] = last and start + n == len(tokens)
            where = np.arange(begin + start, begin + start + n)
            decode_batch(self._handle, self._batch, piece, where, [seq] * n, logits, coded=self._coded)
        C.llama_synchronize(self._handle)

    @contextlib.contextmanager
    def recording(self, positions: Sequence[int], queries: Sequence[int] = ()) -> Iterator[None]:
        """Keys and values decoded inside the block at these positions, whichever the sequence, are kept for rows().

        queries: positions whose queries the observer keeps beside them.
        """
        self.observer.forget()
        self.observer.mode(SAMPLE, positions, queries)
        try:
            yield
        finally:
            self.observer.mode(PAUSE)
            self.observer.forget()

    def rows(self) -> Rows:
        """What was recorded so far, in the order of decoding; inside recording()."""
        C.llama_synchronize(self._handle)
        return [
            (self.observer.get(layer, "ks").astype(np.float32), self.observer.get(layer, "vs").astype(np.float32))
            for layer in self.observer.layers()
        ]

    def logits(self, n_vocab: int) -> F32:
        """A copy of the logits [n_vocab] of the last token that decode() evaluated."""
        return np.ctypeslib.as_array(C.llama_get_logits_ith(self._handle, -1), (n_vocab,)).copy()

    def follow(self, tokens: Sequence[int], begin: int, seq: int = 0) -> None:
        """Evaluate tokens behind what a sequence holds, the first at position `begin`; the last one gives logits."""
        self._decode(tokens, begin, seq, last=True)
