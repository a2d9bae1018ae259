"""Estimates from a model's weights: the energies of the coordinates of keys and queries, and means from biases.

The input of a layer's attention is x = g ∘ z + β: z is the normalized residual stream, g and β are the norm's weights.
The second moment of z is estimated from the matrices that read the stream: they are sums of gradients, which are outer
products with the layer's inputs, so they are large in the directions in which the stream was large. The estimate is a
power of the matrices' mean Gram matrix, with few directions and a share of white noise. The energies follow from it.
Both coordinates of a rotary pair have the same energy, because positions rotate them. Quality: research/notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subkv.format.arrays import F32, F64
from subkv.format.calibration import LayerShape
from subkv.native.gguf import Base, Rows
from subkv.plan.positions import UNROTATED, pairs, partners

DIRECTIONS = 16  # of the residual stream
POWER = 4  # of the Gram matrix
WHITE = 0.3  # evenly spread share of the stream's energy
ROWS = 1  # sampled rows of weights per element of the stream, over all layers
ROUNDS = 3  # of subspace iteration
QUERIES = 2  # query heads read per group; more hardly change the estimate
SEED = 1
Mapped = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
WHY = "bases from the weights need it"


@dataclass(frozen=True)
class Energies:
    """One layer's keys and queries after RoPE, over all positions; [n_head_kv, d_k].

    k, q: mean squares of the coordinates. mean: of the keys, from biases. rest: mean squares of biases around the mean,
    caused by rotation, to be added to k.
    """

    k: F64
    q: F64
    mean: F64
    rest: F64


@dataclass(frozen=True)
class _Side:
    """The rows of a matrix that compute a layer's queries or keys, from `first` on; bias: of these rows."""

    matrix: Rows
    first: int
    count: int
    bias: F64 | None

    def rows(self, start: int, stop: int, step: int = 1) -> F32:
        return self.matrix.rows(slice(self.first + start, self.first + stop, step))


class Weights:
    """The weights of a model that compute queries and keys. Raises SubkvError for unreadable tensors."""

    def __init__(self, base: Base, shapes: Sequence[LayerShape], span: int, mapped: Mapped = map) -> None:
        """span: positions over which means are averaged. mapped: map(), possibly of a thread pool."""
        self._base, self._span, self._map = base, float(span), mapped
        arch = base.get("general.architecture")
        self._trained = float(base.get(f"{arch}.context_length") or span)
        self._unrotated = arch in UNROTATED
        self._stream = self._directions(shapes)

    def _vector(self, name: str) -> F64 | None:
        return self._base.tensor(name, WHY).ravel().astype(np.float64) if self._base.has_tensor(name) else None

    def _side(self, shape: LayerShape, side: str) -> _Side | None:
        """Side "q" or "k"; None if its rows are unknown. A fused matrix contains q, k and v in this order."""
        counts = {"q": shape.n_head * shape.d_k, "k": shape.n_head_kv * shape.d_k}
        name, first, total = f"blk.{shape.il}.attn_{side}", 0, counts[side]
        if not self._base.has_tensor(f"{name}.weight"):
            name, first = f"blk.{shape.il}.attn_qkv", 0 if side == "q" else counts["q"]
            total = sum(counts.values()) + shape.n_head_kv * shape.d_v
            if not self._base.has_tensor(f"{name}.weight"):
                return None
        matrix, bias = self._base.matrix(f"{name}.weight", WHY), self._vector(f"{name}.bias")
        if matrix.shape[0] != total or (bias is not None and len(bias) != total):
            return None
        return _Side(matrix, first, counts[side], None if bias is None else bias[first : first + counts[side]])

    def _norm(self, il: int, n: int) -> F32 | None:
        """Weights of the norm before attention, ones without a norm; None if they do not fit."""
        norm = self._vector(f"blk.{il}.attn_norm.weight")
        if norm is None:
            return np.ones(n, dtype=np.float32)
        return norm.astype(np.float32) if len(norm) == n else None

    def _readers(self, shapes: Sequence[LayerShape]) -> Iterator[tuple[_Side, F32]]:
        """All layers' queries and keys, and the weights of the norms before them."""
        for shape in shapes:
            for side in "qk":
                rows = self._side(shape, side)
                norm = None if rows is None else self._norm(shape.il, rows.matrix.shape[1])
                if rows is not None and norm is not None:
                    yield rows, norm

    def _directions(self, shapes: Sequence[LayerShape]) -> F32 | None:
        """Directions of the normalized stream as columns, [n, at most DIRECTIONS], whose squares sum to 1 − WHITE.

        Computed by subspace iteration on sampled rows. None without readers, or if their widths differ.
        """
        readers = list(self._readers(shapes))
        widths = {len(norm) for _, norm in readers}
        if len(widths) != 1:
            return None
        n = widths.pop()

        def sampled(reader: tuple[_Side, F32]) -> F32:
            side, norm = reader
            step = max(1, side.count * len(readers) // (ROWS * n)) | 1  # an odd step visits all coordinates of a head
            rows = side.rows(0, side.count, step)
            rows *= norm
            size = float(np.linalg.norm(rows))
            return rows * np.float32(rows.size**0.5 / size) if 0.0 < size < math.inf else np.zeros_like(rows)

        parts = list(self._map(sampled, readers))
        basis = np.random.default_rng(SEED).standard_normal((n, min(DIRECTIONS, n))).astype(np.float32)

        def gram_product(columns: F32) -> F32:
            """Σ rowsᵀ rows columns over all readers."""
            products = self._map(lambda rows: rows.T @ (rows @ columns), parts)
            return sum(products, np.zeros_like(columns))

        for _ in range(ROUNDS):
            basis = np.linalg.qr(gram_product(basis))[0]
        gram = basis.T @ gram_product(basis)
        values, vectors = np.linalg.eigh(gram.astype(np.float64))
        weight = np.maximum(values, 0.0) ** POWER
        if not weight.sum() > 0.0:
            return None
        columns: F32 = basis @ (vectors * np.sqrt((1.0 - WHITE) * weight / weight.sum())).astype(np.float32)
        return columns

    def energies(self, shape: LayerShape) -> Energies | None:
        """The energies of one layer; None if its weights or the rotation of its keys are unknown."""
        partner = partners(self._base, shape.d_k)
        sides = [self._side(shape, side) for side in "kq"]
        if self._stream is None or partner is None:
            return None
        first = np.arange(shape.n_head_kv)
        group = first[:, None] * shape.n_group + np.arange(min(shape.n_group, QUERIES))
        estimates = []
        for side, name, heads in zip(sides, "kq", (first, group.ravel()), strict=True):
            squares = None if side is None else self._squares(side, shape, name, heads)
            if squares is None or not all(np.isfinite(x).all() for x in squares):
                return None
            estimates.append(squares)
        (k, mean), (q, q_mean) = estimates
        k, q, of_bias = (_pair_mean(x, partner) for x in (k, _group_mean(q, shape), _group_mean(q_mean**2, shape)))
        # keys and queries of a pair grow together, so the geometric mean of both estimates is better than either
        shares = np.sqrt(k * q)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1e-300)
        k, q = shares * k.sum(axis=1, keepdims=True), shares * q.sum(axis=1, keepdims=True) + of_bias
        near, far = self._mean_rotated(mean, self._span), self._mean_rotated(mean, self._trained)
        if near is None or far is None:
            near = far = np.zeros_like(mean)
        # mean squares around `near`, averaged over all trained positions
        rest = _pair_mean(np.maximum(_pair_mean(mean**2, partner) - 2.0 * near * far + near**2, 0.0), partner)
        return Energies(k, q, near, rest)

    def _squares(self, side: _Side, shape: LayerShape, name: str, heads: NDArray[np.int64]) -> tuple[F64, F64] | None:
        """Variances and means of these heads before RoPE, both [heads, d_k]; None if shapes do not fit."""
        assert self._stream is not None
        d, n = shape.d_k, side.matrix.shape[1]
        norm, shift = self._norm(shape.il, n), self._vector(f"blk.{shape.il}.attn_norm.bias")
        if norm is None or n != len(self._stream):
            return None
        square, mean = np.zeros((len(heads), d)), np.zeros((len(heads), d))
        for i, head in enumerate(heads):  # a head's rows fit in the processor's caches
            rows = side.rows(head * d, head * d + d)
            if shift is not None and len(shift) == n:
                mean[i] = rows @ shift.astype(np.float32)
            if side.bias is not None:
                mean[i] += side.bias[head * d : head * d + d]
            rows *= norm
            projected = rows @ self._stream
            square[i] = n * np.einsum("ij,ij->i", projected, projected) + WHITE * np.einsum("ij,ij->i", rows, rows)
        weight = self._vector(f"blk.{shape.il}.attn_{name}_norm.weight")
        if weight is None:
            return square, mean
        if weight.size not in (d, side.count):
            return None
        # a norm of each head, or of all heads, divides by the root mean square
        size = square + mean**2
        size = size.mean(axis=1, keepdims=True) if weight.size == d else size.mean(keepdims=True)
        weight = (weight if weight.size == d else weight.reshape(-1, d)[heads]) / np.sqrt(np.maximum(size, 1e-300))
        return square * weight**2, mean * weight

    def _mean_rotated(self, means: F64, span: float) -> F64 | None:
        """Means [n, d] averaged over all positions in [0, span]; None if their rotation is unknown."""
        if self._unrotated or not means.any():
            return means
        rotary = pairs(self._base, means.shape[1])
        return None if rotary is None else rotary.vector(means, span)


def _pair_mean(squares: F64, partner: NDArray[np.int64]) -> F64:
    """Mean squares [heads, d], averaged over rotary pairs."""
    return np.asarray(0.5 * (squares + squares[:, partner]))


def _group_mean(x: F64, shape: LayerShape) -> F64:
    """Mean over query heads that share a KV head, [n_head_kv, d]."""
    return np.asarray(x.reshape(shape.n_head_kv, -1, x.shape[1]).mean(axis=1))
