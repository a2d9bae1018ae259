"""Summaries of earlier prompts on disk, found by the likeness of their embeddings.

A library is a folder of entries (research.warmstart.entries): complete or absent, checksummed, those used
longest ago removed first, so that processes read while another one writes or is killed. The head of an entry has the
embedding (base64 of f32, not centred) and, for each layer, KV heads, slots, size of a key and of a value; its state is
the keys [n_head_kv, n_slots, d_k] f16 of each layer, then the values. Its identity is a digest of the model, of what
was trained for it, and of the kind of embedding.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.scoring import F32
from research.warmstart import entries as files
from research.warmstart.entries import Folder
from research.warmstart.pooled import Slots
from research.warmstart.trained import Trained
from subkv.base.container import ContainerError, Tokens
from subkv.base.errors import SubkvError
from subkv.base.folders import expanded

CAPACITY = 1 << 30  # bytes


@dataclass(frozen=True, eq=False)
class Remembered:
    """A prompt in the library: its file's name, its tokens [n] i32 and its embedding, not centred."""

    name: str
    tokens: Tokens
    embedding: F32


class Library:
    """The entries of one model and one trained file in a folder, which may hold others.

    capacity: bytes beyond which its entries used longest ago are removed. Raises SubkvError about `folder` for a path
    that is not one, and where it cannot be read or written.
    """

    def __init__(self, folder: str | os.PathLike[str], trained: Trained, capacity: int = CAPACITY) -> None:
        path = expanded(folder, "folder")
        if os.path.exists(path) and not os.path.isdir(path):
            raise SubkvError("folder", f"expected a folder, found the file {path}")
        values = {"version": 2, "model": trained.identity, "trained": trained.digest, "embedding": trained.embedding}
        self.folder = Folder(path)
        self.identity = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
        self.centre = trained.centre
        self.capacity = capacity
        self._entries: dict[str, Remembered] = {}
        self._unit: dict[str, F32] = {}  # centred embeddings of length 1, by name

    #
    # lookup
    #

    def entries(self) -> list[Remembered]:
        """All entries, by name. Reads the heads of files not seen before."""
        try:
            heads = self.folder.heads(self.identity)
        except FileNotFoundError:  # nothing stored yet
            heads = {}
        except OSError as error:
            raise self._failed("read", error) from error
        known = {}
        for name in sorted(heads):
            try:
                known[name] = self._entries.get(name) or self._remembered(name, heads[name])
            except ContainerError:
                self.folder.discard(name)
        self._entries = known
        self._unit = {name: self._unit.get(name, self._centred(entry.embedding)) for name, entry in known.items()}
        return list(known.values())

    def _remembered(self, name: str, head: files.Head) -> Remembered:
        try:
            embedding = np.frombuffer(base64.b64decode(head.more["embedding"], validate=True), "<f4")
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise ContainerError("expected an embedding in its head, found none") from error
        if embedding.shape != self.centre.shape:
            raise ContainerError(f"expected an embedding of {len(self.centre)} numbers, found {len(embedding)}")
        if not np.isfinite(embedding).all():
            raise ContainerError("expected an embedding of finite numbers, found NaN or infinity")
        return Remembered(name, head.tokens, embedding)

    def _centred(self, embedding: F32) -> F32:
        vector = embedding - self.centre
        return vector / max(float(np.linalg.norm(vector)), 1e-12)

    def nearest(self, embedding: F32, n: int, exclude: Collection[str] = ()) -> list[tuple[Remembered, float]]:
        """The n most similar entries but for those named in `exclude`, with their cosines, best first.

        Raises SubkvError for an embedding of another size and for a folder that has only entries of others.
        """
        if embedding.shape != self.centre.shape:
            raise SubkvError(
                "embedding", f"expected {len(self.centre)} numbers, found {list(embedding.shape)}: of another kind"
            )
        found = [entry for entry in self.entries() if entry.name not in exclude]
        if not found:
            if others := self._n_others():
                raise SubkvError(
                    "folder",
                    f"expected prompts summarised for this model and trained file, found {others} of others in "
                    f"{self.folder.path}",
                )
            return []
        cosines = np.stack([self._unit[entry.name] for entry in found]) @ self._centred(embedding)
        best = np.argsort(-cosines, kind="stable")[:n]
        return [(found[i], float(cosines[i])) for i in best]

    def _n_others(self) -> int:
        """Entries of other models, trained files or programs in the folder."""
        try:
            names = os.listdir(self.folder.path)
        except OSError:
            return 0
        own = files.prefix(self.identity)
        return sum(name.endswith(files.SUFFIX) and not name.startswith(own) for name in names)

    def load(self, entry: Remembered) -> Slots:
        """A prompt's summary, checked as a whole; the entry counts as used now.

        Raises SubkvError: another process removed it, it cannot be read, or it was damaged, and is dropped.
        """
        try:
            found = self.folder.read(entry.name)
            if found is None:
                raise SubkvError("folder", f"expected the entry {entry.name}, found it removed by another process")
            return _decode(found)
        except ContainerError as error:
            self.folder.discard(entry.name)
            raise SubkvError("folder", f"skipped the damaged entry {entry.name}: {error}") from error
        except OSError as error:
            raise self._failed("read", error) from error

    #
    # store
    #

    def add(self, tokens: Sequence[int], embedding: F32, summary: Slots) -> Remembered:
        """Store a prompt, and remove those used longest ago beyond the capacity."""
        embedding = np.asarray(embedding, np.float32)
        if embedding.shape != self.centre.shape:
            raise SubkvError(
                "embedding", f"expected {len(self.centre)} numbers, found {list(embedding.shape)}: of another kind"
            )
        shapes = [[*k.shape, v.shape[2]] for k, v in zip(summary.k, summary.v, strict=True)]
        more = {"embedding": base64.b64encode(embedding.astype("<f4").tobytes()).decode(), "shapes": shapes}
        entry = self._entry(tokens, _encode(summary), more)
        try:
            self.folder.write(entry)
            self.folder.trim(self.capacity, files.prefix(self.identity))
        except OSError as error:
            raise self._failed("write", error) from error
        return Remembered(entry.name(), entry.tokens, embedding)

    def _entry(self, tokens: Sequence[int], state: bytes, more: dict[str, Any]) -> files.Entry:
        return files.Entry(self.identity, np.asarray(tokens, dtype=np.int32), state, more)

    def __contains__(self, tokens: Sequence[int]) -> bool:
        # False, too, where the folder cannot be read
        return os.path.isfile(self.folder.path / self._entry(tokens, b"", {}).name())

    def _failed(self, what: str, error: OSError) -> SubkvError:
        return SubkvError("folder", f"cannot {what} {self.folder.path}: {error.strerror or error}")


def _encode(summary: Slots) -> bytes:
    parts = []
    for slots in (*summary.k, *summary.v):
        with np.errstate(over="ignore"):
            half = slots.astype("<f2")
        if not np.isfinite(half).all():
            raise SubkvError("summary", "expected slots that fit 16 bits, found NaN or larger ones")
        parts.append(half.tobytes())
    return b"".join(parts)


def _decode(entry: files.Entry) -> Slots:
    """Raises ContainerError where shapes and state do not fit each other."""
    shapes: Any = entry.more.get("shapes")
    try:
        listed = [(h, m, d_k) for h, m, d_k, _ in shapes] + [(h, m, d_v) for h, m, _, d_v in shapes]
        sizes = [math.prod(shape) for shape in listed]
        fits = all(type(n) is int and n > 0 for shape in listed for n in shape)
        fits = fits and bool(listed) and 2 * sum(sizes) == len(entry.state)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ContainerError(f"expected the shapes of {len(entry.state)} bytes, found {repr(shapes)[:80]}")
    rows = np.split(np.frombuffer(entry.state, "<f2").astype(np.float32), np.cumsum(sizes)[:-1])
    slots = [part.reshape(shape) for part, shape in zip(rows, listed, strict=True)]
    return Slots(slots[: len(shapes)], slots[len(shapes) :])
