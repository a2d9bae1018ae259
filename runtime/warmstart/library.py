"""Summaries of earlier prompts on disk, found by the likeness of their embeddings.

One file per prompt, as in subkv.entries: complete or absent, checksummed, used last or removed first, so that processes
read while another one writes or is killed. What stands there for the state is

    offset  bytes  content, little-endian
         0      8  b"subkvWS1"
         8      4  d, numbers of the embedding
        12      4  CRC-32 of everything before and of the embedding
        16     4d  embedding, f32, not centred
         …      4  l, number of layers; then for each u32: KV heads, slots, size of a key, of a value
         …      m  keys [n_head_kv, n_slots, d_k] f16 of each layer, then values

and the entry's identity is a digest of the model, of what was trained for it, and of the kind of embedding.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.shapes import F32
from runtime.warmstart.summary import Summary
from subkv.engine import entries as files
from subkv.engine.entries import EntryError, Folder, Tokens

FLAG = "--warm-library"
CAPACITY = 1 << 30  # bytes
MAGIC = b"subkvWS1"
HEAD = struct.Struct("<8sI")
U32 = struct.Struct("<I")
SHAPE = struct.Struct("<4I")


@dataclass(frozen=True, eq=False)
class Entry:
    """A prompt in the library: its file's name, its tokens [n] i32 and its embedding, not centred."""

    name: str
    tokens: Tokens
    embedding: F32


class Library:
    """The entries of one model and one trained file in a folder, which may hold others.

    identity, trained_digest: of runtime.warmstart.trained.Trained. embedding: its kind. centre: the mean embedding,
    which is subtracted before two are compared. capacity: bytes beyond which its entries used longest ago are removed.
    Raises WarmStartError for a path that is not a folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: str,
        trained_digest: str,
        centre: F32,
        capacity: int = CAPACITY,
        embedding: str = "tokens",
    ) -> None:
        path = Path(folder).expanduser()
        if os.path.exists(path) and not os.path.isdir(path):
            raise WarmStartError(FLAG, f"expected a folder, found the file {path}")
        values = {"version": 1, "model": identity, "trained": trained_digest, "embedding": embedding}
        self.folder = Folder(path)
        self.identity = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
        self.centre = np.asarray(centre, np.float32)
        self.capacity = capacity
        self._entries: dict[str, Entry] = {}
        self._unit: dict[str, F32] = {}  # centred embeddings of length 1, by name

    #
    # lookup
    #

    def entries(self) -> list[Entry]:
        """All entries, by name. Reads the heads of files not seen before. Raises WarmStartError."""
        try:
            heads = self.folder.heads(self.identity)
        except FileNotFoundError:  # nothing stored yet
            heads = {}
        except OSError as error:
            raise _failed("read", self.folder.path, error) from error
        known = {}
        for name in sorted(heads):
            entry = self._entries.get(name) or self._read_head(name, heads[name])
            if entry is not None:
                known[name] = entry
        self._entries = known
        unit = self._unit
        self._unit = {name: unit[name] if name in unit else self._centred(e.embedding) for name, e in known.items()}
        return list(known.values())

    def _read_head(self, name: str, tokens: Tokens) -> Entry | None:
        try:
            with open(self.folder.path / name, "rb") as handle:
                handle.seek(files.HEAD.size + files.CRC.size + 4 * len(tokens))
                start = handle.read(HEAD.size + U32.size)
                data = start + handle.read(4 * min(len(self.centre), 1 << 20))
            embedding, _ = _embedding(data, len(self.centre))
        except FileNotFoundError:  # removed by another process meanwhile
            return None
        except EntryError:
            self.folder.discard(name)
            return None
        except OSError as error:
            raise _failed("read", self.folder.path, error) from error
        return Entry(name, tokens, embedding)

    def _centred(self, embedding: F32) -> F32:
        vector = embedding - self.centre
        return vector / max(float(np.linalg.norm(vector)), 1e-12)

    def nearest(self, embedding: F32, n: int, exclude: Collection[str] = ()) -> list[tuple[Entry, float]]:
        """The n most similar entries but for those named in `exclude`, with their cosines, best first.

        Raises WarmStartError for an embedding of another size and for a folder that has only entries of others.
        """
        if embedding.shape != self.centre.shape:
            raise WarmStartError(
                "embedding", f"expected {len(self.centre)} numbers, found {list(embedding.shape)}: of another kind"
            )
        found = [entry for entry in self.entries() if entry.name not in exclude]
        if not found:
            if others := self._n_others():
                raise WarmStartError(
                    FLAG,
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

    def name(self, tokens: Sequence[int]) -> str:
        """The name that the entry of a prompt has."""
        return files.Entry(self.identity, _tokens(tokens), b"").name()

    def load(self, entry: Entry) -> Summary:
        """A prompt's summary, checked as a whole; the entry counts as used now.

        Raises WarmStartError: another process removed it, it cannot be read, or it was damaged, and is dropped.
        """
        try:
            found = self.folder.read(entry.name)
            if found is None:
                raise WarmStartError(FLAG, f"expected the entry {entry.name}, found it removed by another process")
            return _decode(found.state, len(found.tokens), len(self.centre))
        except EntryError as error:
            self.folder.discard(entry.name)
            raise WarmStartError(FLAG, f"dropped the damaged entry {entry.name}: {error}") from error
        except OSError as error:
            raise _failed("read", self.folder.path, error) from error

    #
    # store
    #

    def add(self, tokens: Sequence[int], embedding: F32, summary: Summary) -> Entry:
        """Store a prompt, and remove those used longest ago beyond the capacity. Raises WarmStartError."""
        embedding = np.asarray(embedding, np.float32)
        if embedding.shape != self.centre.shape or summary.n_tokens != len(tokens):
            raise WarmStartError(
                FLAG,
                f"expected an embedding of {len(self.centre)} numbers and the summary of {len(tokens)} tokens, found "
                f"{list(embedding.shape)} and {summary.n_tokens}",
            )
        entry = files.Entry(self.identity, _tokens(tokens), _encode(embedding, summary))
        try:
            self.folder.write(entry)
            self.folder.trim(self.capacity, files.prefix(self.identity))
        except OSError as error:
            raise _failed("write", self.folder.path, error) from error
        return Entry(entry.name(), entry.tokens, embedding)

    def __contains__(self, tokens: Sequence[int]) -> bool:
        return os.path.isfile(self.folder.path / self.name(tokens))  # False, too, where the folder cannot be read


def _failed(what: str, folder: Path, error: OSError) -> WarmStartError:
    return WarmStartError(FLAG, f"cannot {what} {folder}: {error.strerror or error}")


def _tokens(tokens: Sequence[int]) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


#
# bytes
#


def _encode(embedding: F32, summary: Summary) -> bytes:
    head = HEAD.pack(MAGIC, len(embedding))
    listed = embedding.astype("<f4").tobytes()
    parts = [head, U32.pack(zlib.crc32(listed, zlib.crc32(head))), listed, U32.pack(len(summary.k))]
    for k, v in zip(summary.k, summary.v, strict=True):
        parts.append(SHAPE.pack(k.shape[0], k.shape[1], k.shape[2], v.shape[2]))
    for slots in (*summary.k, *summary.v):
        with np.errstate(over="ignore"):
            half = slots.astype("<f2")
        if not np.isfinite(half).all():
            raise WarmStartError(FLAG, "expected slots that fit 16 bits, found NaN or larger ones")
        parts.append(half.tobytes())
    return b"".join(parts)


def _embedding(data: bytes, n: int) -> tuple[F32, int]:
    """The embedding of n numbers that a state begins with, and where it ends. Raises EntryError."""
    start = HEAD.size + U32.size
    end = start + 4 * n
    if len(data) < end:
        raise EntryError(f"expected an embedding of {n} numbers, found {len(data)} bytes")
    magic, found = HEAD.unpack_from(data)
    if magic != MAGIC or found != n:
        raise EntryError(f"expected {MAGIC!r} and {n} numbers, found {magic!r} and {found}")
    if U32.unpack_from(data, HEAD.size)[0] != zlib.crc32(data[start:end], zlib.crc32(data[: HEAD.size])):
        raise EntryError("checksum of the embedding differs")
    return np.frombuffer(data, "<f4", n, start).astype(np.float32), end


def _decode(data: bytes, n_tokens: int, n: int) -> Summary:
    _, at = _embedding(data, n)
    try:
        (n_layers,) = U32.unpack_from(data, at)
        at += U32.size
        if SHAPE.size * n_layers > len(data):
            raise EntryError(f"expected a number of layers, found {n_layers}")
        shapes = [SHAPE.unpack_from(data, at + SHAPE.size * il) for il in range(n_layers)]
    except struct.error as error:
        raise EntryError(f"its shapes end early: {error}") from error
    at += SHAPE.size * n_layers
    wanted = [(h, m, d_k) for h, m, d_k, _ in shapes] + [(h, m, d_v) for h, m, _, d_v in shapes]
    sizes = [h * m * d for h, m, d in wanted]
    if len(data) != at + 2 * sum(sizes):
        raise EntryError(f"expected {at + 2 * sum(sizes)} bytes, found {len(data)}")
    slots = []
    for shape, size in zip(wanted, sizes, strict=True):
        slots.append(np.frombuffer(data, "<f2", size, at).astype(np.float32).reshape(shape))
        at += 2 * size
    return Summary(n_tokens, slots[:n_layers], slots[n_layers:])
