"""Options and statistics of adaptive bases (runtime/native/adapt/adapt.h).

Other modules of the library treat the value of `--adapt` as text.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from typing import Any

from subkv.base.errors import CacheError
from subkv.native import library as _lib

SIDES = {"k": 1, "v": 2, "kv": 3}  # numbers of subkv_adapt_parse
KINDS = ("covariance", "fd", "oja")  # in the order of subkv_adapt.h

_i32, _i64, _float = ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Params(ctypes.Structure):
    """subkv_adapt_params."""

    _fields_ = [
        *_lib.members(_i32, "kind", "rank", "rows"),
        *_lib.members(_float, "decay", "rate"),
        *_lib.members(_i32, "block", "length", "warm", "max_chunks"),
        *_lib.members(_float, "tau", "gain"),
        *_lib.members(_i32, "reuse", "merge", "window", "lookahead"),
    ]


class HeadStats(ctypes.Structure):
    """subkv_adapt_stats."""

    _fields_ = [
        *_lib.members(_i64, "n_blocks", "n_chunks", "n_opened", "n_refused", "n_merged", "n_recoded", "n_nonfinite"),
        *_lib.members(_i64, "bytes_bases", "bytes_sketch"),
        ("residual", ctypes.c_double),
    ]


SIGNATURES: _lib.Signatures = {  # of runtime/native/include/subkv_adapt.h
    "subkv_adapt_parse": (ctypes.c_bool, [ctypes.c_char_p, ctypes.POINTER(_i32), ctypes.POINTER(Params)]),
    "subkv_get_adapt_stats": (
        ctypes.c_bool,
        [ctypes.c_void_p, _i32, _i32, ctypes.c_bool, ctypes.POINTER(HeadStats)],
    ),
}


def has_adaptive_bases() -> bool:
    """Whether this build of libsubkv has them."""
    return hasattr(_lib.load(), "subkv_adapt_parse")


@functools.cache
def _subkv() -> ctypes.CDLL:
    """Raises CacheError if the build leaves adaptive bases out."""
    subkv = _lib.load()
    if not has_adaptive_bases():
        raise CacheError("adapt", "expected a build with adaptive bases, found one without (-DSUBKV_ADAPT=OFF)")
    return _lib.declare(subkv, SIGNATURES)


@dataclass(frozen=True)
class Adapt:
    """When a head gets a new basis, and the sketch that it is computed from; symbols of runtime/native/adapt/adapt.h.

    kind: of the sketch; rank, rows: its r and ℓ, 0: default; decay: of a row's weight per token; rate: Oja's η.
    block: B; length: L, 0: unlimited; warm: W; max_chunks: J_max; tau: relative residual of a block that triggers a new
    basis, 1: never; gain: a new basis is accepted if its residual is at most this times the old one's, large: always;
    reuse: 1: a block uses the best present basis; merge: at J_max, 1 merges the oldest chunks, 0 opens no more.
    window: every sketch starts with this many latest rows, 0: it has all rows; lookahead: rows after a block that its
    basis may be fitted to. So many tokens behind the block must be in the exact window and cannot be removed again.
    The defaults are the cheapest choice with most of the gain (research/notes/quality.md).
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
    window: int = 0
    lookahead: int = 0


def parse(text: str) -> tuple[str, Adapt]:
    """Parse `v` or `v,length=512,gain=0.9` (fields of Adapt) into the sides, "k", "v" or "kv", and an Adapt.

    Raises CacheError; libsubkv checks the limits of the numbers.
    """
    number, params = _i32(), Params()
    if not _subkv().subkv_adapt_parse(text.encode(), ctypes.byref(number), ctypes.byref(params)):
        raise CacheError("adapt", _lib.last_failure().sentence("adapt"))
    if not number:
        raise CacheError("adapt", f"expected k, v or kv, found {text!r}")
    values: dict[str, Any] = {"kind": KINDS[params.kind]}
    fields: Any = Params._fields_[1:]
    for name, kind in fields:
        value = getattr(params, name)
        values[name] = round(value, 6) if kind is _float else value  # 0.9 stays 0.9
    return next(sides for sides, value in SIDES.items() if value == number.value), Adapt(**values)


@dataclass(frozen=True)
class AdaptStats:
    """Adaptive bases of one layer's keys or values, summed over its heads.

    residuals: relative residual of every head's latest block.
    """

    il: int
    side: str  # "k" or "v"
    n_chunks: int  # present bases
    n_opened: int
    n_refused: int  # rejected candidates
    residuals: tuple[float, ...]


def adapt_stats(ctx: Any, n_layer: int) -> list[AdaptStats]:
    """Statistics of all layers and sides of a context (llama_context pointer) with adaptive bases."""
    stats: list[AdaptStats] = []
    if not has_adaptive_bases():
        return stats
    for il, side in itertools.product(range(n_layer), "kv"):
        heads: list[HeadStats] = []
        while _subkv().subkv_get_adapt_stats(ctx, il, len(heads), side == "v", raw := HeadStats()):
            heads.append(raw)
        if heads:
            sums = {key: sum(getattr(head, key) for head in heads) for key in ("n_chunks", "n_opened", "n_refused")}
            stats.append(AdaptStats(il, side, residuals=tuple(head.residual for head in heads), **sums))
    return stats


def report(stats: list[AdaptStats], n_bytes: int) -> dict[str, str]:
    """Statistics for a person, a value per name. n_bytes: of the bases and sketches."""
    if not stats:
        return {}
    rows = {"  adaptive bases": f"{n_bytes / 2**20:.2f} MiB, {sum(layer.n_chunks for layer in stats)} of all heads"}
    for layer in stats:
        rows[f"  layer {layer.il} {layer.side}"] = (
            f"{layer.n_chunks} bases, {layer.n_opened} opened, {layer.n_refused} refused, "
            f"residual {min(layer.residuals):.3f} to {max(layer.residuals):.3f}"
        )
    return rows
