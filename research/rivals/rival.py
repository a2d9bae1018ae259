"""What a codec under comparison is, and what it may know of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from subkv.base.errors import SubkvError
from subkv.format.arrays import F32, F64
from subkv.plan.positions import Pairs


class RoundTrip(Protocol):
    """What attention reads instead of keys and values.

    (il, k, v, first): k, v [n_head_kv, n, d] of positions first … first + n − 1. Rows of a last tile that is not whole
    may be left exact: a window of at least a tile covers them.
    """

    def __call__(self, il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]: ...


@dataclass(frozen=True)
class Rival:
    """One codec at its bits.

    row_bits: per K/V element, everything that grows with the tokens. table_bits: bits of what is stored once per
    model, per K/V element of one token. tile: rows that are coded together. n_sink, n_recent: exact rows of the
    original.
    """

    round_trip: RoundTrip
    row_bits: float
    table_bits: float = 0.0
    tile: int = 1
    n_sink: int = 0
    n_recent: int = 0


@dataclass(frozen=True)
class Knowledge:
    """A model as codecs see it. d: head size of K and V, as in every layer.

    queries: per layer [n_head_kv, d, d] second moments of queries after RoPE. cost_k, cost_v: per layer
    [n_head_kv, d, d], what errors cost. rotation: how positions turn keys, None where that is not known.
    """

    n_head_kv: int
    d: int
    queries: Sequence[F64]
    cost_k: Sequence[F64]
    cost_v: Sequence[F64]
    rotation: Pairs | None

    def power_of_two(self) -> int:
        """d. Raises SubkvError where it has no Hadamard matrix."""
        if self.d & (self.d - 1):
            raise SubkvError("codecs", f"expected a head size that is a power of two, found {self.d}")
        return self.d

    def blocks(self, size: int) -> int:
        """Blocks of `size` in a row. Raises SubkvError where they do not fill it."""
        if self.d % size:
            raise SubkvError("codecs", f"expected a head size in multiples of {size}, found {self.d}")
        return self.d // size


Make = Callable[[Knowledge, int, int], Rival]  # bits of K and V codes -> the codec; raises SubkvError
