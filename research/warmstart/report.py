"""The evaluation's results as Markdown and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from converter.plots import figure as plots
from research.experiments.grids import Column, Row, axes, grid, grouped, heading, write_files
from research.warmstart import divergences as metrics
from research.warmstart.divergences import Latency, Outcome
from runtime import options
from subkv.base.command import sentence
from subkv.base.errors import SubkvError, concerning

ABOUT = {
    metrics.COLD: "the prompt decoded as always",
    metrics.EXACT: "the prompt's own exact cache, its last token decoded again: the bound, and the engine's own noise",
    metrics.OWN: "slots of the prompt itself: compression alone, no transfer",
    metrics.METHOD: "slots of a neighbour through the projector: the method; of a random one: the baseline",
    metrics.UNPROJECTED: "slots of a neighbour as they are",
    metrics.LAST: "sinks and as many more last tokens as there are slots",
    metrics.STATIC: "slots learned over the training prompts, the same for every prompt",
    metrics.ENDS: "sinks and last tokens, nothing between",
    metrics.NEIGHBOUR: "the neighbour's own cold start: what a perfect copy of its cache would answer",
}
FIDELITY: list[Column] = [
    ("n", "n", ""),
    ("KL(warm‖cold)", "kl", "±"),
    ("median", "kl_median", ".2g"),
    ("KL(cold‖warm)", "kl_reverse", ".3g"),
    ("same top-1", "same_top", ".0%"),
    ("PPL of the cold answer, ×", "ppl_ratio", ".2f"),
    ("cosine of attention", "cosine", ".3f"),
]
TASKS: list[Column] = [
    ("system", "system", ""),
    ("pair", "group", ""),
    ("n", "n_labelled", ""),
    ("right, cold", "correct_cold", ".1%"),
    ("right, warm", "correct", ".1%"),
    ("right, one warm token", "correct_head", ".1%"),
    ("the cold answer", "same_answer", ".0%"),
]
LATENCY: list[Column] = [
    ("words", "words", ""),
    ("n", "n", ""),
    ("tokens", "n_tokens", ".0f"),
    ("cold [ms]", "cold", ".1f"),
    ("warm [ms]", "warm", ".1f"),
    ("exact prefix [ms]", "exact", ".1f"),
    ("cut", "cut", ".0%"),
    ("steps of the warm start [ms]", "steps", ""),
]
GUARD: list[Column] = [
    ("predicted KL at most", "limit", "g"),
    ("n", "n", ""),
    ("started warm", "coverage", ".0%"),
    ("their mean KL", "kl", ".3g"),
    ("mean KL of all", "kl_all", ".3g"),
]


def _rows(outcomes: Sequence[Outcome], key: Callable[[Outcome], Any]) -> list[Row]:
    """A row for each system and group."""
    ordered = sorted(outcomes, key=lambda o: metrics.SYSTEMS.index(o.system))
    found = grouped(ordered, lambda o: (o.system, key(o)))
    return [{"system": name, "group": group, **metrics.summary(own)} for (name, group), own in found.items()]


def _fidelity(outcomes: Sequence[Outcome], title: str, key: Callable[[Outcome], Any]) -> str:
    return grid(_rows(outcomes, key), [("system", "system", ""), (title, "group", ""), *FIDELITY])


def systems(outcomes: Sequence[Outcome]) -> str:
    """Every system, those with a neighbour by kind of pair."""
    return _fidelity(outcomes, "pair", lambda o: o.kind)


def by_similarity(outcomes: Sequence[Outcome]) -> str:
    """The method and its bound over all given pairs, by similarity."""
    compared = (metrics.METHOD, metrics.NEIGHBOUR)
    pairs = [o for o in outcomes if o.system in compared and o.kind not in metrics.FOUND and o.similarity is not None]
    pairs.sort(key=lambda o: float(o.similarity or 0.0))
    return _fidelity(pairs, "cosine", lambda o: metrics.similarity_bin(float(o.similarity or 0.0)))


def by_length(outcomes: Sequence[Outcome]) -> str:
    """Paraphrases and the systems without a neighbour, by the words of the passage."""
    chosen = sorted((o for o in outcomes if o.kind in ("", "paraphrase")), key=lambda o: o.words)
    return _fidelity(chosen, "words", lambda o: o.words)


def tasks(outcomes: Sequence[Outcome]) -> str:
    """Exact match of the labelled tasks."""
    labelled = [o for o in outcomes if o.correct is not None]
    return grid(_rows(labelled, lambda o: o.kind), TASKS) if labelled else "None."


def latency(latencies: Sequence[Latency], words: dict[str, int]) -> str:
    """Times by the words of the passage; words: of every target."""
    rows = []
    for n_words, own in sorted(grouped(latencies, lambda o: words[o.target]).items()):
        steps = {name: 1e3 * metrics.mean(o.steps[name] for o in own)[0] for name in own[0].steps}
        rows.append(
            {
                "words": n_words,
                "n": len(own),
                "n_tokens": metrics.mean(o.n_tokens for o in own)[0],
                **{name: 1e3 * metrics.mean(getattr(o, name) for o in own)[0] for name in ("cold", "warm", "exact")},
                "cut": metrics.mean(o.cut for o in own)[0],
                "steps": ", ".join(f"{name} {value:.2g}" for name, value in steps.items()),
            }
        )
    return grid(rows, LATENCY) if rows else "Not measured."


def guard(outcomes: Sequence[Outcome]) -> str:
    """What `auto` would have started warm, at the paper's limit and at looser ones."""
    compared = _compared(outcomes)
    if not any(o.predicted_kl is not None for o in compared):
        return "No guard is fitted: `auto` never starts warm."
    limits = (metrics.MEAN_KL, 0.2, 0.5, 1.0)
    return grid([{"limit": limit, **metrics.risk_coverage(compared, limit)} for limit in limits], GUARD)


def _compared(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.kind in metrics.FOUND and o.system == metrics.METHOD]


def _mean_kl(outcomes: Sequence[Outcome]) -> str:
    kl, error, n = metrics.mean(o.kl for o in outcomes)
    return f"KL {kl:.3g} ± {error:.2g} (n = {n})"


def conclusion(outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> list[str]:
    """A line per cache and number of slots, with its criteria below: failure to meet any refutes the hypothesis."""
    lines = []
    for (cache, m), own in grouped(outcomes, lambda o: (o.cache, o.n_slots)).items():
        found = metrics.criteria(own, [t for t in latencies if (t.cache, t.n_slots) == (cache, m)])
        if any(c.met is False for c in found):
            answer = "refuted: not every criterion is met"
        elif any(c.met is None for c in found):
            answer = "open: not every criterion was measured"
        else:
            answer = "every criterion is met here"
        lines.append(f"{cache}, m = {m}, pairs of a cosine above {metrics.SIMILAR:g}: {answer}")
        lines += [f"  {criterion}" for criterion in found]
        pairs = metrics.similar(own)
        lines += [f"  of these, {kind}: {_mean_kl(some)}" for kind, some in grouped(pairs, lambda o: o.kind).items()]
        known = {(o.target, o.neighbour) for o in pairs}
        copies = {(o.target, o.neighbour): o for o in own if o.system == metrics.NEIGHBOUR}
        if bound := [o for pair, o in copies.items() if pair in known]:
            lines.append(f"  for comparison, a perfect copy of the neighbour's cache: {_mean_kl(bound)}")
    return lines


def markdown(about: Row, outcomes: Sequence[Outcome], latencies: Sequence[Latency], pictures: Sequence[str]) -> str:
    """The whole report. about: what it was run with."""
    lines = [*heading("Warm start: evaluation", "python -m research.warmstart", about), "", "## Criteria", ""]
    lines += [("- " if not line.startswith(" ") else "  - ") + line.strip() for line in conclusion(outcomes, latencies)]
    lines += ["", "## Systems", "", *(f"- {name}: {what}" for name, what in ABOUT.items())]
    words = {o.target: o.words for o in outcomes}
    for (cache, m), own in grouped(outcomes, lambda o: (o.cache, o.n_slots)).items():
        timed = [t for t in latencies if (t.cache, t.n_slots) == (cache, m)]
        lines += ["", f"## {cache}, m = {m}", ""]
        for title, table in (
            ("First token", systems(own)),
            ("By similarity, all given pairs", by_similarity(own)),
            ("By length, paraphrases", by_length(own)),
            ("Tasks with a known answer, greedy", tasks(own)),
            ("First-token latency", latency(timed, words)),
            ("Guard, on what the library finds", guard(own)),
        ):
            lines += [f"### {title}", "", table, ""]
    lines += [f"![{Path(name).stem}]({name})" for name in pictures]
    return "\n".join(lines).rstrip() + "\n"


def jsonl(about: Row, outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> str:
    """Settings, outcomes and latencies, one JSON object a line; numbers that are not finite are null."""
    lines = [{"what": "settings", **about}]
    lines += [{"what": "outcome", **asdict(o)} for o in outcomes]
    lines += [{"what": "latency", **asdict(t)} for t in latencies]
    return "".join(json.dumps(_finite(line), ensure_ascii=False) + "\n" for line in lines)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


#
# pictures
#


def _similarity_figure(outcomes: Sequence[Outcome]) -> Any:
    labels = {"xlabel": "cosine of prompt and neighbour", "ylabel": "KL(warm‖cold) [nats]"}
    figure, axis = axes(7.5, 4.5, **labels, yscale="log")
    paired = [o for o in outcomes if o.similarity is not None and o.kl > 0]
    bound = {(o.target, o.neighbour): o for o in paired if o.system == metrics.NEIGHBOUR}
    drawn = [([*bound.values()], "x", {"color": "0.4", "label": metrics.NEIGHBOUR})]
    for m, own in grouped([o for o in paired if o.system == metrics.METHOD], lambda o: o.n_slots).items():
        drawn.append((own, "o", {"label": f"{metrics.METHOD}, m = {m}"}))
    for some, mark, look in drawn:
        axis.plot([o.similarity for o in some], [o.kl for o in some], mark, markersize=4, **look)
    axis.axhline(metrics.MEAN_KL, color="tab:red", linestyle="--", linewidth=1, label="the paper's limit of the mean")
    axis.axvline(metrics.SIMILAR, color="tab:red", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _layers_figure(outcomes: Sequence[Outcome]) -> Any:
    most = max(o.n_slots for o in outcomes)
    figure, axis = axes(7.5, 4.2, xlabel="layer", ylabel=f"cosine of attention outputs, last position, m = {most}")
    chosen = [o for o in outcomes if o.cosines and o.n_slots == most and o.kind in ("", "paraphrase")]
    for system, own in grouped(chosen, lambda o: o.system).items():
        axis.plot(metrics.layer_cosines(own), label=system)
    axis.legend(frameon=False)
    return figure


def _latency_figure(latencies: Sequence[Latency]) -> Any:
    figure, axis = axes(7.5, 4.2, xlabel="tokens of the prompt", ylabel="time to the first token [ms]", yscale="log")
    n_tokens = [t.n_tokens for t in latencies]
    for name, label, color in (("cold", "cold", "0.4"), ("exact", "exact prefix", "tab:green")):
        axis.plot(n_tokens, [1e3 * getattr(t, name) for t in latencies], "o", color=color, markersize=4, label=label)
    for m, own in grouped(latencies, lambda t: t.n_slots).items():
        axis.plot([t.n_tokens for t in own], [1e3 * t.warm for t in own], "s", markersize=4, label=f"warm, m = {m}")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _guard_figure(outcomes: Sequence[Outcome]) -> Any:
    labels = {"xlabel": "share of prompts started warm, surest first", "ylabel": "their mean KL(warm‖cold) [nats]"}
    figure, axis = axes(7.5, 4.2, **labels)
    for m, own in grouped(_compared(outcomes), lambda o: o.n_slots).items():
        curve = metrics.risk_coverage(own, metrics.MEAN_KL)["curve"]
        axis.plot([x for x, _ in curve], [y for _, y in curve], label=f"m = {m}")
    axis.axhline(metrics.MEAN_KL, color="tab:red", linestyle="--", linewidth=1)
    axis.legend(frameon=False)
    return figure


def draw(outcomes: Sequence[Outcome], latencies: Sequence[Latency], folder: Path) -> list[str]:
    """Write the pictures of one cache's results; their file names. Raises SubkvError without matplotlib."""
    figures: dict[str, Callable[[], Any]] = {"similarity.png": lambda: _similarity_figure(outcomes)}
    if any(o.cosines for o in outcomes):
        figures["layers.png"] = lambda: _layers_figure(outcomes)
    if latencies:
        figures["latency.png"] = lambda: _latency_figure(latencies)
    if any(o.predicted_kl is not None for o in outcomes):
        figures["guard.png"] = lambda: _guard_figure(outcomes)
    for name, figure in figures.items():
        plots.write_figure(figure(), folder / name)
    return list(figures)


def write(folder: Path, about: Row, outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> None:
    """report.md, results.jsonl and the pictures, each whole or not at all. Without matplotlib a note says so."""
    first = outcomes[0].cache if outcomes else ""
    pictures: list[str] = []
    try:
        with concerning(plot="output"):
            own = [o for o in outcomes if o.cache == first], [t for t in latencies if t.cache == first]
            pictures = draw(*own, folder)
    except SubkvError as error:
        options.note(f"no plots: {sentence(error)}")
    text = markdown(about, outcomes, latencies, pictures)
    write_files(folder, {"results.jsonl": jsonl(about, outcomes, latencies), "report.md": text})
