"""Error bounds of projected attention (papers/online-subspace-projection.md §8), on numpy arrays of one head.

Exact: l_i = s q·k_i, a = softmax(l), o = Σ a_i v_i. Projected: k̂_i = γ P_K k_i, v̂_i = P_V v_i with orthogonal
projectors, ΔK = K(I − P_K), ΔV = V(I − P_V). The paper's logit bound s γ‖q‖‖ΔK‖ forgets that γ ≠ 1 also scales what P
keeps: k − γPk = Δk + (1 − γ)Pk. The two parts are orthogonal, so ‖K − γKP‖² ≤ ‖ΔK‖² + (1 − γ)²‖KP‖²; at γ = 1 that is
the paper's.
Norms without a name are the largest singular value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
SLACK = 1.0 + 1e-6  # of a bound, for rounding in what it is held against


def norm(a: F64) -> float:
    """Largest singular value of a [n, d]; 0 for no rows. By the Gram matrix: d is small where n is not."""
    return float(np.sqrt(max(np.linalg.eigvalsh(a.T @ a)[-1], 0.0))) if a.size else 0.0


def residual(a: F64, basis: F64) -> float:
    """‖A(I − P)‖, P = BᵀB. a [n, d]; basis [r, d] with orthonormal rows."""
    return norm(a - (a @ basis.T) @ basis)


def kept(a: F64, basis: F64) -> float:
    """‖AP‖."""
    return norm(a @ basis.T)


def top(moment: F64, r: int) -> F64:
    """The r directions of most energy of a second moment [d, d]: [r, d], orthonormal rows."""
    return np.ascontiguousarray(np.linalg.eigh(moment)[1][:, ::-1][:, :r].T)


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Over the last axis, in the precision given."""
    weights: NDArray[Any] = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def attention_weights(logits: NDArray[Any], at: NDArray[np.integer]) -> NDArray[Any]:
    """Softmax over n keys of logits [..., m, n] of queries at positions at [m], which see no later key."""
    return softmax(np.where(np.arange(logits.shape[-1]) > at[:, None], -np.inf, logits))


@dataclass(frozen=True)
class Errors:
    """Of m queries. logit [m] ‖l − l̂‖∞, weight [m] ‖a − â‖₁, output [m] ‖o − ô‖; coded_output [m, d_v]: ô."""

    logit: F64
    weight: F64
    output: F64
    coded_output: F64


def compare(scale: float, q: F64, at: NDArray[np.intp], k: F64, v: F64, k_coded: F64, v_coded: F64) -> Errors:
    """Errors of attention on coded keys and values k̂, v̂ against exact k and v [n, d]; q [m, d] at positions at [m]."""
    later = np.arange(len(k))[None, :] > at[:, None]
    exact, coded = scale * q @ k.T, scale * q @ k_coded.T
    a, a_coded = (attention_weights(logits, at) for logits in (exact, coded))
    coded_output = a_coded @ v_coded
    return Errors(
        logit=np.where(later, 0.0, np.abs(exact - coded)).max(axis=1),
        weight=np.abs(a - a_coded).sum(axis=1),
        output=np.linalg.norm(a @ v - coded_output, axis=1),
        coded_output=coded_output,
    )


def paper_logit_bound(scale: float, gamma: float, q: float, residual_k: float) -> float:
    """s γ ‖q‖ ‖ΔK‖ ≥ ‖l − l̂‖∞ as the paper has it. True for γ = 1 alone."""
    return scale * gamma * q * residual_k


def logit_bound(scale: float, gamma: float, q: float, residual_k: float, kept_k: float) -> float:
    """s ‖q‖ √(‖ΔK‖² + (1 − γ)² ‖KP‖²) ≥ ‖l − l̂‖∞. q: ‖q‖."""
    return scale * q * float(np.hypot(residual_k, (1.0 - gamma) * kept_k))


def softmax_bound(logit_error: float) -> float:
    """2 tanh(‖l − l̂‖∞ / 2) ≥ ‖a − â‖₁; reached by two logits whose difference changes sign."""
    return 2.0 * float(np.tanh(0.5 * logit_error))


def output_bound(logit_error: float, largest_v: float, residual_v: float) -> float:
    """2 tanh(‖l − l̂‖∞ / 2) max‖v_i‖ + ‖ΔV‖ ≥ ‖o − ô‖. logit_error may be a bound of it."""
    return softmax_bound(logit_error) * largest_v + residual_v


def chunked(values: Sequence[float]) -> float:
    """What the bounds above take where cells lie in chunks with projectors of their own: the worst chunk's norm.

    For logits each cell has one chunk; for values ‖Σ_j â_jᵀ ΔV_j‖ ≤ Σ_j ‖â_j‖₁ ‖ΔV_j‖ ≤ max_j ‖ΔV_j‖, since all weights
    sum to 1.
    """
    return max(values, default=0.0)


def fd_epsilon(a: F64, r: int, rows: int) -> float:
    """ε = ‖A − A_r‖_F² / (ℓ − r) ≥ ‖AᵀA − SᵀS‖, S the Frequent Directions sketch of ℓ = rows > r."""
    values = np.linalg.eigvalsh(a.T @ a)[::-1]
    return float(np.maximum(values[r:], 0.0).sum()) / (rows - r)


def fd_residual_bound(a: F64, r: int, rows: int) -> float:
    """√(σ_{r+1}² + ε) ≥ ‖A(I − P)‖, P the sketch's top r directions, σ_{r+1} of A.

    ‖A(I − P)‖² ≤ ‖S(I − P)‖² + ε = σ_{r+1}(S)² + ε, and σ(S) ≤ σ(A). The paper's √ε + η has η for σ_{r+1}.
    """
    values = np.linalg.eigvalsh(a.T @ a)[::-1]
    return float(np.sqrt(max(values[r], 0.0) + fd_epsilon(a, r, rows))) if r < len(values) else 0.0


def ranks(x: F64) -> F64:
    """Rank of every value [n], ties sharing their mean."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: F64 = (last - 0.5 * (counts - 1))[inverse]
    return mean


def spearman(x: F64, y: F64) -> float:
    """Rank correlation of x and y [n]; nan where either is constant."""
    a, b = ranks(x), ranks(y)
    if a.std() == 0.0 or b.std() == 0.0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
