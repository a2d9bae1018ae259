"""The cost of errors in cached keys and values: one matrix per KV head.

With measured sensitivities (FORMAT.md §4), the cost is in nats of KLD per token. Sensitivities are noisy, because they
are estimated from one gradient per cell, so a share of the structural metric, scaled to the same energy, is added.
Without sensitivities, the structural metric is the cost: the queries' second moment for keys, the output projection
for values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from subkv.base.errors import SubkvError
from subkv.format.arrays import F32, F64
from subkv.format.calibration import Calibration, LayerShape, LayerStats
from subkv.native.gguf import Base, Rows
from subkv.plan import mla
from subkv.plan.basis import FullBasis, fit_metric, fit_pca, repriced
from subkv.plan.shared import readers

# Share of the structural metric in the measured one. SmolLM2-135M, 3.5 bits in rows, KLD on WikiText-2 test and
# Sherlock: with sensitivities of 16k tokens 0.0033 with none (ridge 1e-3), 0.0026 at 0.02 and 0.1, 0.0029 at 0.3; of
# 32k tokens and with the plan and decoder of today 0.00127 at 0.05, 0.00134 at 0.15, 0.00119 at 0.3.
SHRINKAGE = 0.2

# Weight of K relative to V without sensitivities. To first order, a logit error δ and a value error ε change the output
# of attention by Σ α² (δ²·E‖W(v − o)‖² + E‖W ε‖²), so the weight is 1 in units of the layer's centred value energy.
# But keys with much attention have values close to the output o, so the weight of K is smaller. Measured on
# SmolLM2-135M at 3.2 bits per element (WikiText-2 test, 2 x 1024 tokens, KLD to f16): 0.033 at weight 2, 0.025 at 1,
# 0.022 at 0.5 and 0.35.
KEY_WEIGHT = 0.4

NEAR = 3.0  # tokens, near_share()
PART = 512  # rows


@dataclass(frozen=True)
class LayerCost:
    """Per KV head of one layer. k, v: [n_head_kv, d, d]; an error e costs eᵀ M e. query, output: structural metrics."""

    k: F64
    v: F64
    query: F64
    output: F64


def _shrunk(measured: F64, structural: F64, moment: F64) -> F64:
    """(1 − SHRINKAGE) measured + SHRINKAGE structural, per head, the latter scaled to equal tr(M Σ)."""
    energy, structural_energy = (np.einsum("hij,hij->h", metric, moment) for metric in (measured, structural))
    scale = np.divide(energy, structural_energy, out=np.zeros_like(energy), where=structural_energy > 0.0)
    return (1.0 - SHRINKAGE) * measured + SHRINKAGE * scale[:, None, None] * structural


def resolve_bases(basis_k: str | None, basis_v: str | None, calibration: Calibration) -> tuple[str, str]:
    """The basis kinds: the requested ones, else the best ones for the calibration.

    Raises SubkvError for kld-aware without sensitivities.
    """
    measured = calibration.sensitivity is not None
    for key, requested in (("basis_k", basis_k), ("basis_v", basis_v)):
        if requested == "kld-aware" and not measured:
            raise SubkvError(
                key,
                "kld-aware expects a calibration with sensitivities, found none; `subkv lab sensitivity` adds them",
            )
    best_k, best_v = ("kld-aware", "kld-aware") if measured else ("query-aware", "output-aware")
    return basis_k or best_k, basis_v or best_v


def output_weights(base: Base, shape: LayerShape) -> F32:
    """W_o, blk.N.attn_output.weight [n_embd, n_head·d_v]: query head h reads columns h·d_v … (h+1)·d_v.

    For latent attention: mla.output_weights(). Raises SubkvError if the model has no such tensor.
    """
    if mla.is_latent(base):
        return mla.output_weights(base, shape)
    return _plain_output(base, shape).rows(slice(None))


def _plain_output(base: Base, shape: LayerShape) -> Rows:
    name, without = f"blk.{shape.il}.attn_output.weight", "--basis-v pca does not"
    weights, columns = base.matrix(name, f"output-aware bases need it, {without}"), shape.n_head * shape.d_v
    if weights.shape[1] != columns:
        reason = f"expected {columns} columns (heads × head size), found {weights.shape[1]}; {without} need it"
        raise SubkvError(name, reason)
    return weights


def output_grams(base: Base, shape: LayerShape) -> F32:
    """W_o,hᵀ W_o,h' of the heads of each group, [n_head_kv, n_group·d_v, n_group·d_v].

    Reads PART rows of W_o at a time, because a layer has 67 MB in an 8B model. Not for latent attention. Raises as
    output_weights().
    """
    weights, columns = _plain_output(base, shape), shape.n_group * shape.d_v
    grams = np.zeros((shape.n_head_kv, columns, columns), dtype=np.float32)
    for first in range(0, weights.shape[0], PART):
        rows = weights.rows(slice(first, first + PART))
        groups = rows.reshape(len(rows), shape.n_head_kv, columns).transpose(1, 0, 2)
        grams += groups.transpose(0, 2, 1) @ groups
    return grams


def output_metrics(base: Base, shape: LayerShape) -> F64:
    """Σ over the group's heads, of all layers that read the values, of W_o,hᵀ W_o,h: [n_head_kv, d_v, d_v].

    Raises as output_weights().
    """
    metrics = np.zeros((shape.n_head_kv, shape.d_v, shape.d_v))
    for il in readers(base, shape.il):
        weights = output_weights(base, replace(shape, il=il))
        for head in range(shape.n_head):
            of_head = weights[:, head * shape.d_v : (head + 1) * shape.d_v]
            metrics[head // shape.n_group] += (of_head.T @ of_head).astype(np.float64)
    return metrics


def value_metrics(base: Base, shape: LayerShape, basis_v: str) -> F64:
    """The structural metric of values, [n_head_kv, d_v, d_v]; for basis_v pca the identity, without reading weights."""
    if basis_v == "pca":
        return np.broadcast_to(np.eye(shape.d_v), (shape.n_head_kv, shape.d_v, shape.d_v)).copy()
    return output_metrics(base, shape)


def near_share(n_recent: int, measured: int) -> float:
    """Share of the last `measured` cells' sensitivity that remains with an exact window of n_recent tokens.

    Nearly all of it is that of the very last cells. SmolLM2-135M, 2048 tokens, measured for 128: 0.03 (keys) and 0.04
    (values) at 64, 0.06 and 0.07 at 32; this formula gives 0.02 and 0.06. It is 1 without a window, and 0 from
    `measured` on.
    """

    def left(n: int) -> float:
        return NEAR / (NEAR + n)

    least = left(measured)
    return max(left(n_recent) - least, 0.0) / (1.0 - least) if measured else 0.0


def layer_cost(stats: LayerStats, output: F64, near: float) -> LayerCost:
    """The cost matrices of a layer. output: value_metrics(); near: near_share() of the exact window, 1 without one."""
    measured = stats.sensitivity
    if measured is not None:
        k, v = measured.k + near * (measured.k0 - measured.k), measured.v + near * (measured.v0 - measured.v)
        k, v = 0.5 * _shrunk(k, stats.q2, stats.k2), 0.5 * _shrunk(v, output, stats.v2)
        return LayerCost(k, v, stats.q2, output)
    centred = stats.v2 - stats.v1[:, :, None] * stats.v1[:, None, :]
    energy = np.maximum(np.einsum("hde,hde->h", output, centred), 0.0)
    total = float(energy.sum())
    if total <= 0.0:
        return LayerCost(0.0 * stats.q2, 0.0 * output, stats.q2, output)
    weight = KEY_WEIGHT * stats.shape.scale**2 * energy / total
    return LayerCost(weight[:, None, None] * stats.q2, output / total, stats.q2, output)


def near_cost(whole: LayerCost, far: LayerCost) -> LayerCost:
    """The cost of errors in recent cells. whole: layer_cost() without a window; far: with it."""
    return replace(whole, k=whole.k - far.k, v=whole.v - far.v)


def fit_heads(kind: str, moments: F64, costs: F64, structural: F64) -> list[FullBasis]:
    """The bases of a layer's heads, K or V, with importance in the units of `costs`. All matrices [n_head_kv, d, d]."""

    def fit(moment: F64, cost: F64, metric: F64) -> FullBasis:
        if kind == "pca":
            return fit_pca(moment, cost)
        return fit_metric(moment, cost) if kind == "kld-aware" else repriced(fit_metric(moment, metric), cost)

    return [fit(*of_head) for of_head in zip(moments, costs, structural, strict=True)]
