"""The experiment `rotary`: keys behind bases of their rotary pairs, which the known phase carries to every position.

In complex coordinates RoPE multiplies a pair by exp(iωp). Before it a key is z in C^{d/2}; a unitary basis of that
space keeps pairs together, and at position p it is the one at 0 times the phases (papers/online-subspace-projection.md
§7). Offline: errors say what such a basis would be worth. Attention on its coefficients is not built: phases and basis
do not commute, so every key would have to be reconstructed (research/notes/quality.md, "Keys before RoPE").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from research.experiments.bounds import F64
from research.experiments.grids import Rows
from research.experiments.lab import Lab
from subkv.format.codec import F32
from subkv.plan.positions import Pairs, pairs

Numbers = NDArray[Any]  # float64 or complex128
Frame = Callable[[F32], Numbers]  # keys [n, d] of positions 0, 1, … -> rows [n, m] of the space that has a basis

PERIOD = 128  # tokens between two adaptive bases
WINDOW, LOOKAHEAD = 256, 128  # tokens that an anchored basis is fitted to, and how many of them follow its first token
BITS = 3.5  # per element, of the comparison at equal bits
AFTER, PAIRS, BEFORE = "after RoPE", "rotary pairs", "before RoPE"
STATIC, ADAPTIVE = "static", "adaptive"
TRAILING, AHEAD = f"last {WINDOW} tokens", f"{WINDOW} tokens, {LOOKAHEAD} of them ahead"
ANCHORS = {ADAPTIVE: (0, 0), TRAILING: (WINDOW, 0), AHEAD: (WINDOW, LOOKAHEAD)}  # window and look-ahead by basis


def frames(turn: Pairs) -> dict[str, Frame]:
    """The spaces compared. All keep lengths; one complex coordinate of PAIRS stands for two real ones."""
    first = np.flatnonzero(turn.omega < 0.0)  # of each pair

    def unrotated(k: F32) -> Numbers:
        return turn.rotate(k, -np.arange(len(k)))

    def in_pairs(k: F32) -> Numbers:
        x = unrotated(k)
        return np.asarray(x[:, first] + 1j * x[:, turn.partner[first]])

    return {AFTER: lambda k: k.astype(np.float64), PAIRS: in_pairs, BEFORE: unrotated}


def moment(x: Numbers) -> Numbers:
    """Σ xᴴx of rows x [n, m]: [m, m]."""
    out: Numbers = x.conj().T @ x
    return out


def directions(second: Numbers) -> tuple[Numbers, F64]:
    """The basis of a moment [m, m]: columns, by energy, and their energies [m]. A row's coefficients are x @ basis."""
    energy, vectors = np.linalg.eigh(second)
    return vectors[:, ::-1], np.maximum(energy[::-1], 0.0)


def water(energy: F64, bits: float) -> F64:
    """Bits [m] that code Gaussian coefficients of these energies with the least error, `bits` on average.

    max(0, ½ log₂(λ/θ)): reverse water-filling, θ by bisection.
    """
    log = 0.5 * np.log2(np.maximum(energy, 1e-30 * max(float(energy.max()), 1e-300)))
    low, high = float(log.min()) - bits, float(log.max())
    for _ in range(60):
        level = 0.5 * (low + high)
        low, high = (level, high) if np.maximum(log - level, 0.0).mean() > bits else (low, level)
    out: F64 = np.maximum(log - high, 0.0)
    return out


def lost(second: Numbers, x: Numbers, share: float) -> F64:
    """Squared errors of rows x behind a moment's basis: with a share of its directions, and at BITS per element."""
    basis, energy = directions(second)
    own: F64 = np.sum(np.abs(x @ basis) ** 2, axis=0)
    return np.array([own[round(share * len(own)) :].sum(), np.sum(own * 4.0 ** -water(energy, BITS))])


def _followed(x: Numbers, start: int, share: float, window: int, lookahead: int) -> F64:
    """lost() of rows x from `start` on, behind bases renewed every PERIOD rows.

    A basis has the `window` rows (0: all) that end `lookahead` rows after its first row, as `anchored` of float32.
    """
    total = np.zeros(2)
    for low in range(start, len(x), PERIOD):
        known = x[max(0, low + lookahead - window) if window else 0 : low + lookahead]
        total += lost(moment(known), x[low : low + PERIOD], share)
    return total


def rotary(lab: Lab) -> dict[str, Any]:
    """Squared relative error of raw keys, second half of every text: bases after and before RoPE, of rotary pairs.

    Adaptive bases are anchored in all tokens before (streaming), in the last ones, or in some that follow (look-ahead).
    """
    turn = pairs(lab.base, lab.reference.d)
    if turn is None or not turn.omega.all():
        return {"rows": [], "note": "Not measured: a model that turns all of a key's coordinates is expected."}
    spaces = frames(turn)
    known = _known(lab, spaces, turn)
    rows: Rows = []
    for text in lab.texts:
        rows += _rotary_of(lab, text.name, text.chunks[0], spaces, known)
    return {"rows": rows, "bits": BITS, "share": 0.5}


def _known(lab: Lab, spaces: dict[str, Frame], turn: Pairs) -> dict[tuple[int, int, str], Numbers]:
    """Moments of static bases, of (il, head, space): the first half of the in-domain text.

    After RoPE they depend on the positions: there they are those of the same keys at all positions of a chunk.
    """
    tokens = lab.texts[0].chunks[0]
    half = len(tokens) // 2
    found: dict[tuple[int, int, str], Numbers] = {}

    def visitor(il: int, q: F32, k: F32, v: F32) -> None:
        for h, keys in enumerate(k):
            found.update({(il, h, space): moment(frame(keys[:half])) for space, frame in spaces.items()})
            found[il, h, AFTER] = turn.matrix(found[il, h, AFTER][None], float(len(tokens) - half))[0]

    lab.visit(tokens, visitor)
    return found


def _rotary_of(
    lab: Lab, name: str, tokens: Sequence[int], spaces: dict[str, Frame], known: dict[tuple[int, int, str], Numbers]
) -> Rows:
    """Rows of one text."""
    start = len(tokens) // 2
    found: dict[tuple[str, str], list[F64]] = {}
    with tqdm(total=lab.reference.n_layer, unit="layer", disable=not lab.progress, desc=f"keys of {name}") as bar:

        def visitor(il: int, q: F32, k: F32, v: F32) -> None:
            for h, keys in enumerate(k):
                energy = float(np.sum(keys[start:].astype(np.float64) ** 2))
                for space, frame in spaces.items():
                    x = frame(keys)
                    fixed = known[il, h, space]
                    found.setdefault((space, STATIC), []).append(lost(fixed, x[start:], 0.5) / energy)
                    for kind, anchor in ANCHORS.items():
                        found.setdefault((space, kind), []).append(_followed(x, start, 0.5, *anchor) / energy)
            bar.update()

        lab.visit(tokens, visitor)
    rows: Rows = []
    for (space, kind), errors in found.items():
        at_rank, at_bits = np.mean(errors, axis=0)
        rows.append({"text": name, "space": space, "basis": kind, "rank": float(at_rank), "bits": float(at_bits)})
    return rows
