"""The layout of a converted model or a sidecar, read by libsubkv: bands, window, bases, fingerprint."""

from __future__ import annotations

import json
import os
from typing import Any

from subkv.base.errors import CacheError
from subkv.native import library


class Layout:
    """A subkv_layout. Use it as a context manager, or close() it.

    handle: libsubkv's. description: all data except the matrices (FORMAT.md §5). Raises CacheError about `path`, with
    libsubkv's sentence, if the file cannot be read or a key is missing or damaged.
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
        """Free the layout; objects that depend on it must be freed before."""
        self._library.subkv_layout_free(self.handle)
        self.handle = None


def has_layout(path: str | os.PathLike[str]) -> bool:
    """Whether a GGUF contains subkv.* keys. Raises CacheError about `path` if it cannot be read."""
    present: int = library.load().subkv_layout_present(os.fsencode(path))
    if present < 0:
        raise CacheError("path", library.last_error())
    return present > 0
