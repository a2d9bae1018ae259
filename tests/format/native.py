"""The layout functions of libsubkv through ctypes, for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import capi
import numpy as np
import numpy.typing as npt


class MetadataError(Exception):
    """subkv_last_error() of a refused file."""


def last_error() -> str:
    """The sentence of the last failure; always valid UTF-8."""
    return str(capi.load().subkv_last_error().decode())


class Layout:
    """A loaded layout."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.json: dict[str, Any] = json.loads(capi.load().subkv_layout_json(handle).decode())
        self.fingerprint: str = self.json["fingerprint"]

    def __del__(self) -> None:
        capi.load().subkv_layout_free(self.handle)

    def basis(self, il: int, head: int, value: bool, decode: bool, n: int) -> npt.NDArray[np.float32]:
        """subkv_layout_basis into room for n values. Raises MetadataError."""
        out = np.full(n, np.nan, np.float32)
        found = capi.load().subkv_layout_basis(self.handle, il, head, value, decode, out.ctypes.data, n)
        if found < 0:
            raise MetadataError(last_error())
        return out[:found]


def load(path: Path | None, budget: float | None = None) -> Layout:
    """Reads a file (None: a null pointer), or its plan for a budget. Raises MetadataError."""
    name = os.fsencode(path) if path else None
    lib = capi.load()
    handle = lib.subkv_layout_load(name) if budget is None else lib.subkv_layout_load_budget(name, budget)
    if not handle:
        raise MetadataError(last_error())
    return Layout(handle)


def present(path: Path) -> int:
    """subkv_layout_present."""
    return int(capi.load().subkv_layout_present(os.fsencode(path)))
