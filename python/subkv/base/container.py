"""The file format for tokens and the state of a context that has evaluated them.

Used for saved chats and for entries of warm-start libraries:

    offset  bytes  content, little-endian
         0      8  b"subkvST1"
         8      4  h, bytes of the head
        12      4  n, number of tokens
        16      8  m, bytes of the state
        24      4  CRC-32 of the bytes before, the head and the tokens
        28      h  head: a JSON object with the identity of the context and the writer's own fields
         …     4n  tokens, i32
         …      m  state, as llama.cpp wrote it
         …     32  SHA-256 of all bytes before

Head and tokens can be read and checked without the large state. Files are written atomically.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from subkv.base.errors import StateError, concerning, system_reason
from subkv.base.files import atomic_file, open_regular

Tokens = npt.NDArray[np.int32]

MAGIC = b"subkvST1"
FIXED = struct.Struct("<8sIIQ")
CRC = struct.Struct("<I")
START = FIXED.size + CRC.size
N_DIGEST = 32
MAX_HEAD = 64 << 20  # bytes
MAX_TOKENS = 64 << 20


class ContainerError(ValueError):
    """A damaged file, or a file of another format."""


class OtherVersionError(ContainerError):
    """A file of another version of the format."""


@dataclasses.dataclass(frozen=True, eq=False)
class Container:
    """head: JSON object; tokens [n] i32; state: for llama_state_set_data."""

    head: dict[str, Any]
    tokens: Tokens
    state: bytes

    def pieces(self) -> list[bytes]:
        """The file in pieces, in order."""
        head = json.dumps(self.head, sort_keys=True).encode()
        tokens = np.asarray(self.tokens).astype("<i4").tobytes()
        fixed = FIXED.pack(MAGIC, len(head), len(self.tokens), len(self.state))
        begin = fixed + CRC.pack(zlib.crc32(fixed + head + tokens)) + head + tokens
        digest = hashlib.sha256(begin)
        digest.update(self.state)
        return [begin, self.state, digest.digest()]


def read_head(handle: BinaryIO) -> tuple[dict[str, Any], Tokens, int]:
    """Read head, tokens and the size of the state from position 0; the state itself is not read.

    Raises ContainerError, and OSError if the file cannot be read.
    """
    start = handle.read(START)
    if len(start) < START:
        raise ContainerError(f"expected at least {START} bytes, found {len(start)}")
    magic, n_head, n_tokens, n_state = FIXED.unpack_from(start)
    if magic != MAGIC and magic[:-1] == MAGIC[:-1]:
        raise OtherVersionError(
            f"expected version {MAGIC[-1:].decode()}, found {magic[-1:].decode('ascii', 'replace')!r}, which another "
            "version of subkv writes: evaluate its text again"
        )
    if magic != MAGIC:
        raise ContainerError(f"expected {MAGIC!r} at the start, found {magic!r}")
    size = handle.seek(0, os.SEEK_END)
    handle.seek(START)
    expected = START + n_head + 4 * n_tokens + n_state + N_DIGEST
    if size != expected:
        raise ContainerError(f"expected {expected} bytes, found {size}")
    if n_head > MAX_HEAD or n_tokens > MAX_TOKENS:  # a sparse file may be larger than the disk
        raise ContainerError(f"expected a head of at most {MAX_HEAD} bytes and {MAX_TOKENS} tokens, found more")
    head, tokens = handle.read(n_head), handle.read(4 * n_tokens)
    if CRC.unpack_from(start, FIXED.size)[0] != zlib.crc32(start[: FIXED.size] + head + tokens):
        raise ContainerError("checksum of head and tokens differs")
    try:
        parsed = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"its head is no JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ContainerError("its head is no object")
    return parsed, np.frombuffer(tokens, "<i4").astype(np.int32), n_state


def read_whole(handle: BinaryIO) -> Container:
    """Read and check a whole file from position 0. Raises ContainerError and OSError."""
    head, tokens, n_state = read_head(handle)
    begin = handle.tell()
    handle.seek(0)
    digest = hashlib.sha256(handle.read(begin))
    state = handle.read(n_state)
    digest.update(state)
    if digest.digest() != handle.read(N_DIGEST):
        raise ContainerError("checksum of the state differs")
    return Container(head, tokens, state)


def load(path: Path) -> Container:
    """Read and check a whole file. Raises ContainerError and OSError."""
    with open_regular(path) as handle:
        return read_whole(handle)


def write(path: Path, container: Container) -> int:
    """Write a file atomically; returns its size in bytes. Raises StateError about `path`."""
    pieces = container.pieces()
    with concerning(output="path"), atomic_file(path, StateError) as handle:
        for piece in pieces:
            handle.write(piece)
    return sum(len(piece) for piece in pieces)


def read(path: Path, writer: str) -> Container:
    """Read a file. writer: its program, for error messages. Raises StateError about `path`."""
    try:
        return load(path)
    except (OSError, MemoryError) as error:
        raise StateError("path", f"cannot read {path}: {system_reason(error)}") from error
    except ContainerError as error:
        raise StateError(
            "path", f"expected a file written by {writer}, found another format in {path} ({error})"
        ) from error


def check(container: Container, expected: dict[str, Any], path: Path) -> None:
    """Reject a file whose head does not have the expected values. Raises StateError about `path`."""
    for name, value in expected.items():
        if container.head.get(name) != value:
            raise StateError("path", f"{name}: expected {value}, found {container.head.get(name)} in {path}")
