"""safetensors files with a digest of all their bytes, since the format has no checksum.

A member of `__metadata__` is the hex SHA-256 of the file in which the digits of this member are zeros.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save

from subkv.base.errors import SubkvError

ZEROS = "0" * 64


def pieces(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str], key: str) -> tuple[bytes, memoryview]:
    """The file in two pieces, with its digest as the member `key`. Equal contents give equal bytes.

    The members of the header are sorted, because the library writes them in random order. Layout: header length (u64),
    header (JSON padded with spaces to a multiple of 8), tensor data.
    """
    blob = save(dict(tensors), metadata={**metadata, key: ZEROS})
    end = _end(blob)
    text = json.dumps(json.loads(blob[8:end]), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head, data = len(text).to_bytes(8, "little") + text, memoryview(blob)[end:]
    return head.replace(_member(key, ZEROS), _member(key, _digest(head, data)), 1), data


def check(blob: bytes, metadata: Mapping[str, str], key: str) -> None:
    """Reject a damaged file. Raises SubkvError about `key`. Files of earlier versions have no digest."""
    stored = metadata.get(key)
    if stored is None:
        return
    end = _end(blob)
    found = _digest(blob[:end].replace(_member(key, stored), _member(key, ZEROS), 1), memoryview(blob)[end:])
    if stored != found:
        raise SubkvError(key, f"expected the digest of this file, {found}, found {stored!r}: the file is damaged")


def _end(blob: bytes) -> int:
    """Where the header ends."""
    return 8 + int.from_bytes(blob[:8], "little")


def _member(key: str, value: str) -> bytes:
    return f'"{key}":"{value}"'.encode()


def _digest(head: bytes, data: memoryview) -> str:
    digest = hashlib.sha256(head)
    digest.update(data)
    return digest.hexdigest()
