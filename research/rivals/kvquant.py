"""KVQuant's nuq with 1% outliers (Hooper et al., NeurIPS 2024; quant/kvquant/simquant_module_quantizer.py).

Keys before RoPE, per channel: thresholds are the 0.5 and 99.5 percentiles of a calibration; what lies between is scaled
to −1 … 1 and rounded to the nearest of 2^b centroids per layer, by k-means weighted with Fisher information; what lies
outside is kept exactly, 32 bits each (value and index). Values per token over all heads: the same percentiles of the
token, the range of the others scaled to −1 … 1, offset and range in half precision. At 2 bits centroids are shifted and
stretched to keep mean and deviation (Q-Norm). The first token stays exact.

Favoured here: percentiles and centroids are fitted to the very text that is coded. Fisher information is that of the
planner's cost matrices: their diagonal, for keys averaged over rotary pairs, since those lie before RoPE.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import half, nearest
from subkv.base.errors import SubkvError
from subkv.format.arrays import F32, F64

OUTSIDE = 0.005  # share of outliers at each end
BINS, ITERATIONS = 4096, 50
BITS_OF_OUTLIER = 32


def fitted(x: F32, weight: F64, bits: int) -> F32:
    """[2^bits] ascending centroids of x within −1 … 1, [n] with weights [n]: k-means on a fine histogram."""
    mass, edges = np.histogram(x, bins=BINS, range=(-1.0, 1.0), weights=weight)
    center = 0.5 * (edges[1:] + edges[:-1])
    share = np.cumsum(mass) / mass.sum()
    centroids = np.interp((np.arange(2**bits) + 0.5) / 2**bits, share, center)
    for _ in range(ITERATIONS):
        own = np.searchsorted(0.5 * (centroids[1:] + centroids[:-1]), center)
        total = np.bincount(own, mass, len(centroids))
        moved = np.bincount(own, mass * center, len(centroids))
        centroids = np.divide(moved, total, out=centroids.copy(), where=total > 0)
    return half(centroids.astype(np.float32))


def _coded(x: F32, inside: NDArray[np.bool_], offset: F32, reach: F32, weight: F64, bits: int) -> F32:
    """x [n, c] with what is `inside` rounded. offset, reach: broadcast to x. weight: [c] of channels."""
    scaled = np.divide(x - offset, reach, out=np.zeros_like(x), where=reach > 0)
    weights = np.broadcast_to(weight, x.shape)[inside]
    centroids = fitted(scaled[inside], weights, bits)
    codes = nearest(scaled, centroids)
    if bits == 2:  # Q-Norm
        before, after = scaled[inside], codes[inside]
        stretch = before.std() / after.std() if after.std() > 0 else np.float32(1.0)
        codes = (codes - after.mean()) * stretch + before.mean()
    return np.where(inside, codes * reach + offset, x).astype(np.float32)


def round_trip_channels(x: F32, weight: F64, bits: int) -> F32:
    """Rows x [n, c] as stored with thresholds of channels, as keys are. weight: [c]."""
    low, high = (half(q.astype(np.float32)) for q in np.quantile(x, (OUTSIDE, 1 - OUTSIDE), axis=0))
    offset, reach = np.float32(0.5) * (high + low), np.float32(0.5) * (high - low)
    return _coded(x, (x >= low) & (x <= high), offset, reach, weight, bits)


def round_trip_tokens(x: F32, weight: F64, bits: int) -> F32:
    """Rows x [n, c] as stored with thresholds of tokens, as values are. weight: [c]."""
    low, high = np.quantile(x, (OUTSIDE, 1 - OUTSIDE), axis=1, keepdims=True)
    inside = (x > low) & (x < high)
    least = np.where(inside, x, np.inf).min(1, keepdims=True)
    most = np.where(inside, x, -np.inf).max(1, keepdims=True)
    empty = ~inside.any(1, keepdims=True)  # a constant row: all of it outside
    offset, reach = (np.where(empty, 0, part).astype(np.float32) for part in ((most + least) / 2, (most - least) / 2))
    return _coded(x, inside, half(offset), half(reach), weight, bits)


def outliers_of_token(channels: int) -> int:
    """Elements of a row at or beyond its thresholds, both ends."""
    return 2 * (channels - math.ceil((channels - 1) * (1 - OUTSIDE)))


def make(known: Knowledge, bits_k: int, bits_v: int) -> Rival:
    rotation = known.rotation
    if rotation is None:
        raise SubkvError("codecs", "kvquant expects a model whose rotary positions are known here, found another")
    heads, d = known.n_head_kv, known.d
    channels = heads * d
    pairs = np.eye(d) + np.eye(d)[rotation.partner]  # [d, d] which coordinates are rotated together
    averaged = pairs / pairs.sum(1, keepdims=True)

    def joined(x: F32) -> F32:
        return x.swapaxes(0, 1).reshape(-1, channels)

    def apart(x: F32) -> F32:
        return x.reshape(-1, heads, d).swapaxes(0, 1)

    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        weight_k = np.einsum("hii->hi", known.cost_k[il]) @ averaged.T
        weight_v = np.einsum("hii->hi", known.cost_v[il])
        positions = np.arange(first, first + k.shape[1])
        unrotated = rotation.rotate(k, -positions).astype(np.float32)
        keys = round_trip_channels(joined(unrotated), weight_k.ravel(), bits_k)
        values = round_trip_tokens(joined(v), weight_v.ravel(), bits_v)
        return rotation.rotate(apart(keys), positions).astype(np.float32), apart(values)

    row_k = bits_k + BITS_OF_OUTLIER * 2 * OUTSIDE
    row_v = bits_v + (BITS_OF_OUTLIER * outliers_of_token(channels) + 32) / channels
    tables = 16 * (2 * channels + 2**bits_k + 2**bits_v) / (2 * channels)  # of a layer: thresholds, centroids
    return Rival(quantize, (row_k + row_v) / 2, tables, n_sink=1)
