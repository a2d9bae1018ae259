"""TurboQuant (Zandieh et al., arXiv:2504.19874) as vLLM has it: Hadamard for Haar rotations, norm correction ("nc").

Keys: n = ‖k‖ in half precision, y = Hk/n, every coordinate to the nearest Lloyd-Max centroid of N(0, 1/d), ŷ brought to
length 1, k̂ = n·Hŷ. b + 16/d bits. Values: minimum and maximum of the token, 2^b levels between them, b + 32/d bits.
vLLM leaves the first and last two layers raw at 16 bits; here all layers are coded. No exact window. The paper's
variant with a sign sketch of the residual is in none of the implementations.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import half, min_max, nearest
from subkv.format.arrays import F32, F64
from subkv.plan.basis import mixing_matrix


@functools.cache
def _gaussian_centroids(bits: int) -> tuple[float, ...]:
    """Ascending Lloyd-Max centroids of a unit Gaussian, to 1e-9."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    c: F64 = np.linspace(-3.0, 3.0, 2**bits)
    while True:
        edges = np.concatenate([[-np.inf], 0.5 * (c[1:] + c[:-1]), [np.inf]])
        density = np.exp(-0.5 * edges**2) / math.sqrt(2.0 * math.pi)
        mass = 0.5 * np.diff(erf(edges / math.sqrt(2.0)))
        new = -np.diff(density) / mass
        if np.abs(new - c).max() < 1e-9:
            return tuple(new)
        c = new


def centroids(bits: int) -> F32:
    """[2^bits] ascending Lloyd-Max centroids of a unit Gaussian."""
    return np.array(_gaussian_centroids(bits), dtype=np.float32)


def round_trip_keys(k: F32, bits: int) -> F32:
    """k [..., d] as stored; d a power of two."""
    d = k.shape[-1]
    matrix = mixing_matrix(d).astype(np.float32)
    norm = np.linalg.norm(k, axis=-1, keepdims=True)
    unit = np.divide(k, norm, out=np.zeros_like(k), where=norm > 0)
    y = nearest(unit @ matrix * np.float32(math.sqrt(d)), centroids(bits))
    decoded: F32 = half(norm) * (y / np.linalg.norm(y, axis=-1, keepdims=True)) @ matrix
    return decoded


def make(known: Knowledge, bits_k: int, bits_v: int) -> Rival:
    d = known.power_of_two()

    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        return round_trip_keys(k, bits_k), min_max(v, bits_v, -1)

    return Rival(quantize, (bits_k + 16 / d + bits_v + 32 / d) / 2)
