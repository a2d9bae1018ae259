"""The digest of a layout's keys (FORMAT.md §1.2). libsubkv compares it when it reads a file."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Mapping

Value = tuple[str, int | float | str]  # type ("u32", "u64", "f32", "str"), value

KEYS_DIGEST = "subkv.keys.sha256"
UNKNOWN = "0" * 64
CODES_VERSION = 4  # of rows and bases: part of the fingerprint
_BASIS = re.compile(r"subkv\.blk\.(\d+)\.basis")
_SCALARS = {"u32": (4, "<I"), "f32": (6, "<f"), "u64": (10, "<Q")}  # type -> its number in a GGUF, its bytes
_STRING = 8


def fingerprint(values: Mapping[str, Value]) -> str:
    """FORMAT.md §5, of all keys of a layout, whose `subkv.layout` is canonical."""
    fields = [values[f"subkv.{name}"][1] for name in ("arch", "block_count", "n_sink", "n_recent")]
    recent_bits = values.get("subkv.recent_bits", ("u32", 16))[1]
    if recent_bits != 16:
        fields.append(recent_bits)
    lines = [f"subkv {CODES_VERSION}", *fields, values["subkv.layout"][1], ""]
    digest = hashlib.sha256("\n".join(map(str, lines)).encode())
    bases = {int(match[1]): str(value) for key, (_, value) in values.items() if (match := _BASIS.fullmatch(key))}
    for _, text in sorted(bases.items()):
        digest.update(base64.b64decode(text))
    return digest.hexdigest()


def keys_digest(values: Mapping[str, Value]) -> str:
    """The value of KEYS_DIGEST in a file with these keys; keys of other programs do not count."""
    digest = hashlib.sha256()
    for key, (kind, value) in sorted(values.items(), key=lambda item: item[0].encode()):
        if key.startswith("subkv.") and key != KEYS_DIGEST and not _BASIS.fullmatch(key):
            digest.update(stored_key(key, kind) + _stored_value(kind, value))
    digest.update(fingerprint(values).encode())
    return digest.hexdigest()


def stored_key(key: str, kind: str) -> bytes:
    """A key and the number of its type, as a GGUF stores them before the value."""
    number = _STRING if kind == "str" else _SCALARS[kind][0]
    return struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<I", number)


def _stored_value(kind: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        text = value.encode()
        return struct.pack("<Q", len(text)) + text
    return struct.pack(_SCALARS[kind][1], value)
