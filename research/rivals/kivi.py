"""KIVI (Liu et al., ICML 2024; quant/new_pack.py and models/llama_kivi.py of its repository).

Keys per channel over GROUP tokens, values per token over GROUP channels: round to nearest between minimum and maximum,
scale and minimum in half precision, so b + 1 bits at GROUP 32. Every group starts at a multiple of GROUP tokens from
the first coded one. The newest values and up to as many of the newest keys stay exact: 128 in its benchmarks, 32 in its
examples. Here 128 of both, of the keys thus up to 127 more than in the original; 128 are counted.
"""

from __future__ import annotations

import numpy as np

from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import min_max
from subkv.format.arrays import F32

GROUP, RESIDUAL = 32, 128


def round_trip_keys(k: F32, bits: int) -> F32:
    """k [n_head_kv, n, d] as stored; tokens behind the last whole group stay as they are."""
    heads, n, d = k.shape
    whole = n - n % GROUP
    coded = min_max(k[:, :whole].reshape(heads, -1, GROUP, d), bits, axis=2).reshape(heads, whole, d)
    return np.concatenate([coded, k[:, whole:]], axis=1)


def round_trip_values(v: F32, bits: int) -> F32:
    """v [..., d] as stored; d in multiples of GROUP."""
    return min_max(v.reshape(-1, GROUP), bits, axis=1).reshape(v.shape)


def make(known: Knowledge, bits_k: int, bits_v: int) -> Rival:
    known.blocks(GROUP)

    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        return round_trip_keys(k, bits_k), round_trip_values(v, bits_v)

    return Rival(quantize, (bits_k + bits_v) / 2 + 32 / GROUP, tile=GROUP, n_recent=RESIDUAL)
