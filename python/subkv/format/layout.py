"""The layout of a converted model or a sidecar as libsubkv reads it: bands, window, bases, fingerprint."""

from __future__ import annotations

import json
import os
from typing import Any

from subkv.base.errors import CacheError
from subkv.native import library


class Layout:
    """A subkv_layout. Use as a context manager, or close() it.

    handle: of libsubkv. description: everything but the matrices (FORMAT.md §5). Raises CacheError about `path`, with
    libsubkv's sentence, when it cannot be read or any key is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._library = library.load()
        self.handle: int | None = self._library.subkv_layout_load(os.fsencode(path))
        if not self.handle:
            raise CacheError("path", library.last_error())
        self.description: dict[str, Any] = json.loads(self._library.subkv_layout_json(self.handle).decode("utf-8"))

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it; nothing that was made of it may live any more."""
        self._library.subkv_layout_free(self.handle)
        self.handle = None


def has_layout(path: str | os.PathLike[str]) -> bool:
    """Whether a GGUF carries subkv.* keys. Raises CacheError about `path` when it cannot be read."""
    found: int = library.load().subkv_layout_present(os.fsencode(path))
    if found < 0:
        raise CacheError("path", library.last_error())
    return found > 0
