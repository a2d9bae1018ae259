"""Where the bases of a model are stored, and what identifies it (libsubkv)."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from subkv.base.errors import CacheError, ModelFileError, SubkvError
from subkv.base.numbers import real
from subkv.native import library

# subkv.h, in the order of the search
NONE, NAMED, EMBEDDED, BESIDE, STORED, WEIGHTS = range(6)
DERIVED_BUDGETS = (6.5, 5.2, 4.25, 3.5)  # bits per element of WEIGHTS that we propose, of all that are possible
CODED, AUTO = "subkv", "auto"  # our cache types
MAX_BUDGET = 64.0  # bits per element, FORMAT.md §3.3
SIDECAR_ENDING = ".subkv-sidecar.gguf"  # of the names of sidecar_path()


def check_budget(kv_bits: float | None) -> None:
    """Reject impossible bits per element. Raises CacheError about `kv_bits`."""
    if kv_bits is not None:
        expected = f"bits per element, more than 0 and at most {MAX_BUDGET:g}"
        real("kv_bits", kv_bits, sys.float_info.min, MAX_BUDGET, expected, CacheError)


def model_content(model: Path) -> str:
    """Hex digest of the model's content, FORMAT.md §1.1: equal for copies, links, split and merged files.

    It reads metadata, the table of tensors, and three samples of 4096 bytes per tensor, which takes milliseconds.
    Raises ModelFileError about `model`.
    """
    digest = ctypes.create_string_buffer(65)
    if not library.load().subkv_model_content(os.fsencode(model), digest):
        raise ModelFileError("model", library.last_error())
    return digest.value.decode()


def model_weights(model: Path, first_layer: int, last_layer: int) -> str:
    """Hex digest of a few weights of a model, FORMAT.md §1.3, or "" if it has none of them.

    first_layer, last_layer: of the layers with bases. Raises ModelFileError about `model`.
    """
    digest = ctypes.create_string_buffer(65)
    if not library.load().subkv_model_weights(os.fsencode(model), first_layer, last_layer, digest):
        raise ModelFileError("model", library.last_error())
    return digest.value.decode()


def sidecar_path(model: Path) -> Path:
    """The path of --sidecar: M.gguf -> M.subkv-sidecar.gguf; M-00001-of-00002.gguf as M.gguf."""
    return _path(library.load().subkv_sidecar_path(os.fsencode(model), None, BESIDE))


def stored_path(model: Path, content: str, source: int = STORED) -> Path:
    """The file of STORED: the existing one, by the model's content, else one with the model's name.

    Raises SubkvError about XDG_CACHE_HOME.
    """
    return _path(library.load().subkv_sidecar_path(os.fsencode(model), content.encode(), source))


def sidecar_folder() -> Path:
    """The store: sidecars, calibrations and unfinished work. It may not exist yet. Raises as stored_path()."""
    return _path(library.load().subkv_sidecar_folder())


def _path(path: bytes | None) -> Path:
    if path is None:
        raise SubkvError("XDG_CACHE_HOME", library.last_failure().sentence("XDG_CACHE_HOME"))
    return Path(os.fsdecode(path))
