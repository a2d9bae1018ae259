"""A layout of libsubkv, from a converted model, a sidecar or a model's weights: bands, window, bases, fingerprint."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from subkv.base.closed import mark_closed
from subkv.base.errors import CacheError
from subkv.base.progress import note
from subkv.format.window import Window
from subkv.native import library
from subkv.native.digest import Value

WITHOUT_DIGEST = 4  # format version whose keys have no checksum


class Layout:
    """A subkv_layout. Use it as a context manager, or close() it; its last reference frees it, too.

    budget: of one of the file's plans, in bits per element, or 0 for the file's default. derived: from the weights of
    the model at `path`, in memory, at any budget; sliding: its layers that need none, unless all are. handle:
    libsubkv's. description: all data except the matrices (subkv.h). Raises CacheError about `path`, with libsubkv's
    sentence, if the file cannot be read or a key is missing or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: float = 0.0,
        derived: bool = False,
        sliding: Collection[int] = (),
    ) -> None:
        lib, name = library.load(), os.fsencode(path)
        self._take(
            lib.subkv_layout_derive(name, budget, *library.layers(sliding))
            if derived
            else lib.subkv_layout_load_budget(name, budget),
            "path",
        )
        self._check_version(path)

    def _check_version(self, path: str | os.PathLike[str]) -> None:
        if self.description["version"] == WITHOUT_DIGEST:
            _note_version(os.fspath(path))

    @classmethod
    def of_weights(
        cls, keys: Mapping[str, Value], weights: Sequence[library.Matrix], kv_bits: float | None, window: Window
    ) -> Layout:
        """Bases from the weights of a model in memory. keys: its metadata; None: 6.5 bits per element.

        Raises CacheError about `kv_bits`, and about `model` if the model cannot have any.
        """
        from subkv.native.gguf import metadata_of  # numpy: not for a --help

        layout, matrices = cls.__new__(cls), (library.Matrix * len(weights))(*weights)
        sizes = window.n_sink, window.n_recent
        with metadata_of(keys) as metadata:
            handle = library.load().subkv_layout_derive_matrices(
                metadata, ctypes.addressof(matrices), len(weights), kv_bits or 0.0, *sizes
            )
        failed = library.last_failure().kind if not handle else library.NO_ERROR
        layout._take(handle, "kv_bits" if failed == library.BUDGET else "model")
        return layout

    @classmethod
    def of_handle(cls, handle: int, path: str | os.PathLike[str]) -> Layout:
        """A layout that libsubkv has given to the caller. path: of its file, for notes."""
        layout = cls.__new__(cls)
        layout._take(handle, "path")
        layout._check_version(path)
        return layout

    def _take(self, handle: int | None, key: str) -> None:
        """Raises CacheError about `key` if there is no handle."""
        self._library = library.load()
        self.handle: int | None = handle
        if not handle:
            failure = library.last_failure()
            of_budget = failure.key if failure.kind == library.BUDGET and key == "kv_bits" else ""
            raise CacheError(key, failure.without_remedy(of_budget), failure.remedy)
        self._free = weakref.finalize(self, self._library.subkv_layout_free, handle)
        self._free.atexit = False  # at the end of the process, other objects may still use it
        self.description: dict[str, Any] = json.loads(self._library.subkv_layout_json(handle).decode("utf-8"))

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the layout; objects that depend on it must be freed before."""
        self._free()
        self.handle = None
        mark_closed(self)


@functools.cache  # once per process
def _note_version(path: str) -> None:
    note(f"note: {path}: format version {WITHOUT_DIGEST} has no checksum; convert the model again to add one")
