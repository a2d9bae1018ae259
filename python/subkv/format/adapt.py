"""Bases that follow the text: what a user may ask for, and what a context has learnt.

runtime/native/adapt/adapt.h says what each number does. Everything else passes the text of `--adapt` on.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from typing import Any

from subkv.base.errors import CacheError
from subkv.native import library as _lib

NONE = "none"  # what a user says to have static bases, whatever the file says
SIDES = {"k": 1, "v": 2, "kv": 3}  # as subkv_adapt_parse numbers them
KINDS = ("covariance", "fd", "oja")  # in the order of subkv_adapt.h

_i32, _i64, _float = ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Params(ctypes.Structure):
    """subkv_adapt_params."""

    _fields_ = [
        *_lib.members(_i32, "kind", "rank", "rows"),
        *_lib.members(_float, "decay", "rate"),
        *_lib.members(_i32, "block", "length", "warm", "max_chunks"),
        *_lib.members(_float, "tau", "gain"),
        *_lib.members(_i32, "reuse", "merge"),
    ]


class HeadStats(ctypes.Structure):
    """subkv_adapt_stats."""

    _fields_ = [
        *_lib.members(_i64, "n_blocks", "n_chunks", "n_opened", "n_refused", "n_merged", "n_recoded", "n_nonfinite"),
        *_lib.members(_i64, "bytes_bases", "bytes_sketch"),
        ("residual", ctypes.c_double),
    ]


SIGNATURES: _lib.Signatures = {  # of runtime/native/adapt/subkv_adapt.h
    "subkv_adapt_parse": (ctypes.c_bool, [ctypes.c_char_p, ctypes.POINTER(_i32), ctypes.POINTER(Params)]),
    "subkv_get_adapt_stats": (
        ctypes.c_bool,
        [ctypes.c_void_p, _i32, _i32, ctypes.c_bool, ctypes.POINTER(HeadStats)],
    ),
}


@functools.cache
def _subkv() -> ctypes.CDLL:
    return _lib.declare(_lib.load(), SIGNATURES)


@dataclass(frozen=True)
class Adapt:
    """When a head gets a new basis, and from which sketch; runtime/native/adapt/adapt.h has the details.

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
    number, params = _i32(), Params()
    if not _subkv().subkv_adapt_parse(text.encode(), ctypes.byref(number), ctypes.byref(params)) or not number:
        reason = _lib.last_error() if text != NONE else f"expected k, v or kv, found {NONE!r}"
        raise CacheError("adapt", reason.removeprefix("adapt: "))
    given: dict[str, Any] = {"kind": KINDS[params.kind]}
    fields: Any = Params._fields_[1:]
    for name, kind in fields:
        value = getattr(params, name)
        given[name] = round(value, 6) if kind is _float else value  # single precision: 0.9 is to read 0.9
    return next(sides for sides, value in SIDES.items() if value == number.value), Adapt(**given)


def native_params(params: Adapt) -> ctypes.Structure:
    """subkv_adapt_params. Raises CacheError for an unknown kind."""
    if params.kind not in KINDS:
        raise CacheError("adapt", f"kind: expected one of {', '.join(KINDS)}, found {params.kind!r}")
    fields: dict[str, Any] = {**vars(params), "kind": KINDS.index(params.kind)}
    return Params(**fields)


@dataclass(frozen=True)
class AdaptStats:
    """Adaptive bases of one layer's keys or values, over its heads.

    residuals: relative, of every head's latest block.
    """

    il: int
    side: str  # "k" or "v"
    n_chunks: int  # bases alive
    n_opened: int
    n_refused: int  # candidates that did not gain enough
    residuals: tuple[float, ...]


def adapt_stats(ctx: Any, n_layer: int) -> list[AdaptStats]:
    """Layers and sides of a context whose bases follow the text."""
    found = []
    for il, side in itertools.product(range(n_layer), "kv"):
        heads: list[HeadStats] = []
        while _subkv().subkv_get_adapt_stats(ctx, il, len(heads), side == "v", raw := HeadStats()):
            heads.append(raw)
        if heads:
            sums = {key: sum(getattr(head, key) for head in heads) for key in ("n_chunks", "n_opened", "n_refused")}
            found.append(AdaptStats(il, side, residuals=tuple(head.residual for head in heads), **sums))
    return found
