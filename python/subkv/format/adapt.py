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
    sides, *changes = text.split(",")
    if sides not in SIDES:
        raise CacheError("adapt", f"expected k, v or kv, found {sides!r}")
    kinds = {name: type(value) for name, value in vars(Adapt()).items()}
    given: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds:
            raise CacheError("adapt", f"expected one of {', '.join(kinds)}, found {name!r}")
        try:
            given[name] = kinds[name](value)
        except ValueError as error:
            raise CacheError("adapt", f"{name}: expected a number, found {value!r}") from error
    # what switches a trigger off is for the defaults to say: a user who names one wants it
    if not 0.0 < given.get("tau", 0.5) < 1.0:
        raise CacheError("adapt", f"tau: expected a relative residual between 0 and 1, found {given['tau']:g}")
    if given.get("length", 1) < 1:
        raise CacheError("adapt", f"length: expected at least 1 token, found {given['length']}")
    adapt = Adapt(**given)
    native_params(adapt)
    return sides, adapt


def native_params(params: Adapt) -> ctypes.Structure:
    """subkv_adapt_params. Raises CacheError for an unknown kind."""
    if params.kind not in KINDS:
        raise CacheError("adapt", f"kind: expected one of {', '.join(KINDS)}, found {params.kind!r}")
    fields: dict[str, Any] = {**vars(params), "kind": KINDS.index(params.kind)}
    return _lib.AdaptParams(**fields)
