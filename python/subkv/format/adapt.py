"""Options of adaptive bases (described in runtime/native/adapt.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from subkv.base.errors import CacheError
from subkv.native import library as _lib

NONE = "none"  # requests static bases, regardless of the file
SIDES = {"k": 1, "v": 2, "kv": 3}  # subkv_cache_params.adapt
KINDS = ("covariance", "fd", "oja")  # in the order of subkv.h


@dataclass(frozen=True)
class Adapt:
    """When a head gets a new basis, and from which sketch; details in runtime/native/adapt.h.

    kind: of the sketch; rank, rows: its r and ℓ, 0: default; decay: of a row's weight per token; rate: Oja's η.
    block: B; length: L, 0: unlimited; warm: W; max_chunks: J_max; tau: relative residual of a block that triggers a new
    basis, 1: never; gain: a new basis is accepted if its residual is at most this times the old one's, large: always;
    reuse: 1: a block uses the best present basis; merge: at J_max, 1 merges the oldest chunks, 0 opens no more.
    Defaults: the cheapest choice with most of the gain (converter/NOTES.md).
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
    """Parse `v` or `v,length=512,gain=0.9` (fields of Adapt) into the sides, "k", "v" or "kv", and an Adapt.

    Raises CacheError; libsubkv checks the limits of the numbers.
    """
    params = _lib.CacheParams()
    if not _lib.load().subkv_adapt_parse(text.encode(), ctypes.byref(params)) or not params.adapt:
        reason = _lib.last_error() if text != NONE else f"expected k, v or kv, found {NONE!r}"
        raise CacheError("adapt", reason.removeprefix("adapt: "))
    given: dict[str, Any] = {"kind": KINDS[params.adaptive.kind]}
    fields: Any = _lib.AdaptParams._fields_[1:]
    for name, kind in fields:
        value = getattr(params.adaptive, name)
        given[name] = round(value, 6) if kind is ctypes.c_float else value  # 0.9 stays 0.9
    return next(sides for sides, number in SIDES.items() if number == params.adapt), Adapt(**given)


def native_params(params: Adapt) -> ctypes.Structure:
    """subkv_adapt_params. Raises CacheError for an unknown kind."""
    if params.kind not in KINDS:
        raise CacheError("adapt", f"kind: expected one of {', '.join(KINDS)}, found {params.kind!r}")
    fields: dict[str, Any] = {**vars(params), "kind": KINDS.index(params.kind)}
    return _lib.AdaptParams(**fields)
