"""llama.cpp's quantized cache types in numpy: keys and values after storing as q8_0 … q4_0.

Blocks of 32 after a Hadamard rotation, as in llama.cpp 0.3.36 for head sizes in multiples of 64: the rotation of keys
has the largest power of two that divides the head size, that of values 64.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants

from subkv.base.errors import SubkvError
from subkv.format.arrays import F32
from subkv.native.library import cache_types
from subkv.plan.basis import mixing_matrix

KINDS = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_BLOCK = 32


def bits(kind: str) -> float:
    """Bits per element of one of KINDS."""
    return cache_types()[kind][1]


def fits(d: int) -> bool:
    """Whether llama.cpp can quantize a cache of this head size."""
    return d % _BLOCK == 0


def rotation_size(d: int, keys: bool) -> int:
    """Size of the Hadamard matrix that rotates heads of size d, 1 for none."""
    if d % 64:
        return 1
    return d & -d if keys else 64  # the former is the largest power of two that divides d


def round_trip(kind: str, x: F32, keys: bool, latent: bool = False) -> F32:
    """Rows x [..., d] after storing them as `kind`, one of KINDS.

    latent: rows of latent attention, which are not rotated. Raises SubkvError for an unsupported d.
    """
    d = x.shape[-1]
    if kind == "f16":
        return x.astype(np.float16).astype(np.float32)
    if not fits(d):
        raise SubkvError(kind, f"expected a head size in multiples of {_BLOCK}, found {d}")
    size = 1 if latent else rotation_size(d, keys)
    matrix = mixing_matrix(size).astype(np.float32)
    rotated = np.ascontiguousarray((x.reshape(-1, size) @ matrix).reshape(-1, d))
    dtype = GGMLQuantizationType[kind.upper()]
    stored: F32 = quants.dequantize(quants.quantize(rotated, dtype), dtype)
    return np.asarray((stored.reshape(-1, size) @ matrix.T).reshape(x.shape))
