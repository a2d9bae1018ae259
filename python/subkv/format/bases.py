"""Stored bands, bases and gamma of heads and layers (FORMAT.md §2, §3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subkv.format.arrays import F16, F32
from subkv.format.calibration import LayerShape

Bands = tuple[tuple[int, int], ...]  # (coefficients, bits) per band, in order


@dataclass(frozen=True)
class StoredBasis:
    """Stored data of one head's K or V. encode, decode: [r, d] float16; ratio: [n_bands] float32, largest 1.

    mean: [d] float16, subtracted before encoding and added after decoding; zeros for V.
    """

    bands: Bands
    encode: F16
    decode: F16
    ratio: F32
    mean: F16

    def coefficients(self, x: F32) -> F32:
        """c = E x − E μ of rows x [n, d] float32: [n, r] float32, rounded as in the kernels."""
        offset = (self.encode.astype(np.float64) @ self.mean.astype(np.float64)).astype(np.float32)
        return (x @ self.encode.astype(np.float32).T).astype(np.float32) - offset


def first_values(keys: StoredBasis, d_v: int) -> StoredBasis:
    """The basis of a latent layer's values, the first d_v elements of its keys: the bands of these elements."""
    ends = np.cumsum([n for n, _ in keys.bands])
    n_bands = sum(not keys.encode[end - n : end, d_v:].any() for end, (n, _) in zip(ends, keys.bands, strict=True))
    rank = int(ends[n_bands - 1])
    encode, decode = keys.encode[:rank, :d_v], keys.decode[:rank, :d_v]
    return StoredBasis(keys.bands[:n_bands], encode, decode, keys.ratio[:n_bands], np.zeros(d_v, dtype=np.float16))


@dataclass(frozen=True)
class SharedMatrix:
    """E of all coefficients of one head's K or V, which the plans of a file share (FORMAT.md §3.3).

    codes None: steps is E, [d, d] float16. Else E is codes [d, d] int8 times steps [d] float16. mixed: bands of its
    rows need no mixing, which would undo a Hadamard matrix.
    """

    steps: F16
    codes: NDArray[np.int8] | None
    mixed: bool = False

    def values(self) -> F32:
        if self.codes is None:
            return self.steps.astype(np.float32)
        return self.steps.astype(np.float32)[:, None] * self.codes.astype(np.float32)

    def stored(self) -> bytes:
        """Its bytes in a file."""
        form = bytes([(self.codes is not None) + 2 * self.mixed])
        if self.codes is None:
            return form + self.steps.astype("<f2").tobytes()
        steps = self.steps.astype("<f2").view(np.uint8).reshape(-1, 2)
        return form + np.hstack([steps, self.codes.view(np.uint8)]).tobytes()


@dataclass(frozen=True)
class SharedHead:
    """The shared matrices of one KV head. mean: [d_k] float16, subtracted from keys."""

    mean: F16
    k: SharedMatrix
    v: SharedMatrix


@dataclass(frozen=True)
class CodedHead:
    """One KV head. gamma multiplies its logits. v of a latent layer: first_values() of k."""

    k: StoredBasis
    v: StoredBasis
    gamma: float


@dataclass(frozen=True)
class CodedLayer:
    """latent: values are the first d_v elements of keys, and are not stored."""

    shape: LayerShape
    heads: tuple[CodedHead, ...]
    latent: bool = False

    @property
    def elements(self) -> int:
        """Elements of one token: K and V, or the single row of a latent layer."""
        return self.shape.n_head_kv * (self.shape.d_k + (not self.latent) * self.shape.d_v)
