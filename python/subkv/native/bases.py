"""The bases of a model, found by libsubkv: a file that the user names, or the model's own, a sidecar, the store."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import CacheError, ModelFileError, SubkvError
from subkv.base.numbers import real
from subkv.native import library

# subkv.h, in the order of the search
NONE, NAMED, EMBEDDED, BESIDE, STORED, WEIGHTS = range(6)
NO_SIDECAR = 6  # as `last`: EMBEDDED, else WEIGHTS
DERIVED_BUDGETS = (6.5, 5.2, 4.25, 3.5)  # bits per element of WEIGHTS that we propose, of all that are possible
CODED, AUTO = "subkv", "auto"  # our cache types
MAX_BUDGET = 64.0  # bits per element, FORMAT.md §3.3
SIDECAR_ENDING = ".subkv-sidecar.gguf"  # of the names of sidecar_path()


def budget_of(text: str) -> float | None:
    """The bits of `subkv:3`, without `subkv:`; None: other text. As parse_budget() of libsubkv."""
    if not re.fullmatch(r"[0-9.]+", text):
        return None
    try:
        bits = float(text)
    except ValueError:
        return None
    return bits if 0.0 < bits <= MAX_BUDGET else None


def check_budget(kv_bits: float | None) -> None:
    """Reject impossible bits per element. Raises CacheError about `kv_bits`."""
    if kv_bits is not None:
        expected = f"bits per element, more than 0 and at most {MAX_BUDGET:g}"
        real("kv_bits", kv_bits, sys.float_info.min, MAX_BUDGET, expected, CacheError)


@dataclass(frozen=True)
class FoundBases:
    """subkv_bases. path: None if no place has any, and for WEIGHTS. note: one line for the user, size: a part of it; ""
    if unusable.

    failure: why the bases cannot be used, or there are none. budget: in bits per element, for Layout().
    """

    source: int
    path: Path | None
    note: str
    size: str
    failure: library.Failure
    budget: float

    @property
    def is_usable(self) -> bool:
        return self.failure.kind == library.NO_ERROR

    @property
    def is_unavailable(self) -> bool:
        """Whether the system is the reason: the file itself may be sound."""
        return self.failure.kind == library.UNAVAILABLE


def find_bases(
    model: Path, named: Path | None, last: int, kv_bits: float | None = None, sliding: Collection[int] = ()
) -> FoundBases:
    """Find the bases of a model, from the first place up to `last`. kv_bits None: those of SUBKV_BITS, or the file's.

    sliding: layers that get no bases from the weights, unless all are.

    Raises ModelFileError about `model`, and CacheError about `kv_bits` (or SUBKV_BITS) if the bases have no such plan.
    """
    check_budget(kv_bits)
    from subkv.native.log import captured_log  # loads the native libraries: not for a --help

    lib = library.load()
    with captured_log(forward=False):  # ggml logs what is wrong with a file; the reason says it
        path = os.fsencode(named) if named else None
        found = lib.subkv_find_bases(os.fsencode(model), path, last, kv_bits or 0.0, *library.layers(sliding))
    if not found:
        raise ModelFileError("model", library.last_error())
    try:
        seen = found.contents
        failure = library.Failure.of(seen.error)
        if failure.kind == library.BUDGET:
            key = "SUBKV_BITS" if failure.key == "SUBKV_BITS" else "kv_bits"
            raise CacheError(key, failure.sentence(failure.key))
        return FoundBases(
            seen.source,
            Path(os.fsdecode(seen.path)) if seen.path else None,
            f"bases: {os.fsdecode(seen.words)}" if seen.words else "",
            os.fsdecode(seen.size),
            failure,
            float(seen.budget),
        )
    finally:
        lib.subkv_bases_free(found)


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
    """Hex digest of a few weights of a model, FORMAT.md §1.3; "": it has none of them.

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
