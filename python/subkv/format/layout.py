"""A layout of libsubkv, from a converted model, a sidecar or a model's weights: bands, window, bases, fingerprint."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection
from typing import Any

from subkv.base.closed import mark_closed
from subkv.base.errors import CacheError
from subkv.base.progress import note
from subkv.native import library

WITHOUT_DIGEST = 4  # format version whose keys have no checksum


class Layout:
    """A subkv_layout. Use it as a context manager, or close() it.

    budget: of one of the file's plans, in bits per element; 0: the file's default. derived: from the weights of the
    model at `path`, in memory, at any budget; sliding: its layers that need none, unless all are. handle: libsubkv's.
    description: all data except the matrices (subkv.h). Raises CacheError about `path`, with libsubkv's sentence, if
    the file cannot be read or a key is missing or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: float = 0.0,
        derived: bool = False,
        sliding: Collection[int] = (),
    ) -> None:
        self._library = library.load()
        name = os.fsencode(path)
        self.handle: int | None = (
            self._library.subkv_layout_derive(name, budget, *library.layers(sliding))
            if derived
            else self._library.subkv_layout_load_budget(name, budget)
        )
        if not self.handle:
            failure = library.last_failure()
            raise CacheError("path", failure.without_remedy(), failure.remedy)
        self.description: dict[str, Any] = json.loads(self._library.subkv_layout_json(self.handle).decode("utf-8"))
        if self.description["version"] == WITHOUT_DIGEST:
            _note_version(os.fspath(path))

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the layout; objects that depend on it must be freed before."""
        self._library.subkv_layout_free(self.handle)
        self.handle = None
        mark_closed(self)


@functools.cache  # once per process
def _note_version(path: str) -> None:
    note(f"note: {path}: format version {WITHOUT_DIGEST} has no checksum; convert the model again to add one")
