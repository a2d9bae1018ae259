"""The rotation of a model's keys by position, measured in the engine.

positions.py reads the rotation of some architectures from the metadata. For all others it is measured: the same tokens
are decoded at position 0 and at positions 1, 2, 4, …; a shift rotates every pair of a key's coordinates by the shift
times the pair's frequency. The doubled shifts give the frequency without ambiguity, precise enough for the last trained
position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from converter.session import Session
from subkv.engine.observer import PAUSE, SAMPLE
from subkv.format.arrays import F64
from subkv.plan.positions import Pairs, candidates

TOKENS = 32  # decoded at every shift
MOST_SHIFT = 1 << 20  # the engine's angles are float32, and a file may name any trained context
# Largest energy that a rotation may leave unexplained, relative to all energy: some models scale the rotated keys, and
# an almost right rotation is better than none. Wrong partners leave 0.24 and more.
TOLERANCE = 0.1


def measure(session: Session, tokens: Sequence[int], n_positions: int) -> dict[int, Pairs]:
    """The rotation of every observed layer's keys, by il, without layers whose keys do not rotate with the position.

    tokens: at most TOKENS are decoded. n_positions: of the trained context. The samples of the session are dropped.
    Raises SubkvError if the model cannot run.
    """
    tokens = tokens[:TOKENS]
    shifts = [1]
    while 2 * shifts[-1] + len(tokens) <= n_positions and shifts[-1] < MOST_SHIFT:
        shifts.append(2 * shifts[-1])
    check = shifts[-1] * 3 // 4 + 1  # no measured shift
    near = _rows(session, tokens, 0)
    partners = {il: candidates(session.source.gguf, rows.shape[-1]) for il, rows in near.items()}
    angles: dict[tuple[int, int], F64] = {}
    for shift in shifts:
        for il, rows in _rows(session, tokens, shift).items():
            for i, partner in enumerate(partners[il]):
                turned = _angles(near[il], rows, partner)
                expected = 2.0 * angles[il, i] if (il, i) in angles else np.zeros_like(turned)
                angles[il, i] = expected + np.angle(np.exp(1j * (turned - expected)))
    far, found = _rows(session, tokens, check), {}
    session.forget()
    for il, rows in far.items():
        fits = []
        for i, partner in enumerate(partners[il]):
            omega = np.clip(angles[il, i] / shifts[-1], -np.pi, np.pi)
            fits.append(Pairs(partner, (omega - omega[partner]) / 2.0))  # exactly opposite, also for pairs of zeros
        left = [_unexplained(near[il], rows, pairs, check) for pairs in fits]
        if min(left) < TOLERANCE:
            found[il] = fits[int(np.argmin(left))]
    return found


def _rows(session: Session, tokens: Sequence[int], first: int) -> dict[int, F64]:
    """By il: keys and queries [n, d_k] of the tokens from position `first` on; both have the same energy."""
    positions = range(first, first + len(tokens))
    session.forget()
    session.clear()
    session.mode(SAMPLE, positions, positions)
    session.decode(tokens, first)
    session.mode(PAUSE)
    out = {}
    for layer in session.layers():
        sides = [session.get(layer, name).reshape(-1, layer.d_k) for name in ("ks", "qs")]
        out[layer.il] = np.concatenate([rows / max(float(np.linalg.norm(rows)), 1e-30) for rows in sides])
    return out


def _angles(near: F64, far: F64, partner: NDArray[np.int64]) -> F64:
    """[d] the angle of every pair between two positions, as Pairs.omega has its sign; 0 without a partner."""
    along = np.einsum("nd,nd->d", near, far)
    across = np.einsum("nd,nd->d", near[:, partner], far)
    own = partner == np.arange(len(partner))
    return np.where(own, 0.0, np.arctan2(across - across[partner], along + along[partner]))


def _unexplained(near: F64, far: F64, pairs: Pairs, shift: int) -> float:
    """The energy of far − c·R_shift near over that of far; c, which a model may have for late positions, is free."""
    expected = pairs.rotate(near, shift)
    c = float(np.vdot(far, expected)) / max(float(np.vdot(expected, expected)), 1e-30)
    return float(np.sum((far - c * expected) ** 2) / max(float(np.sum(far**2)), 1e-30))
