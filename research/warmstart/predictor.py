"""How far a warm start's first distribution is expected to be from the cold one, before anything is emitted.

ln KL is taken to be linear in two features: 1 − similarity, and the logarithm of a self-check, the divergence between
the warm distribution and another one that is as cheap. `fit` solves least squares and remembers the 90 % quantile of
the residuals; `predict` adds it, so that about nine of ten prompts stay below what it says. Fit it on prompts of the
kind that it is to judge.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from converter.scoring import F64
from research.warmstart.divergences import divergence
from subkv.base.errors import SubkvError

QUANTILE = 0.9
FLOOR = 1e-6  # nats: below, divergences are noise of rounding
NAMES = ("constant", "distance", "log_check", "margin")
MIN_PAIRS = 8


def _row(similarity: Any, self_check: Any) -> F64:
    """[…, 3] what ln KL is linear in."""
    similarity, self_check = np.asarray(similarity, np.float64), np.asarray(self_check, np.float64)
    return np.stack([np.ones_like(similarity), 1.0 - similarity, np.log(np.maximum(self_check, FLOOR))], axis=-1)


def fit(features: ArrayLike, kl: ArrayLike) -> dict[str, float]:
    """Coefficients from pairs of features [n, 2] (similarity, self-check in nats) and divergences KL [n] in nats.

    Raises SubkvError for fewer than 8 pairs and for what is not finite.
    """
    given = np.asarray(features, np.float64).reshape(-1, 2)
    found = np.asarray(kl, np.float64)
    if len(given) != len(found) or len(found) < MIN_PAIRS:
        raise SubkvError("guard", f"expected {MIN_PAIRS} pairs or more, found {len(given)} and {len(found)}")
    if not (np.isfinite(given).all() and np.isfinite(found).all()):
        raise SubkvError("guard", "expected finite features and divergences, found others")
    rows, target = _row(given[:, 0], given[:, 1]), np.log(np.maximum(found, FLOOR))
    solved = np.linalg.lstsq(rows, target, rcond=None)[0]
    margin = float(np.quantile(target - rows @ solved, QUANTILE))
    return dict(zip(NAMES, (*map(float, solved), margin), strict=True))


def predict(coefs: dict[str, float], similarity: float, self_check: float) -> float:
    """The KL in nats that nine of ten prompts are expected to stay below; infinite without coefficients."""
    if not coefs:
        return math.inf
    missing = [name for name in NAMES if name not in coefs]
    if missing:
        raise SubkvError("guard", f"expected the coefficients {', '.join(NAMES)}, found no {missing[0]}")
    weights = np.array([coefs[name] for name in NAMES[:3]])
    with np.errstate(over="ignore"):
        return float(np.exp(_row(similarity, self_check) @ weights + coefs["margin"]))


def self_check(log_p: F64, log_other: F64) -> float:
    """KL(p‖other) in nats of two rows of log-probabilities [n_vocab]: how much the answer hangs on the neighbour."""
    return max(divergence(log_p, log_other), 0.0)
