"""Computes bases from statistics. Linear algebra is in float64; matrices are stored in half precision.

A basis is the pair E (encode, c = E x) and D (decode, x̂ = Dᵀ c), both [r, d]. A fit returns all d coefficients, ordered
by importance. `store` selects those that have bands, mixes the coefficients of a band, and rounds. The mean μ is
subtracted from keys: c = E (k − μ), k̂ = γ Dᵀ c + μ; all moments below are those of k − μ.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import SubkvError
from subkv.format.arrays import F16, F64
from subkv.format.bases import Bands, StoredBasis
from subkv.format.codec import rank
from subkv.plan.hadamard import spreading
from subkv.plan.quantizer import best_step, distortion, shared_step

METRIC_RIDGE = 1e-4  # added to the metric's diagonal, times its mean eigenvalue; bounds the condition of E and D
MOMENT_RIDGE = 1e-7  # the same for the data's second moment, so that unseen directions get coefficients
MEAN_TOLERANCE = 1e-4  # tolerated negative eigenvalues of a centred moment (rounding), relative to the trace
MAX_LEAKAGE = 0.5  # largest share of other coefficients after rounding E to bytes; at 1, E may be singular
N_HALVES = 8  # first rows of D, always in halves: their coefficients are largest, and all cells share D's errors
NARROW_RIDGE = 1e-6  # as METRIC_RIDGE, for rounding D to bytes
STEP_FLOOR = 1e-6  # smallest band step relative to the row's largest, for bands without energy


@dataclass(frozen=True)
class FullBasis:
    """All d coefficients of one head.

    encode, decode: [d, d]. variance: [d], E c_i². importance: [d], expected squared error in the metric if coefficient
    i is dropped (for K: logit error before the softmax scale; for V: output error).
    """

    encode: F64
    decode: F64
    variance: F64
    importance: F64

    @functools.cached_property
    def fits_bytes(self) -> bool:
        """Whether E can be rounded to bytes, mixed or not. A metric with few directions needs halves."""
        mix = mixing_matrix(len(self.encode))
        for encode, decode in ((self.encode, self.decode), (mix @ self.encode, mix @ self.decode)):
            if np.linalg.norm((in_bytes(encode) - encode) @ decode.T, 2) >= MAX_LEAKAGE:
                return False
        return True


def gains(bands: Bands) -> F64:
    """[r] gain of every coefficient's quantizer: E[ĉ|c] = (1 − δ) c at the best step with distortion δ.

    Short rows without a path have smaller gains, but a decoder that compensates them is worse (SmolLM2-135M, 2.5 bits,
    KLD on WikiText-2 test: 0.0153 instead of 0.0136), because their coefficients hardly vary between cells.
    """
    return np.concatenate([np.full(n, 1.0 - distortion(bits)) for n, bits in bands])


def centred_moment(moment: F64, mean: F64, stored: F16) -> F64:
    """Second moment [d, d] of x − μ̃ from the second moment and the mean [d] of x; μ̃ = stored is the rounded mean.

    It is Σ − μ μ̃ᵀ − μ̃ μᵀ + μ̃ μ̃ᵀ, with negative eigenvalues from rounding set to 0. Raises SubkvError if they are
    larger than rounding, because then mean and moment contradict each other.
    """
    if not stored.any():
        return moment
    rounded = stored.astype(np.float64)
    values, vectors = np.linalg.eigh(
        moment - np.outer(mean, rounded) - np.outer(rounded, mean) + np.outer(rounded, rounded)
    )
    if values[0] < -MEAN_TOLERANCE * np.trace(moment):
        raise SubkvError(
            "k1",
            f"expected a mean whose square is within the second moment k2, found an eigenvalue of "
            f"{values[0]:.3g} in k2 − k1 k1ᵀ",
        )
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T, dtype=np.float64)


def _ridged(matrix: F64, relative: float) -> F64:
    d = len(matrix)
    ridged: F64 = 0.5 * (matrix + matrix.T) + relative * np.trace(matrix) / d * np.eye(d)
    return ridged


def _descending(matrix: F64) -> tuple[F64, F64]:
    """Eigenvalues in descending order (negative ones from rounding set to 0), and eigenvectors as columns."""
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    return np.maximum(values[::-1], 0.0), vectors[:, ::-1]


def fit_pca(moment: F64, metric: F64) -> FullBasis:
    """Eigenvectors of the second moment: E = Bᵀ = D. moment, metric: [d, d]; the metric affects only importance."""
    variance, vectors = _descending(moment)
    basis = np.ascontiguousarray(vectors.T)
    return repriced(FullBasis(basis, basis, variance, variance), metric)


def repriced(basis: FullBasis, cost: F64) -> FullBasis:
    """The basis with the importance under another cost: that of dropping coefficient i, E c_i² · D_i M D_iᵀ."""
    price = np.einsum("id,de,ie->i", basis.decode, cost, basis.decode)
    return replace(basis, importance=basis.variance * np.maximum(price, 0.0))


def fit_metric(moment: F64, metric: F64, ridge: float = METRIC_RIDGE) -> FullBasis:
    """Basis that minimises the expected metric error (x − x̂)ᵀ M (x − x̂) at every rank.

    U = eigenvectors of M^½ Σ M^½, E = Uᵀ M^½, D = Uᵀ M^-½: noise in any coefficient costs the same. Query-aware for
    keys (M = second moment of the queries), output-aware for values (M = Σ_h W_o,hᵀ W_o,h). E is scaled to entries of
    rms 1, D inversely. A metric without energy is replaced by the identity.
    moment, metric: [d, d] symmetric positive semi-definite.
    """
    d = len(moment)
    total = float(np.trace(metric))
    ridged = _ridged(metric, ridge) if total > 0.0 else np.eye(d)
    values, vectors = np.linalg.eigh(ridged)
    values = np.maximum(values, 1e-12 * values[-1])
    root = (vectors * np.sqrt(values)) @ vectors.T
    inverse_root = (vectors / np.sqrt(values)) @ vectors.T
    energy, rotation = _descending(root @ moment @ root)
    encode = rotation.T @ root
    decode = rotation.T @ inverse_root
    scale = 1.0 / np.sqrt(np.mean(encode**2))
    importance = energy if total > 0.0 else np.zeros(d)
    return FullBasis(scale * encode, decode / scale, scale**2 * energy, importance)


@functools.cache
def mixing_matrix(n: int) -> F64:
    """Orthonormal [n, n]: Hadamard (Sylvester) when n is a power of two, else DCT-II."""
    if n & (n - 1) == 0:
        return spreading(n)
    index = np.arange(n)
    matrix = np.sqrt(2.0 / n) * np.cos(np.pi * (index[None, :] + 0.5) * index[:, None] / n)
    matrix[0] /= np.sqrt(2.0)
    return np.asarray(matrix, dtype=np.float64)


def band_step(bits: int, variance: F64) -> tuple[float, bool]:
    """Best shared step of a band, and whether mixing lowers the expected error of Gaussian coefficients.

    variance: [n] of the unmixed coefficients. Mixing gives all coefficients the mean variance.
    """
    mean = float(variance.mean())
    if mean <= 0.0:
        return 0.0, False
    if np.ptp(variance) == 0.0:  # the search is only approximate, and mixing twice undoes the mixing
        return float(np.sqrt(mean)) * best_step(bits), False
    step, error = shared_step(bits, variance)
    if len(variance) * mean * distortion(bits) < error * (1.0 - 1e-3):
        return float(np.sqrt(mean)) * best_step(bits), True
    return step, False


def slices(bands: Bands) -> list[slice]:
    """The slice of coefficients of every band."""
    ends = np.cumsum([n for n, _ in bands])
    return [slice(int(end) - n, int(end)) for end, (n, _) in zip(ends, bands, strict=True)]


def band_steps(bands: Bands, variance: F64) -> tuple[F64, list[bool]]:
    """Steps of all bands, largest 1, and which bands to mix. variance: of the unmixed coefficients."""
    steps, mixed = np.ones(len(bands)), [False] * len(bands)
    for i, (part, (_, bits)) in enumerate(zip(slices(bands), bands, strict=True)):
        if bits != 16:  # 16-bit bands have no shared step
            steps[i], mixed[i] = band_step(bits, variance[part])
    coded = np.array([bits != 16 for _, bits in bands])
    if coded.any():
        largest = steps[coded].max()
        steps[coded] = np.maximum(steps[coded] / largest, STEP_FLOOR) if largest > 0.0 else 1.0
    return steps, mixed


def store(basis: FullBasis, moment: F64, bands: Bands, mean: F16 | None = None, narrow: bool = False) -> StoredBasis:
    """The stored basis of the coefficients that `bands` have: mixes them, rounds E (to bytes if possible), computes D.

    narrow: also round the rows of D after the first N_HALVES to bytes, if E is in bytes.

    At full rank, D is the inverse of the rounded E. At lower rank it is the linear decoder with the smallest expected
    error, D = (E Σ Eᵀ)⁻¹ E Σ, which does not depend on the metric. moment: [d, d] second moment Σ of the data minus
    `mean` ([d] as stored, None: zeros). D is divided by the quantizers' `gains`, because attention sums over cells, and
    a gain common to all cells does not average out. (SmolLM2-135M, KLD: 0.0041 instead of 0.0047 at 3 bits in rows,
    0.00090 instead of 0.00111 at 4.) Raises SubkvError if a value exceeds half precision.
    """
    d = basis.encode.shape[1]
    encode = basis.encode[: rank(bands)].copy()
    steps, mixed = band_steps(bands, basis.variance)
    for part, mix in zip(slices(bands), mixed, strict=True):
        if mix:
            encode[part] = mixing_matrix(part.stop - part.start) @ encode[part]
    rounded = half(in_bytes(encode) if basis.fits_bytes else encode, "E")
    exact = rounded.astype(np.float64)
    if len(encode) == d:
        decode = np.linalg.inv(exact).T
    else:
        sigma = _ridged(moment, MOMENT_RIDGE) if np.trace(moment) > 0.0 else np.eye(d)
        decode = np.linalg.solve(exact @ sigma @ exact.T, exact @ sigma)
    decode = decode / gains(bands)[:, None]
    if narrow and basis.fits_bytes:
        decode[N_HALVES:] = shaped_bytes(decode[N_HALVES:], basis.encode.T @ basis.encode)
    mean = np.zeros(d, dtype=np.float16) if mean is None else mean
    return StoredBasis(bands, rounded, half(decode, "D"), steps.astype(np.float32), mean)


def in_bytes(matrix: F64) -> F64:
    """byte_rows() as one matrix."""
    step, codes = byte_rows(matrix)
    return step * codes


def byte_rows(matrix: F64) -> tuple[F64, F64]:
    """Steps [r, 1] and multiples (-127 to 127) of them, for rows [r, d]; libsubkv stores them as bytes (FORMAT.md §3).

    Steps have a significand of 4 bits (that with the smallest error), so that all multiples are exact halves.
    """
    largest = np.maximum(np.abs(matrix).max(axis=1, keepdims=True), 2.0**-14)  # the smallest step of a half
    best, best_codes, best_error = np.ones_like(largest), matrix, np.full((len(matrix), 1), np.inf)
    for significand in range(8, 16):
        step = significand * 2.0 ** np.ceil(np.log2(largest / (127 * significand)))
        codes = np.rint(matrix / step)
        error = np.sum((step * codes - matrix) ** 2, axis=1, keepdims=True)
        best, best_codes = np.where(error < best_error, step, best), np.where(error < best_error, codes, best_codes)
        best_error = np.minimum(error, best_error)
    return best, best_codes


def shaped_bytes(matrix: F64, metric: F64) -> F64:
    """As in_bytes(), for rows [r, d] whose error e costs e M eᵀ: each entry's rounding error is compensated by the
    entries that are rounded later (Babai's nearest plane). metric: M [d, d].
    """
    d = matrix.shape[1]
    lower = np.linalg.cholesky(_ridged(metric, NARROW_RIDGE))  # e M eᵀ = |e L|²
    largest = np.maximum(np.abs(matrix).max(axis=1), 2.0**-14)
    exponent = np.floor(np.log2(largest / 127))
    step = np.ceil(largest / 127 / 2.0**exponent * 8) / 8 * 2.0**exponent  # a significand of 4 bits
    rounded = np.zeros_like(matrix)
    for j in range(d - 1, -1, -1):
        compensation = (matrix - rounded)[:, j + 1 :] @ lower[j + 1 :, j] / lower[j, j]
        rounded[:, j] = step * np.clip(np.rint((matrix[:, j] + compensation) / step), -127, 127)
    return rounded


def half(matrix: NDArray[np.floating], name: str) -> F16:
    """A matrix in half precision. Raises SubkvError if a value exceeds it."""
    with np.errstate(over="ignore"):
        rounded = matrix.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise SubkvError(f"basis {name}", f"expected values within half precision, found {np.abs(matrix).max():.3g}")
    return rounded
