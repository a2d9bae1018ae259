"""A chunk of text decoded in the engine: its cells saved, changed, restored, and scored on the tokens after them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from converter.residual import Rows
from converter.scoring import mean_kld
from converter.session import Session
from converter.statistics_stage import spread
from subkv.base.errors import SubkvError
from subkv.engine.observer import PAUSE, SAMPLE, UBATCH, ObservedLayer
from subkv.format.arrays import F16, F32

SCORED = 64  # tokens at the end of a chunk on which trials are scored
QUERIES = 128  # of a chunk, spread over the second half of the tokens before those


def ignore(n: int) -> None:
    """Default of `on_decoded`, which is called with the number of tokens decoded."""


class Unpredictable(SubkvError):
    """A property of the model: another attempt would end the same."""


class Spill:
    """Bytes and an array of float32 that are needed again much later: in a file without a name, removed with this
    object; without a folder in memory."""

    def __init__(self, folder: Path | None, raw: bytearray, array: F32) -> None:
        """Raises SubkvError about `output` where `folder` is full."""
        self._kept: tuple[bytearray, F32] | None = None
        self._size, self._shape = len(raw), array.shape
        if folder is None:
            self._kept = raw, array
            return
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  for as long as this object
            self._file.write(raw)
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError as error:
            raise SubkvError("output", f"cannot write to {folder}: {error.strerror or error}") from error

    def raw(self) -> bytearray:
        """The bytes, read from the file at every call."""
        if self._kept is not None:
            return self._kept[0]
        raw = bytearray(self._size)
        self._read(raw, 0)
        return raw

    def array(self) -> F32:
        """The array, read from the file at every call."""
        if self._kept is not None:
            return self._kept[1]
        array = np.empty(self._shape, dtype=np.float32)
        self._read(array.data.cast("B"), self._size)
        return array

    def _read(self, to: bytearray | memoryview, first: int) -> None:
        self._file.seek(first)
        self._file.readinto(to)  # type: ignore[attr-defined]


class DecodedChunk:
    """A chunk in the engine: its cells, rows of every layer and the exact distributions of the scored tokens."""

    def __init__(
        self,
        session: Session,
        tokens: Sequence[int],
        n_scored: int = SCORED,
        latent: bool = False,
        further: Sequence[int] = (),
        on_decoded: Callable[[int], None] = ignore,
    ) -> None:
        """latent: values are the first elements of keys, and have no rows. further: positions to sample queries at.

        on_decoded: may raise to stop.
        """
        self.session, self.latent = session, latent
        self.scored, self.start = list(tokens[-n_scored:]), len(tokens) - n_scored
        sampled = sorted({*spread(self.start // 2, self.start, QUERIES), *further})
        after = range(self.start, len(tokens))
        marks = (0, self.start - 1)  # rows that locate the others in the state
        session.forget()
        session.mode(SAMPLE, (*marks, *after), (*sampled, *after))
        session.clear()
        for first in range(0, self.start, UBATCH):
            last = min(first + UBATCH, self.start)
            session.decode(tokens[first:last], first)
            on_decoded(last - first)
        self._saved: bytearray | None = session.cells()
        self._spill: Spill | None = None
        self._exact: F32 | None = session.logits(self.scored, self.start).copy()
        on_decoded(n_scored)
        session.mode(PAUSE)
        self.n_sampled, self.pos = len(sampled), np.array([*sampled, *after], dtype=np.float64)
        self.layers = session.layers()
        self.at = self._locate()

    @property
    def saved(self) -> bytearray:
        """The state before the scored tokens."""
        if self._saved is None:
            assert self._spill is not None, "final_kld() has discarded the state"
            self._saved = self._spill.raw()
        return self._saved

    @property
    def exact(self) -> F32:
        """Logits [n, n_vocab] of the scored tokens."""
        if self._exact is None:
            assert self._spill is not None
            self._exact = self._spill.array()
        return self._exact

    def spill(self, folder: Path | None) -> None:
        """Move state and logits to a Spill until they are read. Raises SubkvError about `output`."""
        if self._spill is None:
            self._spill = Spill(folder, self.saved, self.exact)
        self._saved = self._exact = None

    def _locate(self) -> dict[tuple[int, str], tuple[int, F32]]:
        """Offset in the state of every layer's keys and values, and the scored tokens' own [n, n_head_kv, d]."""
        places, start = {}, 0
        for side in "k" if self.latent else "kv":
            for layer in self.layers:
                rows = self.session.get(layer, f"{side}s").astype(np.float32)
                first, last = (rows[i].astype(np.float16).tobytes() for i in (0, 1))
                distance = (self.start - 1) * len(last)
                begin = _find_pair(self.saved, first, last, distance, start)
                if begin < 0:
                    name = "keys" if side == "k" else "values"
                    raise Unpredictable(
                        "model", f"layer {layer.il}: expected its {name} in a saved state, cell after cell, found none"
                    )
                places[layer.il, side] = begin, rows[2:]
                start = begin + distance
        return places

    def _layer(self, il: int) -> ObservedLayer:
        return next(layer for layer in self.layers if layer.il == il)

    def view(self, il: int, side: str) -> F16:
        """The cells' keys or values inside the state, [start, n_head_kv, d], writable."""
        if self.latent and side == "v":
            return self.view(il, "k")[..., : self._layer(il).d_v]
        begin, rows = self.at[il, side]
        shape = (self.start, *rows.shape[1:])
        return np.frombuffer(self.saved, np.float16, int(np.prod(shape)), begin).reshape(shape)

    def rows(self, il: int, scored: bool) -> Rows:
        """Of a layer: the cells before the scored tokens and the queries sampled there, or all cells and the scored."""
        layer = self._layer(il)
        q = self.session.get(layer, "qs").astype(np.float32)
        k, v = (self.view(il, side).astype(np.float32) for side in "kv")
        if not scored:
            return Rows(q[: self.n_sampled], self.pos[: self.n_sampled], k, v)
        own = [self.at[il, "k"][1], self.at[il, "k"][1][..., : layer.d_v] if self.latent else self.at[il, "v"][1]]
        k, v = (np.concatenate(pair) for pair in zip((k, v), own, strict=True))
        return Rows(q[self.n_sampled :], self.pos[self.n_sampled :], k, v)

    def kld(self, at: tuple[int, str], cells: F32, n: int | None = None) -> float:
        """Mean KLD of the first n of the scored tokens with other cells [start, n_head_kv, d] of a layer's side."""
        exact = self.view(*at).copy()
        try:
            return self._kld([(at, cells)], n)
        finally:
            self.view(*at)[:] = exact

    def final_kld(self, cells: Iterable[tuple[tuple[int, str], F32]]) -> float:
        """As kld(), with other cells of many layers. They overwrite the state, which is discarded: the last call."""
        try:
            return self._kld(cells, None)
        finally:
            self._saved = self._exact = self._spill = None

    def _kld(self, cells: Iterable[tuple[tuple[int, str], F32]], n: int | None) -> float:
        for at, other in cells:
            self.view(*at)[:] = other.astype(np.float16)
        self.session.restore(self.saved)
        if self._spill is not None:  # free the memory for the context
            self._saved = None
        scored = self.scored[:n]
        logits = self.session.logits(scored, self.start)
        kld = mean_kld(self.exact[: len(scored)], logits)
        if self._spill is not None:
            self._exact = None
        return kld


def _find_pair(raw: bytearray, first: bytes, last: bytes, distance: int, start: int) -> int:
    """Where `first` is with `last` `distance` bytes behind it, from `start` on or else anywhere; −1: nowhere. A single
    row is not enough: in the first layer equal tokens have equal values."""
    for begin in (start, 0):
        at = raw.find(first, begin)
        while at >= 0:
            if raw[at + distance : at + distance + len(last)] == last:
                return at
            at = raw.find(first, at + 1)
    return -1
