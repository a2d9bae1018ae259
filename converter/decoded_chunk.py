"""A chunk of text, decoded once. Its cells are then changed, and the tokens after them are scored again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from converter.residual import Rows
from converter.scoring import mean_kld
from converter.session import Session
from converter.statistics_stage import evenly_spaced
from subkv.base.errors import SubkvError, system_reason
from subkv.engine.observer import PAUSE, SAMPLE, UBATCH, ObservedLayer
from subkv.format.arrays import F16, F32

SCORED = 64  # tokens at the end of a chunk on which trials are scored
QUERIES = 128  # sampled per chunk, evenly spaced over the second half of the tokens before the scored ones


def ignore(n: int) -> None:
    """The default of `on_decoded`, which is called with the number of decoded tokens."""


class Unpredictable(SubkvError):
    """Sensitivities cannot be measured because of a property of the model, so a retry is useless."""


class Spill:
    """Bytes and an array of float32 in a temporary file, which is removed with this object."""

    def __init__(self, folder: Path | None, raw: bytearray, array: F32) -> None:
        """folder is by default the system's for temporary files. Raises SubkvError about `output` if it is full."""
        self._size, self._shape = len(raw), array.shape
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  for as long as this object
            self._file.write(raw)
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError as error:
            where = folder or tempfile.gettempdir()
            raise SubkvError("output", f"cannot write to {where}: {system_reason(error)}") from error

    def raw(self) -> bytearray:
        """The bytes, read from the file at every call."""
        raw = bytearray(self._size)
        self._read(raw, 0)
        return raw

    def array(self) -> F32:
        """The array, read from the file at every call."""
        array = np.empty(self._shape, dtype=np.float32)
        self._read(array.data.cast("B"), self._size)
        return array

    def _read(self, to: bytearray | memoryview, first: int) -> None:
        self._file.seek(first)
        self._file.readinto(to)  # type: ignore[attr-defined]


class DecodedChunk:
    """A decoded chunk: its cells, rows of every layer, and the exact logits of the scored tokens, which come last."""

    def __init__(
        self,
        session: Session,
        tokens: Sequence[int],
        n_scored: int = SCORED,
        latent: bool = False,
        further: Sequence[int] = (),
        on_decoded: Callable[[int], None] = ignore,
    ) -> None:
        """latent: values are the first elements of keys, and have no rows. further: positions of more sampled queries.

        on_decoded: may raise to stop. Raises Unpredictable if the saved state has another layout.
        """
        self.session, self.latent = session, latent
        self.scored, self.start = list(tokens[-n_scored:]), len(tokens) - n_scored
        sampled = sorted({*evenly_spaced(self.start // 2, self.start, QUERIES), *further})
        after = range(self.start, len(tokens))
        marks = (0, self.start - 1)  # rows by which _locate() finds the cells in the state
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
        """By (il, side): the offset of a layer's keys or values in the state, and the rows [n, n_head_kv, d] of the
        scored tokens."""
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
        """A writable view of a layer's keys or values in the state: [start, n_head_kv, d]."""
        if self.latent and side == "v":
            return self.view(il, "k")[..., : self._layer(il).d_v]
        begin, rows = self.at[il, side]
        shape = (self.start, *rows.shape[1:])
        return np.frombuffer(self.saved, np.float16, int(np.prod(shape)), begin).reshape(shape)

    def rows(self, il: int, scored: bool) -> Rows:
        """Rows of a layer: the sampled queries and the cells before the scored tokens; scored: those tokens' queries,
        and all cells."""
        layer = self._layer(il)
        q = self.session.get(layer, "qs").astype(np.float32)
        k, v = (self.view(il, side).astype(np.float32) for side in "kv")
        if not scored:
            return Rows(q[: self.n_sampled], self.pos[: self.n_sampled], k, v)
        own = [self.at[il, "k"][1], self.at[il, "k"][1][..., : layer.d_v] if self.latent else self.at[il, "v"][1]]
        k, v = (np.concatenate(pair) for pair in zip((k, v), own, strict=True))
        return Rows(q[self.n_sampled :], self.pos[self.n_sampled :], k, v)

    def kld(self, at: tuple[int, str], cells: F32, n: int | None = None) -> float:
        """Mean KLD of the first n scored tokens, nats, with other cells [start, n_head_kv, d] for a layer's side."""
        exact = self.view(*at).copy()
        try:
            return self._kld([(at, cells)], n)
        finally:
            self.view(*at)[:] = exact

    def final_kld(self, cells: Iterable[tuple[tuple[int, str], F32]]) -> float:
        """As kld(), with other cells for many layers. It overwrites the state, so this must be the last call."""
        try:
            return self._kld(cells, None)
        finally:
            self._saved = self._exact = self._spill = None

    def _kld(self, cells: Iterable[tuple[tuple[int, str], F32]], n: int | None) -> float:
        for at, other in cells:
            self.view(*at)[:] = other.astype(np.float16)
        self.session.restore(self.saved)
        if self._spill is not None:  # it can be read again, so free the memory while the context decodes
            self._saved = None
        scored = self.scored[:n]
        logits = self.session.logits(scored, self.start)
        kld = mean_kld(self.exact[: len(scored)], logits)
        if self._spill is not None:
            self._exact = None
        return kld


def _find_pair(raw: bytearray, first: bytes, last: bytes, distance: int, start: int) -> int:
    """The offset of `first` with `last` `distance` bytes after it: from `start` on, else anywhere; −1: nowhere. One row
    is not enough, because equal tokens have equal values in the first layer."""
    for begin in (start, 0):
        at = raw.find(first, begin)
        while at >= 0:
            if raw[at + distance : at + distance + len(last)] == last:
                return at
            at = raw.find(first, at + 1)
    return -1
