"""ExLlamaV3's quantized cache (exllamav3_ext/cache/q_cache_kernels.cuh, its default without a compander).

Keys after RoPE and values, in blocks of 32 of a head: y = Hx with the orthonormal Hadamard matrix H of 32, s = max|y|
in half precision, q = ⌊(y/s + 1)·2^(b−1)⌋ within 0 … 2^b − 1, ŷ = s·((2q + 1)/2^b − 1), x̂ = Hŷ. A grid of midpoints;
older versions rounded to multiples of s/2^(b−1). b + 0.5 bits per element, no exact window.
"""

from __future__ import annotations

import numpy as np

from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import half
from subkv.format.arrays import F32
from subkv.plan.basis import mixing_matrix

BLOCK = 32


def round_trip(x: F32, bits: int) -> F32:
    """x [..., d] as stored; d in multiples of BLOCK."""
    matrix = mixing_matrix(BLOCK).astype(np.float32)
    y = x.reshape(-1, BLOCK) @ matrix
    largest = np.abs(y).max(axis=1, keepdims=True) + np.float32(1e-10)
    steps = np.float32(2 ** (bits - 1))
    codes = np.clip(np.floor((y / largest + 1) * steps), 0, 2**bits - 1)
    decoded: F32 = (((codes + np.float32(0.5)) / steps - 1) * half(largest)) @ matrix
    return decoded.reshape(x.shape)


def make(known: Knowledge, bits_k: int, bits_v: int) -> Rival:
    known.blocks(BLOCK)

    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        return round_trip(k, bits_k), round_trip(v, bits_v)

    return Rival(quantize, (bits_k + bits_v) / 2 + 16 / BLOCK)
