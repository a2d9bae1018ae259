"""Hadamard matrices: orthogonal rows with entries 1 and −1, which spread each coordinate evenly.

Sylvester's doubling and Paley's two constructions give all multiples of 8 up to 576 except 184, 232, 344, 376, 472, 520
and 536. The entries of the inverse also have equal magnitude, so a basis and its decoder are exact in bytes.
"""

from __future__ import annotations

import functools

import numpy as np

from subkv.format.arrays import F64


@functools.cache
def hadamard(n: int) -> F64 | None:
    """[n, n] of 1 and −1; None if no construction has this order."""
    if n == 1:
        return np.ones((1, 1))
    half = hadamard(n // 2) if n % 2 == 0 else None
    if half is not None:
        return np.block([[half, half], [half, -half]])
    if n % 4 == 0 and (n - 1) % 4 == 3 and _is_prime(n - 1):
        return np.eye(n) + _bordered(n - 1, -1.0)
    if n % 4 == 0 and (n // 2 - 1) % 4 == 1 and _is_prime(n // 2 - 1):
        diagonal = np.kron(np.eye(n // 2), [[1.0, -1.0], [-1.0, -1.0]])
        return diagonal + np.kron(_bordered(n // 2 - 1, 1.0), [[1.0, 1.0], [1.0, -1.0]])
    return None


def spreading(n: int) -> F64:
    """Orthonormal [n, n] whose entries in a row have equal magnitude or are 0: a Hadamard matrix, or diagonal blocks of
    the largest ones. n: a multiple of 8, or a power of two."""
    first = next(size for size in range(n, 0, -8) if hadamard(size) is not None)
    matrix = np.zeros((n, n))
    matrix[:first, :first] = np.asarray(hadamard(first)) / np.sqrt(first)
    if first < n:
        matrix[first:, first:] = spreading(n - first)
    return matrix


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))


def _bordered(q: int, sign: float) -> F64:
    """[q + 1, q + 1]: Legendre symbols of index differences modulo q; first row 1, first column `sign`."""
    squares = np.full(q, -1.0)
    squares[np.arange(1, q) ** 2 % q] = 1.0
    squares[0] = 0.0
    index = np.arange(q)
    matrix = np.zeros((q + 1, q + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = squares[(index[None, :] - index[:, None]) % q]
    return matrix
