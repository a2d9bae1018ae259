"""The experiment `oja`: OjaKV (papers/ojakv.md), bases that Oja's rule turns from the calibration's towards the text.

The first half of a chunk is the prompt: one update with η = 0.1 on its salient tokens, those that its last queries
attend to most. In the second half the basis learns every T tokens with η = 0.05; a token is coded when it leaves the
exact window, with the basis of that time. Coefficients are single precision: what is compared is subspaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from research.experiments import bounds
from research.experiments.bounds import F64
from research.experiments.grids import Rows
from research.experiments.lab import Lab, Text
from research.experiments.sketch import Sketch
from research.float32.caches import Cache
from research.float32.reference import Coder
from subkv.format.calibration import LayerStats
from subkv.format.codec import F32
from subkv.format.window import Window

EXACT = 32  # first tokens, and last ones
PERIOD = 32  # T
PROMPT_RATE, TEXT_RATE = 0.1, 0.05
QUERIES = 32  # last ones of the prompt, which score its tokens
SALIENT = 0.25  # share of the prompt that is learned

Indices = NDArray[np.intp]
# The first keeps all bases, which take more than the coefficients: what following is worth at best. The second has the
# latest one alone, for all coefficients, whatever they were made with.
STATIC, OWN, LATEST = "static PCA", "OjaKV, own bases", "OjaKV, one basis"
ALL = f"{OWN}, all of the prompt learned"


def salient(scale: float, q: F32, k: F32, prompt: int) -> Indices:
    """Tokens [m] of the prompt, past the first EXACT, that its last QUERIES queries give most weight.

    q [n_group, n, d], k [n, d] of one KV head.
    """
    at = np.arange(prompt - QUERIES, prompt)
    weights = np.zeros(prompt)
    for rows in q:
        logits = scale * rows[at].astype(np.float64) @ k[:prompt].astype(np.float64).T
        weights += bounds.attention_weights(logits, at).sum(axis=0)
    count = max(1, round(SALIENT * (prompt - EXACT)))
    return np.sort(EXACT + np.argsort(-weights[EXACT:])[:count])


def _rotated(basis: F64, rate: float) -> tuple[Sketch, F64]:
    """Oja's rule from a basis [r, d] on, and the frame [d, d] of its rows: the rule starts at the first axes."""
    rest = np.linalg.svd(basis, full_matrices=True)[2][len(basis) :]
    return Sketch("oja", basis.shape[1], len(basis), rate), np.concatenate([basis, rest])


def bases_of(x: F32, learned: Indices, prompt: int, basis: F64) -> list[F64]:
    """Bases [r, d] of the prompt and of every PERIOD rows after it, x [n, d], from a given one on."""
    sketch, frame = _rotated(basis, PROMPT_RATE)
    sketch.absorb(x[learned] @ frame.T.astype(np.float32))
    out = [_aligned(sketch.top(len(basis)) @ frame, basis)]
    sketch, frame = _rotated(out[0], TEXT_RATE)
    for low in range(prompt, len(x), PERIOD):
        sketch.absorb(x[low : low + PERIOD] @ frame.T.astype(np.float32))
        out.append(_aligned(sketch.top(len(basis)) @ frame, out[-1]))
    return out


def _aligned(basis: F64, before: F64) -> F64:
    """The basis of the same subspace that is closest to an older one: coefficients of that one fit it best."""
    left, _, right = np.linalg.svd(before @ basis.T)
    out: F64 = left @ right @ basis
    return out


def reconstructed(x: F32, bases: Sequence[F64], prompt: int, latest: bool) -> F32:
    """Rows x [n, d] projected on the bases of their pieces, and put together again with these or with the latest."""
    pieces = np.split(x.astype(np.float64), range(prompt, len(x), PERIOD))
    back = [bases[-1]] * len(bases) if latest else bases
    rows = [piece @ u.T @ b for piece, u, b in zip(pieces, bases, back, strict=True)]
    return np.concatenate(rows).astype(np.float32)


def oja(lab: Lab) -> dict[str, Any]:
    """Static PCA against OjaKV at equal rank: errors of keys and values at two ranks, KLD at the larger one."""
    d = lab.reference.d
    ranks = (d // 2, 3 * d // 4)
    rows: Rows = []
    scores: Rows = []
    for text in lab.texts:
        learned: dict[tuple[int, int], Indices] = {}
        rows += _errors(lab, text, ranks, learned)
        scores += lab.measure(_caches(lab, ranks[-1], learned), Text(text.name, text.chunks[:1], text.long))
    return {"errors": rows, "rows": scores, "r": ranks[-1], "d": d}


def _errors(lab: Lab, text: Text, ranks: Sequence[int], learned: dict[tuple[int, int], Indices]) -> Rows:
    """Squared relative errors past the first EXACT tokens of a text's first chunk; fills `learned` by (il, head)."""
    stats = _stats(lab)
    tokens = text.chunks[0]
    prompt = len(tokens) // 2
    found: dict[tuple[int, str, str, str], list[float]] = {}
    with tqdm(total=lab.reference.n_layer, unit="layer", disable=not lab.progress, desc=f"oja of {text.name}") as bar:

        def visitor(il: int, q: F32, k: F32, v: F32) -> None:
            shape = stats[il].shape
            for h, (keys, values) in enumerate(zip(k, v, strict=True)):
                chosen = salient(shape.scale, q[h * shape.n_group : (h + 1) * shape.n_group], keys, prompt)
                learned[il, h] = chosen
                for side, x, moment in (("k", keys, stats[il].k2[h]), ("v", values, stats[il].v2[h])):
                    for r in ranks:
                        for name, rows in _variants(x, bounds.top(moment, r), chosen, prompt).items():
                            for part, where in (("prompt", slice(EXACT, prompt)), ("text", slice(prompt, None))):
                                lost = np.sum((x[where] - rows[where]).astype(np.float64) ** 2)
                                energy = np.sum(x[where].astype(np.float64) ** 2)
                                found.setdefault((r, name, side, part), []).append(float(lost / energy))
            bar.update()

        lab.visit(tokens, visitor)
    mean = {key: float(np.mean(errors)) for key, errors in found.items()}
    return [
        {
            "text": text.name,
            "r": r,
            "name": name,
            **{f"{side}_{part}": mean[r, name, side, part] for side in "kv" for part in ("prompt", "text")},
        }
        for r, name in dict.fromkeys((r, name) for r, name, _, _ in mean)
    ]


def _variants(x: F32, basis: F64, chosen: Indices, prompt: int) -> dict[str, F32]:
    """What each variant shows of x [n, d]."""
    bases = bases_of(x, chosen, prompt, basis)
    every = bases_of(x, np.arange(EXACT, prompt), prompt, basis)
    return {
        STATIC: reconstructed(x, [basis] * len(bases), prompt, latest=False),
        OWN: reconstructed(x, bases, prompt, latest=False),
        LATEST: reconstructed(x, bases, prompt, latest=True),
        ALL: reconstructed(x, every, prompt, latest=False),
    }


def _caches(lab: Lab, r: int, learned: dict[tuple[int, int], Indices]) -> list[Cache]:
    """Caches of r coefficients in half precision; bases are not counted."""
    stats = _stats(lab)
    rows = 16.0 * r / lab.reference.d
    window = Window(EXACT, EXACT, recent_bits=16).with_defaults().bits(1, 0) / lab.fit().overhead.context

    def coder(name: str) -> Coder:
        def see(il: int, x: F32, moments: F64) -> F32:
            out = []
            for h, one in enumerate(x):
                basis, prompt = bounds.top(moments[h], r), len(one) // 2
                if name == STATIC:
                    out.append((one @ basis.T @ basis).astype(np.float32))
                else:
                    out.append(reconstructed(one, bases_of(one, learned[il, h], prompt, basis), prompt, name == LATEST))
            return np.stack(out)

        return lambda il, k, v: (see(il, k, stats[il].k2), see(il, v, stats[il].v2))

    return [Cache(name, coder(name), rows + window, rows, EXACT, EXACT) for name in (STATIC, OWN, LATEST)]


def _stats(lab: Lab) -> dict[int, LayerStats]:
    return {layer.shape.il: layer for layer in lab.fit().calibration.layers}
