"""Bases that follow the text: what a user may ask for (runtime/native/adapt.h says what each number does)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from subkv.base.errors import CacheError
from subkv.native import library as _lib

NONE = "none"  # what a user says to have static bases, whatever the file says
SIDES = {"k": 1, "v": 2, "kv": 3}  # as subkv_cache_params.adapt
KINDS = ("covariance", "fd", "oja")  # in the order of subkv.h


@dataclass(frozen=True)
class Adapt:
    """When a head gets a new basis, and from which sketch; runtime/native/adapt.h has the details.

    kind: of the sketch; rank, rows: its r and ℓ, 0: by default; decay: of a row's weight per token; rate: Oja's η.
    block: B; length: L, 0: never for its length; warm: W; max_chunks: J_max; tau: relative residual of a block that
    asks for a new basis, 1: none does; gain: a new basis must bring it to this times the old one's, large: it is always
    taken; reuse: 1: a block takes the best of the bases alive; merge: 1: at J_max the oldest chunks are merged, 0: no
    more are opened. Defaults: the cheapest choice with most of the gain (converter/NOTES.md).
    """

    kind: str = "covariance"
    rank: int = 0
    rows: int = 0
    decay: float = 1.0
    rate: float = 0.05
    block: int = 32
    length: int = 512
    warm: int = 1024
    max_chunks: int = 1
    tau: float = 1.0
    gain: float = 0.9
    reuse: int = 1
    merge: int = 0


def parse(text: str) -> tuple[str, Adapt]:
    """What adapts, "k", "v" or "kv", and how: `v` or `v,length=512,gain=0.9`, fields of Adapt.

    Raises CacheError; limits of the numbers are libsubkv's to check.
    """
    params = _lib.CacheParams()
    if not _lib.load().subkv_adapt_parse(text.encode(), ctypes.byref(params)) or not params.adapt:
        reason = _lib.last_error() if text != NONE else f"expected k, v or kv, found {NONE!r}"
        raise CacheError("adapt", reason.removeprefix("adapt: "))
    given: dict[str, Any] = {"kind": KINDS[params.adaptive.kind]}
    fields: Any = _lib.AdaptParams._fields_[1:]
    for name, kind in fields:
        value = getattr(params.adaptive, name)
        given[name] = round(value, 6) if kind is ctypes.c_float else value  # single precision: 0.9 is to read 0.9
    return next(sides for sides, number in SIDES.items() if number == params.adapt), Adapt(**given)


def native_params(params: Adapt) -> ctypes.Structure:
    """subkv_adapt_params. Raises CacheError for an unknown kind."""
    if params.kind not in KINDS:
        raise CacheError("adapt", f"kind: expected one of {', '.join(KINDS)}, found {params.kind!r}")
    fields: dict[str, Any] = {**vars(params), "kind": KINDS.index(params.kind)}
    return _lib.AdaptParams(**fields)
