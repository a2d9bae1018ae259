"""The text that `convert MODEL` calibrates on when it is given none."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from typing import Any

from converter.corpus import Text
from subkv.format.calibration import TextSource

TOKENS = 16384


def read(template: Any = None) -> list[Text]:
    """Texts of about a chunk of 2048 tokens each, in the order in which they should be used."""
    data = "\n".join(pydoc_data.topics.topics.values()).encode()
    parts = [data[i * 12000 : (i + 1) * 12000].decode("utf-8", "ignore").encode() for i in range(12)]
    return [
        Text(TextSource(f"built-in {i}", hashlib.sha256(part).hexdigest(), len(part)), part)
        for i, part in enumerate(parts)
    ]
