"""Latent attention (MLA): bases for rows whose first elements are also the values.

The first d_v elements of a row (the latent) and the others (the rotary part) are coded separately, so that values are
in the first bands. Without rotation there is no rotary part. The metric of the latent is the sum of its metrics as key
and as value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from subkv.format.arrays import F16, F64
from subkv.format.bases import Bands, CodedHead, StoredBasis, first_values
from subkv.format.calibration import LayerShape, LayerStats
from subkv.format.codec import rank
from subkv.plan import budget
from subkv.plan.basis import FullBasis, band_steps, fit_metric, fit_pca, repriced, slices, store
from subkv.plan.costs import LayerCost
from subkv.plan.gamma import gamma_of

MAX_BANDS = 8  # per row (FORMAT.md §2)
WIDEST = 16  # bits at any budget: a few directions are thousands of times larger and would set the step of others


def heads(
    shape: LayerShape, latent: F64, rotated: F64, in_bytes: bool = True, narrow: bool = False
) -> list[budget.Head]:
    """A layer for the planner, from the importance of its coefficients: the latent, then the rotary part.

    Bases have rows of d_k elements, and D again for values. in_bytes: E is in bytes; narrow: all of D is.
    """
    bits = budget.coefficient_bits(shape.d_k, in_bytes, narrow)
    parts = [budget.Head(shape.d_v, latent, basis_bits=bits + budget.matrix_row_bits(shape.d_v, narrow))]
    if shape.d_k > shape.d_v:
        parts.append(budget.Head(shape.d_k - shape.d_v, rotated, basis_bits=bits, joined=True))
    return parts


def joined(heads: Sequence[budget.Head], planned: Sequence[Bands]) -> list[Bands]:
    """The plan with at most MAX_BANDS bands per row. Merges neighbouring bands, with the smaller of their bits, where
    that costs least.

    heads, planned: latent and rotary part of all layers, alternating.
    """
    merged = list(planned)
    firsts = [i for i, head in enumerate(heads) if not head.joined]
    for first, end in zip(firsts, [*firsts[1:], len(merged)], strict=True):
        while sum(map(len, merged[first:end])) > MAX_BANDS:
            merged[first:end] = _with_one_merge(heads[first:end], merged[first:end])
    return merged


def _with_one_merge(heads: Sequence[budget.Head], planned: Sequence[Bands]) -> list[Bands]:
    """The plan with one band less."""
    costs = []
    for i, (head, bands) in enumerate(zip(heads, planned, strict=True)):
        for j, (part, (_, bits), (_, narrower)) in enumerate(zip(slices(bands), bands, bands[1:], strict=False)):
            loss = budget.loss(narrower) - budget.loss(bits)
            costs.append((float(head.importance[part].sum()) * loss, i, j))
    _, i, j = min(costs)
    merged, bands = list(planned), planned[i]
    merged[i] = (*bands[:j], (bands[j][0] + bands[j + 1][0], bands[j + 1][1]), *bands[j + 2 :])
    return merged


@dataclass(frozen=True)
class Fitted:
    """A layer's full bases of latent and rotary part, their second moments and costs.

    moments, costs: [d, d] each. cost: of keys and of values, as in other layers.
    """

    bases: list[FullBasis]
    moments: list[F64]
    costs: list[F64]
    cost: LayerCost

    @classmethod
    def of(cls, stats: LayerStats, cost: LayerCost, kind: str) -> Fitted:
        """kind: pca, or another name to fit the costs."""
        d = stats.shape.d_v
        costs = [cost.k[0, :d, :d] + cost.v[0], cost.k[0, d:, d:]]
        moments = [stats.k2[0, :d, :d], stats.k2[0, d:, d:]]
        if stats.shape.d_k == d:
            costs, moments = costs[:1], moments[:1]
        fit = fit_pca if kind == "pca" else fit_metric
        parts = _with_equal_cost([fit(*pair) for pair in zip(moments, costs, strict=True)])
        return cls([_sorted(repriced(*pair)) for pair in zip(parts, costs, strict=True)], moments, costs, cost)

    def heads(self, shape: LayerShape) -> list[budget.Head]:
        """The layer for the planner."""
        importance = [basis.importance for basis in self.bases]
        return heads(shape, importance[0], importance[-1], all(basis.fits_bytes for basis in self.bases))

    def code(self, stats: LayerStats, planned: Sequence[Bands], method: str) -> tuple[CodedHead, str]:
        """The rounded basis and gamma for the bands of both parts, and the source of gamma."""
        keys = stored(self.bases, self.moments, planned)
        gamma, source = gamma_of(method, stats, 0, keys, stats.k2[0])
        return CodedHead(keys, first_values(keys, stats.shape.d_v), gamma), source


def _with_equal_cost(parts: list[FullBasis]) -> list[FullBasis]:
    """Scale the parts so that an error of 1 costs the same in all coefficients, because a row has one scale, which is
    chosen by the unweighted squared error.
    """
    if not all(part.importance.any() for part in parts):
        return parts
    units = [float(part.variance.sum() / part.importance.sum()) for part in parts]
    factors = [(np.prod(units) ** (1 / len(units)) / unit) ** 0.5 for unit in units]
    return [
        replace(part, encode=f * part.encode, decode=part.decode / f, variance=f**2 * part.variance)
        for part, f in zip(parts, factors, strict=True)
    ]


def _sorted(part: FullBasis) -> FullBasis:
    """Sort by descending importance, which is free of ridges. With a ridge, directions of a latent that no layer reads
    would have a few bits, and thus determine the row's scale.
    """
    order = np.argsort(-part.importance, kind="stable")
    return FullBasis(part.encode[order], part.decode[order], part.variance[order], part.importance[order])


def stored(parts: Sequence[FullBasis], moments: Sequence[F64], planned: Sequence[Bands]) -> StoredBasis:
    """A row's block-diagonal basis. planned: bands of latent and rotary part."""
    blocks = [store(*part) for part in zip(parts, moments, planned, strict=True)]
    variance = np.concatenate([part.variance[: rank(of)] for part, of in zip(parts, planned, strict=True)])
    return _joined(blocks, planned, variance)


def _joined(blocks: Sequence[StoredBasis], planned: Sequence[Bands], variance: F64) -> StoredBasis:
    """The basis of a row from those of its parts. variance: of its coefficients before mixing."""
    bands = tuple(itertools.chain.from_iterable(planned))
    ratio = band_steps(bands, variance)[0].astype(np.float32)
    encode, decode = (_diagonal([getattr(block, name) for block in blocks]) for name in ("encode", "decode"))
    return StoredBasis(bands, encode, decode, ratio, np.zeros(encode.shape[1], dtype=np.float16))


def _diagonal(blocks: list[F16]) -> F16:
    """Block-diagonal matrix."""
    matrix = np.zeros(np.sum([block.shape for block in blocks], axis=0), dtype=np.float16)
    row, column = 0, 0
    for block in blocks:
        matrix[row : row + len(block), column : column + block.shape[1]] = block
        row, column = row + len(block), column + block.shape[1]
    return matrix
