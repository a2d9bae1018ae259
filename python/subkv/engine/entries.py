"""Files of the prompt cache: one entry is the tokens of a prompt and the state of a context that has evaluated them.

    offset  bytes  content, little-endian
         0      8  b"subkvPC1"
         8     32  SHA-256 of the context's identity (subkv.states)
        40      4  n, number of tokens
        44      8  m, bytes of the state
        52      4  CRC-32 of everything before and of the tokens
        56     4n  tokens, i32
         …      m  state, as llama_state_get_data wrote it
         …     32  SHA-256 of everything before

An entry never changes: its name is made of what it holds, and it appears under that name complete (written aside,
synchronised, renamed). So there is no index to lose and no lock to wait for; whoever reads a file that another process
removes keeps reading it. The modification time is the time of the latest use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

MAGIC = b"subkvPC1"
HEAD = struct.Struct("<8s32sIQ")
CRC = struct.Struct("<I")
N_DIGEST = 32
SUFFIX = ".prompt"
TEMPORARY = ".tmp"
OWN = re.compile(rf"[0-9a-f]{{24}}-[0-9a-f]{{32}}{re.escape(SUFFIX)}(\.\d+\.[0-9a-f]{{8}}{re.escape(TEMPORARY)})?")
STALE_SECONDS = 3600.0  # a file still being written is younger


class EntryError(ValueError):
    """A damaged entry."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """identity: 32 bytes; tokens [n] i32; state: what llama_state_set_data takes."""

    identity: bytes
    tokens: Tokens
    state: bytes

    def name(self) -> str:
        """Name of its file; starts with prefix(identity)."""
        digest = hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()
        return f"{prefix(self.identity)}{digest[:32]}{SUFFIX}"


def prefix(identity: bytes) -> str:
    """How the names of all entries of one kind of context begin."""
    return f"{identity.hex()[:24]}-"


def _head(identity: bytes, tokens: Tokens, n_state: int) -> bytes:
    fixed = HEAD.pack(MAGIC, identity, len(tokens), n_state)
    listed = tokens.astype("<i4").tobytes()
    return fixed + CRC.pack(zlib.crc32(listed, zlib.crc32(fixed))) + listed


def encode(entry: Entry) -> list[bytes]:
    """The entry's file in pieces, in order."""
    head = _head(entry.identity, entry.tokens, len(entry.state))
    digest = hashlib.sha256(head)
    digest.update(entry.state)
    return [head, entry.state, digest.digest()]


def decode_head(data: bytes) -> tuple[bytes, Tokens, int]:
    """Identity, tokens and size in bytes of the state of a file that begins with `data`. Raises EntryError."""
    start = HEAD.size + CRC.size
    if len(data) < start:
        raise EntryError(f"expected at least {start} bytes, found {len(data)}")
    magic, identity, n_tokens, n_state = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise EntryError(f"expected {MAGIC!r} at the start, found {magic!r}")
    if len(data) < start + 4 * n_tokens:
        raise EntryError(f"expected {n_tokens} tokens, found {(len(data) - start) // 4}")
    tokens = np.frombuffer(data, "<i4", n_tokens, start).astype(np.int32)
    if data[: start + 4 * n_tokens] != _head(identity, tokens, n_state):
        raise EntryError("checksum of the tokens differs")
    return identity, tokens, n_state


def decode(data: bytes) -> Entry:
    """The entry in the bytes of a whole file. Raises EntryError."""
    identity, tokens, n_state = decode_head(data)
    start = HEAD.size + CRC.size + 4 * len(tokens)
    if len(data) != start + n_state + N_DIGEST:
        raise EntryError(f"expected {start + n_state + N_DIGEST} bytes, found {len(data)}")
    view = memoryview(data)
    if hashlib.sha256(view[:-N_DIGEST]).digest() != data[-N_DIGEST:]:
        raise EntryError("checksum of the state differs")
    return Entry(identity, tokens, bytes(view[start:-N_DIGEST]))


class Folder:
    """The entries in one folder. Methods raise OSError where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Tokens] = {}  # by name; entries never change
        self._damaged: set[str] = set()  # names not to look at again: a folder may refuse to have them removed

    def heads(self, identity: bytes) -> dict[str, Tokens]:
        """Tokens of every entry of one kind of context, by name. Reads the heads of files not seen before.

        A damaged head removes its file.
        """
        begin = prefix(identity)
        known = {}
        for name in os.listdir(self.path):
            if not name.startswith(begin) or not name.endswith(SUFFIX) or name in self._damaged:
                continue
            tokens = self._known.get(name)
            if tokens is None and OWN.fullmatch(name):
                tokens = self._read_head(name, identity)
            if tokens is not None:
                known[name] = tokens
        self._known = known
        return dict(known)

    def _read_head(self, name: str, identity: bytes) -> Tokens | None:
        try:
            with open(self.path / name, "rb") as handle:
                data = handle.read(HEAD.size + CRC.size)
                if len(data) >= HEAD.size:
                    size = os.fstat(handle.fileno()).st_size
                    data += handle.read(min(4 * HEAD.unpack_from(data)[2], size))
        except FileNotFoundError:  # removed by another process meanwhile
            return None
        try:
            found, tokens, _ = decode_head(data)
            if found != identity:
                raise EntryError("it belongs to another context")
        except EntryError:
            self.discard(name)
            return None
        return tokens

    def discard(self, name: str) -> None:
        """Remove a damaged entry, or at least never list it again."""
        self._damaged.add(name)
        self.remove(name)

    def read(self, name: str) -> Entry | None:
        """An entry, checked as a whole, and marked as used now. None where another process removed it.

        Raises EntryError for a damaged one.
        """
        try:
            entry = decode((self.path / name).read_bytes())
            if entry.name() != name:
                raise EntryError("its name belongs to other tokens")
        except FileNotFoundError:
            self._known.pop(name, None)
            return None
        self.touch(name)
        return entry

    def touch(self, name: str) -> None:
        """Mark an entry as used now; in a folder that cannot be written the order of use is not kept."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def remove(self, name: str) -> None:
        self._known.pop(name, None)
        with contextlib.suppress(OSError):
            os.unlink(self.path / name)

    def write(self, entry: Entry) -> None:
        """Store an entry completely or not at all, also when the process or the machine stops at any moment."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # entries tell what was asked
        name = entry.name()
        temporary = self.path / f"{name}.{os.getpid()}.{os.urandom(4).hex()}{TEMPORARY}"
        try:
            with open(temporary, "xb") as handle:
                for piece in encode(entry):
                    handle.write(piece)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, self.path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._synchronize()
        self._known[name] = entry.tokens
        self._damaged.discard(name)

    def _synchronize(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _files(self) -> list[tuple[float, int, str]]:
        """(time of the latest use, bytes, name) of the files that were written here; others are left alone."""
        found = []
        with os.scandir(self.path) as files:
            for file in files:
                if OWN.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        found.append((status.st_mtime, status.st_size, file.name))
        return found

    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def trim(self, capacity: int, begin: str = "") -> None:
        """Remove what processes that were killed left behind, then the entries used longest ago beyond `capacity`.

        begin: only files whose names begin so are counted and removed, those of one kind of context (prefix).
        """
        now = time.time()
        files = sorted(file for file in self._files() if file[2].startswith(begin))
        total = sum(size for _, size, _ in files)
        for used, size, name in files:
            stale = name.endswith(TEMPORARY) and now - used > STALE_SECONDS
            if stale or (total > capacity and name.endswith(SUFFIX)):
                self.remove(name)
                total -= size
