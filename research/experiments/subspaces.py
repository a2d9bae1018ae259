"""Experiments on the keys and values of one exact pass: chunks, and values behind r directions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from research.experiments import bounds, verdicts
from research.experiments.grids import Rows
from research.experiments.lab import Lab, Text
from research.experiments.sketch import Sketch
from research.float32.adaptive import AdaptiveCoder
from subkv.base.progress import progress_bar
from subkv.format.adapt import Adapt, parse
from subkv.format.codec import F32, rank

PERIOD = 64  # tokens between two bases of `reconstruction`
NEVER = 1 << 30  # tokens: longer than any text
BASE = "v,length=256,warm=256,max_chunks=8"  # what the variants of `chunks` change
LENGTHS = (128, 256, 512)
PERCENTILES = (50, 95)  # of the static residuals on the in-domain text: thresholds
SMALL = 16  # largest r of the sketches compared
TRAILING = 256  # tokens of a basis that knows nothing older
AHEAD = 128  # tokens a basis knows of what it is for


def _behind(v: F32, bases: dict[str, Any], start: int) -> dict[str, float]:
    """Squared relative error of rows v [n, d] from `start` on, behind r directions renewed every PERIOD rows."""
    error, energy = dict.fromkeys(bases, 0.0), 0.0
    for low in range(start, len(v), PERIOD):
        new = v[low : low + PERIOD].astype(np.float64)
        energy += float(np.sum(new**2))
        for name, make in bases.items():
            basis = make(low)
            error[name] += float(np.sum((new - new @ basis.T @ basis) ** 2))
    return {name: e / energy if energy else 0.0 for name, e in error.items()}


def _bases(v: F32, moment: bounds.F64, r: int) -> dict[str, Any]:
    """name -> function(n) that gives the basis [r, d] known after n rows. Sketches go on from call to call."""
    d = v.shape[1]
    fixed = bounds.top(moment, r)
    best = bounds.top(v.astype(np.float64).T @ v, r)

    def streamed(kind: str, rows: int, ahead: int = 0) -> Any:
        sketch, n_absorbed = Sketch(kind, d, rows), [0]

        def after(n: int) -> bounds.F64:
            sketch.absorb(v[n_absorbed[0] : n + ahead])
            n_absorbed[0] = n + ahead
            return sketch.top(r)

        return after

    def trailing(n: int) -> bounds.F64:
        last = v[max(0, n - TRAILING) : n].astype(np.float64)
        return bounds.top(last.T @ last, r)

    return {
        verdicts.STATIC: lambda n: fixed,
        "running covariance": streamed("covariance", r),
        f"covariance of the last {TRAILING} tokens": trailing,
        f"running covariance, {AHEAD} tokens ahead": streamed("covariance", r, AHEAD),
        "Frequent Directions, ℓ = 2r": streamed("fd", 2 * r),
        "Frequent Directions, ℓ = r": streamed("fd", r),
        "Oja, η = 0.1": streamed("oja", r),
        verdicts.BEST: lambda n: best,
    }


def reconstruction(lab: Lab) -> Rows:
    """Squared relative error of raw values behind r directions, mean over heads, first chunk of every text."""
    rows: Rows = []
    r = min(32, lab.reference.d // 2)
    for text in lab.texts:
        mean = _reconstruction_of(lab, text, r)
        static = mean[verdicts.STATIC]
        for name, error in mean.items():
            rows.append({"text": text.name, "name": name, "r": r, "error": error, "change": error / static - 1.0})
    return rows


def _reconstruction_of(lab: Lab, text: Text, r: int) -> dict[str, float]:
    """name of a basis -> error."""
    stats = {layer.shape.il: layer for layer in lab.calibration.layers}
    tokens = text.chunks[0]
    start = max(lab.options.window.n_sink, len(tokens) // 4 // PERIOD * PERIOD)
    found: list[dict[str, float]] = []
    with _bar(lab, f"values of {text.name}") as bar:

        def visitor(il: int, q: F32, k: F32, v: F32) -> None:
            found.extend(_behind(x, _bases(x, stats[il].v2[h], r), start) for h, x in enumerate(v))
            bar.update()

        lab.visit(tokens, visitor)
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _residuals(lab: Lab) -> dict[tuple[int, int], F32]:
    """(il, head) -> static relative residuals of the blocks of values, in-domain text."""
    where, layers = lab.coded()
    residuals: dict[tuple[int, int], F32] = {}
    coded = {layer.shape.il: layer for layer in layers}

    def visitor(il: int, q: F32, k: F32, v: F32) -> None:
        for h, x in enumerate(v if il in coded else ()):
            rho = where.replay(Adapt(length=0), il, h, True, x).rho
            residuals[il, h] = rho[rho > 0.0]

    lab.visit(lab.texts[0].chunks[0], visitor)
    return residuals


def _percentile(rho: F32, percent: int) -> float:
    """A threshold: below 1, which would be none."""
    return min(0.999, float(np.percentile(rho, percent)))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of `chunks`. spec: as of --adapt; tau: thresholds of single heads instead of one for all."""

    name: str
    spec: str
    tau: dict[tuple[int, int], float] | None = None


def variants(lab: Lab) -> list[Variant]:
    """What the experiment `chunks` compares."""
    _, layers = lab.coded()
    r = min(SMALL, *(rank(head.v.bands) for layer in layers for head in layer.heads))
    out = [Variant("static", f"v,warm={NEVER}")]
    out += [Variant(f"L = {n}", f"{BASE},length={n}") for n in LENGTHS]
    rho = _residuals(lab)
    together = np.concatenate(list(rho.values()))
    for percent in PERCENTILES:
        tau = _percentile(together, percent)
        spec = f"{BASE},length={NEVER},tau={tau:.6f}"
        out.append(Variant(f"τ = {tau:.3f} ({percent}% of static ρ), no L", spec))
        own = {head: _percentile(found, percent) for head, found in rho.items()}
        out.append(Variant(f"τ per head ({percent}% of its static ρ), no L", spec, own))
    out.append(Variant("sketch: covariance", f"{BASE},kind=covariance"))
    for factor in (1, 2, 4):
        name = "r" if factor == 1 else f"{factor}r"
        out.append(Variant(f"sketch: fd, r = {r}, ℓ = {name}", f"{BASE},kind=fd,rank={r},rows={factor * r}"))
    out.append(Variant(f"sketch: oja, r = {r}", f"{BASE},kind=oja,rank={r}"))
    return out


def chunks(lab: Lab) -> dict[str, Any]:
    """Lengths, thresholds and sketches: V's squared relative error and predicted cost, second half of each text."""
    specs = variants(lab)
    rows = [row for text in lab.texts for row in _chunks_of(lab, text, specs)]
    return {"rows": rows, "unit": "nats" if lab.calibration.sensitivity else "relative", "base": _described(BASE)}


def _chunks_of(lab: Lab, text: Text, specs: list[Variant]) -> Rows:
    """A row per variant."""
    where, layers = lab.coded()
    fit = lab.fit()
    cost = {layer.shape.il: one.cost.v for layer, one in zip(layers, fit.layers, strict=True)}
    coders = {one.name: AdaptiveCoder(where, layers, "v", *parse(one.spec), one.tau) for one in specs}
    error: dict[str, list[float]] = {name: [] for name in coders}
    price = dict.fromkeys(coders, 0.0)
    with _bar(lab, f"chunks of {text.name}", len(text.chunks)) as bar:

        def visitor(il: int, q: F32, k: F32, v: F32) -> None:
            half = v.shape[1] // 2
            energy = np.sum(v[:, half:].astype(np.float64) ** 2, axis=(1, 2))
            for name, coder in coders.items():
                lost = (v - coder(il, k, v)[1])[:, half:].astype(np.float64)
                error[name].extend(np.sum(lost**2, axis=(1, 2)) / np.maximum(energy, 1e-30))
                price[name] += float(np.einsum("hni,hij,hnj->", lost, cost[il], lost, optimize=True)) / lost.shape[1]
            bar.update()

        for tokens in text.chunks:
            lab.visit(tokens, visitor)
    return [
        {
            "text": text.name,
            "name": one.name,
            "adapt": one.spec,
            "opened": coder.mean("n_opened"),
            "refused": coder.mean("n_refused"),
            "bits": coder.bits(fit.overhead.context),
            "error": float(np.mean(error[one.name])),
            "cost": price[one.name] / len(text.chunks),
        }
        for one, coder in zip(specs, coders.values(), strict=True)
    ]


def _described(spec: str) -> dict[str, Any]:
    return dataclasses.asdict(parse(spec)[1])


def _bar(lab: Lab, what: str, texts: int = 1) -> Any:
    return progress_bar(what, texts * lab.reference.n_layer, "layer", lab.progress)
