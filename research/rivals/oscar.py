"""OSCAR-INT2 (FutureMLS-Lab/OSCAR: rotation/compute_kv_rotation.py and its clipping kernel), with a rotation per head.

y = x·U·H: U = eigenvectors of the queries' second moment for keys, of Σ w_t v_t v_tᵀ with w_t = k_tᵀ(QᵀQ)k_t for
values; H = Hadamard. |y| is clipped at the ⌊0.96 d⌋-th (keys) or ⌊0.92 d⌋-th (values) smallest of its row, then rounded
to 4 levels between minimum and maximum, both kept in half precision: 2 + 32/d bits. (The original's permutation behind
H changes nothing where a row is one group; its repository makes one rotation per layer, the paper's best results have
one per head.) First 64 and last 256 tokens stay exact. Favoured here: the rotation of values is made from the very text
that is coded, that of keys from the calibration.
"""

from __future__ import annotations

import numpy as np

from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import min_max
from subkv.format.arrays import F32, F64
from subkv.plan.basis import mixing_matrix

SINKS, RECENT = 64, 256
CLIP_K, CLIP_V = 0.96, 0.92


def _rotation(moment: F64) -> F32:
    """U·H for a second moment [d, d]."""
    vectors = np.linalg.eigh(0.5 * (moment + moment.T))[1]
    return (vectors @ mixing_matrix(len(moment))).astype(np.float32)


def _round_trip(x: F32, rotation: F32, bits: int, clip: float) -> F32:
    """x [n, d] as stored."""
    y = x @ rotation
    limit = np.sort(np.abs(y), axis=1)[:, int(clip * y.shape[1]), None]
    return min_max(np.clip(y, -limit, limit), bits, axis=1) @ rotation.T


def make(known: Knowledge, bits_k: int, bits_v: int) -> Rival:
    d = known.power_of_two()

    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        keys, values = [], []
        for key, value, queries in zip(k, v, known.queries[il], strict=True):
            weight = np.einsum("ni,ij,nj->n", key, queries, key)
            moment = (value * weight[:, None]).T.astype(np.float64) @ value
            keys.append(_round_trip(key, _rotation(queries), bits_k, CLIP_K))
            values.append(_round_trip(value, _rotation(moment), bits_v, CLIP_V))
        return np.stack(keys), np.stack(values)

    # a rotation of d x d halves per head and side: 16 d bits per element of a token, in every layer
    return Rival(quantize, (bits_k + bits_v) / 2 + 32 / d, 16.0 * d, n_sink=SINKS, n_recent=RECENT)
