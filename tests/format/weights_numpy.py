"""Estimates from a model's weights: the energies of the coordinates of keys and queries, and means from biases.

The input of a layer's attention is x = g ∘ z + β: z is the normalized residual stream, g and β are the norm's weights.
The second moment of z is estimated from the matrices that read the stream: they are sums of gradients, which are outer
products with the layer's inputs, so they are large in the directions in which the stream was large. The estimate is a
power of the matrices' mean Gram matrix, with few directions and a share of white noise. The energies follow from it.
Both coordinates of a rotary pair have the same energy, because positions rotate them. Quality: research/notes.

libsubkv computes the same bytes (runtime/native/bases/derive_weights.cpp). Long sums are therefore sums of integers,
which are exact in any order; short ones are in double, and rounding to integers, halves and floats hides their order.
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
from subkv.plan.positions import ABSOLUTE, HALVES, NEIGHBOURS, pairs

LEVELS = 2047  # largest integer of a row of weights, and of a direction
SUMS = 1 << 20  # the same of a row's products with the directions
DIRECTIONS = 16  # of the residual stream
POWER = 4  # of the Gram matrix
WHITE = 0.3  # evenly spread share of the stream's energy
SAMPLE = 1 << 24  # most elements of the sampled rows of weights, over all layers; at most as many rows as directions
MOST_WIDE = 32768  # elements of the stream
ROUNDS = 3  # of subspace iteration
QUERIES = 2  # query heads read per group; more hardly change the estimate
SMALLEST = 1e-30  # a row of smaller numbers counts as zeros
DEPENDENT = 1e-8  # share of a column that other columns do not explain, below which it is rounding
UNROTATED = (*ABSOLUTE, "bloom", "jais", "mpt", "refact")
# Further architectures for partners(): some of their layers may rotate at other frequencies or not at all.
ALSO_NEIGHBOURS = (
    "arcee", "arctic", "baichuan", "bailingmoe", "chameleon", "chatglm", "cohere2", "cohere2moe", "command-r",
    "deci", "deepseek", "ernie4_5", "ernie4_5-moe", "granite", "granitemoe", "internlm2", "llada", "llama4",
    "maincoder", "minicpm", "mistral3", "nanbeige", "olmo", "plm", "smollm3", "starcoder", "xverse",
)  # fmt: skip
ALSO_HALVES = (
    "afmoe", "apertus", "bailingmoe2", "bitnet", "codeshell", "dbrx", "dots1", "dream", "exaone", "exaone-moe",
    "exaone4", "falcon", "gemma3n", "gemma4", "gpt-oss", "grok", "grovemoe", "hunyuan-dense",
    "hunyuan-moe", "jais2", "llada-moe", "mellum", "mimo2", "minicpm3", "minimax-m2", "minimax-m3", "nemotron",
    "olmo2", "olmoe", "openelm", "orion", "pangu-embedded", "phi3", "phimoe", "plamo", "plamo3", "qwen", "qwen2moe",
    "rnd1", "qwen4exp", "seed_oss", "smallthinker",
)  # fmt: skip
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

    def _directions(self, shapes: Sequence[LayerShape]) -> F64 | None:
        """Directions of the normalized stream as columns, [n, at most DIRECTIONS], whose squares sum to 1 − WHITE.

        Computed by subspace iteration on sampled rows. None without readers, or if their widths differ.
        """
        readers = list(self._readers(shapes))
        widths = {len(norm) for _, norm in readers}
        if len(widths) != 1 or not 0 < max(widths) <= MOST_WIDE:
            return None
        n = widths.pop()
        n_rows = min(n, SAMPLE // n)

        def sampled(reader: tuple[_Side, F32]) -> tuple[F64, F64]:
            """Integers of some rows, and the weight of each: rows of a reader have a mean square of 1."""
            side, norm = reader
            step = -(-side.count * len(readers) // n_rows) | 1  # an odd step visits all coordinates of a head
            rows = side.rows(0, side.count, step)
            rows *= norm
            rows_i, scale = integers(rows)
            size = float(np.sum(scale**2 * np.sum(rows_i**2, axis=1)))
            return rows_i, scale**2 * (rows_i.size / size) if 0.0 < size < math.inf else np.zeros_like(scale)

        parts = list(self._map(sampled, readers))

        def products(columns: F64) -> list[F64]:
            return list(self._map(lambda part: part[0] @ columns, parts))

        def gram_product(columns: F64) -> F64:
            """Σ weight rowᵀ row columns over all rows; columns: integers. Every column has a scale of its own."""
            weighted = [p * weight[:, None] for p, (_, weight) in zip(products(columns), parts, strict=True)]
            largest = np.max([np.abs(p).max(axis=0, initial=0.0) for p in weighted], axis=0)
            factor = SUMS / np.where(largest > 0.0, largest, 1.0)
            sums = self._map(lambda i: parts[i][0].T @ np.rint(weighted[i] * factor), range(len(parts)))
            return sum(sums, np.zeros_like(columns))

        basis = signs(n, min(DIRECTIONS, n))
        for _ in range(ROUNDS):
            orthonormal = orthonormalized(gram_product(basis))
            basis, scale = columns_as_integers(orthonormal)
        gram = np.zeros((len(scale), len(scale)))
        for p, (_, weight) in zip(products(basis), parts, strict=True):
            gram += (p * scale).T @ (p * scale * weight[:, None])
        values, vectors = np.linalg.eigh(gram)
        shares = np.maximum(values, 0.0) ** POWER
        if not 0.0 < shares.sum() < math.inf:
            return None
        return orthonormal @ (vectors * np.sqrt((1.0 - WHITE) * (shares / shares.sum())))

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
        directions, of_direction = columns_as_integers(self._stream)
        beta = shift if shift is not None and len(shift) == n else np.zeros(n)
        shift_i, of_shift = integers(beta[None].astype(np.float32))
        for i, head in enumerate(heads):  # a head's rows fit in the processor's caches
            rows = side.rows(head * d, head * d + d)
            if np.any(of_shift):
                rows_i, scale = integers(rows)
                mean[i] = (rows_i @ shift_i[0]) * scale * of_shift
            if side.bias is not None:
                mean[i] += side.bias[head * d : head * d + d]
            rows *= norm
            rows_i, scale = integers(rows)
            in_stream = np.sum((rows_i @ directions * of_direction) ** 2, axis=1)
            square[i] = scale**2 * (n * in_stream + WHITE * np.sum(rows_i**2, axis=1))
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


def partners(base: Base, d: int) -> NDArray[np.int64] | None:
    """[d] the partner of each coordinate of a key of size d, itself if it is not rotated; None if unknown.

    Supports more models than pairs(), because it needs no frequencies.
    """
    arch = base.get("general.architecture")
    partner = np.arange(d)
    if arch in UNROTATED:
        return partner
    n_rot = base.get(f"{arch}.rope.dimension_count") or d
    if isinstance(n_rot, int) and n_rot > d:  # heads with sliding windows may be smaller
        n_rot = base.get(f"{arch}.rope.dimension_count_swa")
    neighbours = arch in NEIGHBOURS + ALSO_NEIGHBOURS
    known = neighbours or arch in HALVES + ALSO_HALVES
    if not known or not isinstance(n_rot, int) or n_rot > d or n_rot % 2:
        return None
    partner[:n_rot] = partner[:n_rot] ^ 1 if neighbours else np.roll(partner[:n_rot], n_rot // 2)
    return partner


def _pair_mean(squares: F64, partner: NDArray[np.int64]) -> F64:
    """Mean squares [heads, d], averaged over rotary pairs."""
    return np.asarray(0.5 * (squares + squares[:, partner]))


def _group_mean(x: F64, shape: LayerShape) -> F64:
    """Mean over query heads that share a KV head, [n_head_kv, d]."""
    return np.asarray(x.reshape(shape.n_head_kv, -1, x.shape[1]).mean(axis=1))


def integers(rows: F32) -> tuple[F64, F64]:
    """Rows [n, d] as integers up to LEVELS, and their steps [n]; NaN for rows that are not finite."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    zero = largest < np.float32(SMALLEST)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.rint(rows * np.where(zero, 0, np.float32(LEVELS) / largest)[:, None])
    finite = np.isfinite(largest)
    steps = np.where(finite, largest.astype(np.float64) / LEVELS, np.nan)
    return np.where(finite[:, None], values, 0.0).astype(np.float64), np.where(zero, 0.0, steps)


def columns_as_integers(columns: F64) -> tuple[F64, F64]:
    """Columns [n, d] as integers up to LEVELS, and their steps [d]."""
    largest = np.abs(columns).max(axis=0)
    step = largest / LEVELS
    return np.rint(columns / np.where(step > 0.0, step, 1.0)), step


def signs(n: int, m: int) -> F64:
    """[n, m] of 1 and −1 without order: bits of a hash (splitmix64) of the index."""
    x = np.arange(1, n * m + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.where(x >> np.uint64(63), -1.0, 1.0).reshape(n, m)


def orthonormalized(columns: F64) -> F64:
    """Orthonormal columns [n, m] of the same span (Gram-Schmidt, twice); zeros for those that depend on others."""
    done = np.zeros_like(columns)
    for k in range(columns.shape[1]):
        column = columns[:, k].copy()
        size = np.sqrt(np.sum(column**2))
        for _ in range(2):
            for j in range(k):
                column -= np.sum(done[:, j] * column) * done[:, j]
        rest = np.sqrt(np.sum(column**2))
        if rest > DEPENDENT * size:
            done[:, k] = column / rest
    return done
