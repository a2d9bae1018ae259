"""Experiments that score whole caches: ranks, matched, sides, coefficients, domain (its first part), length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from research.experiments.grids import Rows
from research.experiments.lab import GROUP, Lab, Text, paired
from research.float32.caches import Cache
from subkv.format.bases import Bands
from subkv.plan import budget as layout
from subkv.plan.pipeline import Fit

ENERGIES = (0.90, 0.95, 0.98, 0.99)
PLAIN = {"basis_k": "pca", "basis_v": "pca", "center_k": False}  # the bases of paper 1
# name -> --adapt: J_max 1 and 4, and bases rotated in place every 64 tokens whether that helps or not
ADAPTIVE = {
    "V adapts, J_max 1": "v,max_chunks=1",
    "K and V adapt, J_max 1": "kv,max_chunks=1",
    "V adapts, J_max 4": "v,max_chunks=4,warm=512",
    "K and V adapt, J_max 4": "kv,max_chunks=4,warm=512",
    "V rotated in place every 64 (SubSpace-A)": "v,length=64,warm=256,gain=1000,max_chunks=1,reuse=0,merge=1",
}
# name -> --adapt: a new basis every 128 tokens that no cap ends; an anchoring window of 256 tokens, 128 of them ahead
_STREAMING = "kv,length=128,warm=256,max_chunks=100,gain=1,reuse=0"
ANCHORS = {
    "streaming, all tokens so far": _STREAMING,
    "streaming, decay of 256 tokens": f"{_STREAMING},decay=0.9961",
    "trailing window of 256": f"{_STREAMING},window=256",
    "look-ahead of 128 in a window of 256": f"{_STREAMING},window=256,lookahead=128",
}
POSITIONS = 4  # ranges of the experiment on length


def energy_ranks(fit: Fit, energy: float) -> tuple[list[int], list[int]]:
    """Coefficients that hold a share of the second moment: exactly, and in whole groups. Order of fit.heads: K, V, …"""
    exact = []
    for layer in fit.layers:
        for basis in layer.bases:
            held = np.cumsum(basis.variance)
            exact.append(1 + int(np.searchsorted(held, energy * held[-1] * (1.0 - 1e-12))))
    return exact, [min(head.d, -(-r // GROUP) * GROUP) for r, head in zip(exact, fit.heads, strict=True)]


def _side(numbers: Sequence[int], first: int) -> str:
    part = numbers[first::2]
    return f"{np.mean(part):.1f} ({min(part)}-{max(part)})"


def ranks(lab: Lab) -> dict[str, Any]:
    """int8 coefficients on plain PCA bases of a share of the energy per head, with the exact window and without."""
    fit = lab.fit(**PLAIN)
    caches, kept = [], []
    for energy in ENERGIES:
        exact, rounded = energy_ranks(fit, energy)
        plan: list[Bands] = [((r, 8),) for r in rounded]
        for n_recent in sorted({0, lab.options.window.n_recent}):
            caches.append(lab.planned(fit, plan, f"{100 * energy:g}%, window {n_recent}", n_recent))
            kept.append((energy, exact, rounded, n_recent))
    rows = lab.measure(caches, lab.texts[0])
    for row, (energy, exact, rounded, n_recent) in zip(rows, kept, strict=True):
        row.update(
            energy=energy,
            n_recent=n_recent,
            rank_k=_side(exact, 0),
            rank_v=_side(exact, 1),
            share=sum(rounded) / sum(head.d for head in fit.heads),
        )
    return {"rows": rows}


def _against_static(lab: Lab, text: Text, specs: dict[str, str]) -> tuple[Rows, Rows]:
    """Adaptive caches, and each against the static one whose budget is raised by what adapting costs on this text."""
    static = lab.static()
    adaptive = [lab.adaptive(spec, name) for name, spec in specs.items()]
    rows = lab.measure([static, *adaptive], text)
    high = layout.budget_range(lab.fit().heads, lab.fit().overhead)[1].total
    budgets = [min(high, lab.kv_bits + row["bpe_adapt"]) for row in rows[1:]]
    raised = {bits: lab.static(bits) for bits in sorted(set(budgets))}
    by_budget = dict(zip(raised, lab.measure(list(raised.values()), text), strict=True))
    pairs: Rows = []
    for cache, row, bits in zip(adaptive, rows[1:], budgets, strict=True):
        gain, error = paired(raised[bits], cache)
        pairs.append(
            {
                "text": text.name,
                "adaptive": cache.name,
                "bpe": row["bpe"],
                "bpe_static": by_budget[bits]["bpe"],
                "kld": row["mean_kld"],
                "kld_static": by_budget[bits]["mean_kld"],
                "gain": gain,
                "gain_stderr": error,
            }
        )
    return [*rows, *by_budget.values()], pairs


def matched(lab: Lab) -> dict[str, Any]:
    """Every adaptive variant against a static cache of the same bytes, in-domain text."""
    rows, pairs = _against_static(lab, lab.texts[0], ADAPTIVE)
    return {"rows": rows, "pairs": pairs}


def domain(lab: Lab) -> dict[str, Any]:
    """Every text, static against the two cheapest adaptive variants at matched bytes; values behind r directions."""
    from research.experiments.subspaces import reconstruction

    cheapest = dict(list(ADAPTIVE.items())[:2])
    rows: Rows = []
    pairs: Rows = []
    for text in lab.texts:
        more, compared = _against_static(lab, text, cheapest)
        rows += more
        pairs += compared
    return {"rows": rows, "pairs": pairs, "reconstruction": reconstruction(lab)}


def anchoring(lab: Lab) -> dict[str, Any]:
    """Static bases, and where streaming ones are anchored, on every text; look-ahead delays a code by 128 tokens."""
    rows: Rows = []
    for text in lab.texts:
        rows += lab.measure([lab.static(), *(lab.adaptive(spec, name) for name, spec in ANCHORS.items())], text)
    return {"rows": rows}


def half_exact(fit: Fit, kv_bits: float) -> tuple[float, float]:
    """Bits per element of a layout of kv_bits when only K, or only V, is coded and the other is f16."""
    every, plan = fit.heads_in_memory(fit.narrow(kv_bits)), fit.plan(kv_bits)
    both = sum(head.d for head in every)

    def bits(side: int) -> float:
        heads = every[side::2]
        coded = sum(head.d for head in heads)
        counted = layout.account(heads, plan[side::2], fit.overhead).total
        return (counted * coded + 16.0 * (both - coded)) / both

    return bits(0), bits(1)


def sides(lab: Lab) -> dict[str, Any]:
    """Keys and values, keys only, values only."""
    caches = [lab.static(sides=s, name=n) for s, n in (("kv", "both"), ("k", "keys only"), ("v", "values only"))]
    rows = lab.measure(caches, lab.texts[0])
    for row, bits in zip(rows[1:], half_exact(lab.fit(), lab.kv_bits), strict=True):
        row["bpe"] = round(bits, 4)
        row["bpe_rows"] = None
    return {"rows": rows}


def coefficients(lab: Lab) -> dict[str, Any]:
    """int8 against 16-bit coefficients on plain PCA bases, ranks of 95% energy and full rank."""
    fit = lab.fit(**PLAIN)
    caches: list[Cache] = []
    for name, held in (("95% energy", energy_ranks(fit, 0.95)[1]), ("full rank", [head.d for head in fit.heads])):
        for bits in (8, 16):
            plan: list[Bands] = [((r, bits),) for r in held]
            caches.append(lab.planned(fit, plan, f"{name}, {bits} bits", lab.options.window.n_recent))
    return {"rows": lab.measure(caches, lab.texts[0])}


def length(lab: Lab) -> dict[str, Any]:
    """KLD and ΔPPL by position range of one long chunk, static and adaptive."""
    tokens = lab.texts[0].long
    n = len(tokens)
    first = min(n // 8, lab.options.window.n_sink + lab.options.window.n_recent)  # before that nothing is coded
    caches = [lab.static(), *(lab.adaptive(ADAPTIVE[name], name) for name in list(ADAPTIVE)[:3])]
    edges = [first, *(n * i // POSITIONS for i in range(1, POSITIONS)), n - 1]
    rows: Rows = []
    for cache, (kld, base, coded) in zip(caches, lab.divergence(tokens, first, caches), strict=True):
        for low, high in zip(edges, edges[1:], strict=False):
            part = slice(low - first, high - first)
            rows.append(
                {
                    "name": cache.name,
                    "from": low,
                    "to": high,
                    "mean_kld": float(kld[part].mean()),
                    "mean_kld_stderr": float(kld[part].std() / np.sqrt(max(1, high - low - 1))),
                    "median_kld": float(np.median(kld[part])),
                    "delta_percent": 100.0 * float(np.expm1((coded[part] - base[part]).mean())),
                }
            )
    return {"text": lab.texts[0].name, "n_ctx": n, "rows": rows}
