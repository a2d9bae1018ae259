"""Files with random damage or hostile contents, for tests of readers.

SUBKV_FILES=100000 pytest tests/format tests/runtime tests/research/warmstart -k hostile
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

N_FILES = int(os.environ.get("SUBKV_FILES", "0"))
SETTINGS = settings(
    max_examples=N_FILES or 150,
    deadline=timedelta(seconds=20),
    database=None,
    derandomize=not N_FILES,
    suppress_health_check=list(HealthCheck),
)
TEXTS = st.text(max_size=8) | st.sampled_from(["", "\ud800", "\0", "1e999", "[" * 5000, "9" * 5000, "é" * 300])
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 8, 2**31, 2**63, 10**400, 5e-324, True])
JSON = st.recursive(
    st.none() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """One bit flipped, the end cut off, a part repeated or omitted, or some bytes replaced."""
    at, n = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 64))
    what = draw(st.sampled_from(["bit", "cut", "again", "out", "other"]))
    if what == "bit":
        return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
    if what == "cut":
        return data[:at]
    if what == "again":
        return data[: at + n] + data[at:]
    if what == "out":
        return data[:at] + data[at + n :]
    return data[:at] + draw(st.binary(min_size=1, max_size=16)) + data[at + n :]


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """JSON one part of which is another, is missing or is new."""
    if not isinstance(value, dict | list) or not value or not draw(st.integers(0, 5)):
        return draw(JSON)
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key, what = draw(st.sampled_from(list(keys))), draw(st.sampled_from(["in", "in", "in", "out", "new"]))
    if isinstance(value, list):
        parts = [draw(JSON), value[key]] if what == "new" else [draw(changed(value[key]))] if what == "in" else []
        return [*value[:key], *parts, *value[key + 1 :]]
    if what == "new":
        return value | {draw(TEXTS): draw(JSON)}
    rest = {name: part for name, part in value.items() if name != key}
    return rest | {key: draw(changed(value[key]))} if what == "in" else rest


def without_digest(data: bytes) -> bytes:
    """A safetensors file as earlier releases wrote it, in which a reader has to find damage by itself."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header["__metadata__"]
    header["__metadata__"] = {key: value for key, value in metadata.items() if not key.endswith(".digest")}
    assert len(header["__metadata__"]) == len(metadata) - 1
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


@st.composite
def safetensors(draw: st.DrawFn, data: bytes) -> bytes:
    """A file with other bytes, another header, or other metadata text, which may be valid JSON."""
    where = draw(st.sampled_from(["bytes", "header", "metadata", "inside", "inside"]))
    if where == "bytes":
        return draw(damaged(data))
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header["__metadata__"]
    if where == "header":
        header = draw(changed(header))
    elif where == "metadata":
        header["__metadata__"] = draw(changed(metadata))
    else:
        key = draw(st.sampled_from(sorted(metadata)))
        try:
            metadata[key] = json.dumps(draw(changed(json.loads(metadata[key]))))
        except ValueError:
            metadata[key] = draw(TEXTS)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]
