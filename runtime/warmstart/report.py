"""The evaluation's results as Markdown and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from converter.plots import figure as plots
from runtime import options
from runtime.experiments.report import Column, grid
from runtime.warmstart import metrics
from runtime.warmstart.metrics import Latency, Outcome
from subkv.base.errors import SubkvError

Row = dict[str, Any]
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


def _n(key: str, form: str = ".3g") -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None or math.isnan(row[key]) else format(row[key], form)


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _fidelity(first: Sequence[Column]) -> list[Column]:
    return [
        *first,
        ("n", _text("n")),
        ("KL(warm‖cold)", lambda row: f"{row['kl']:.3g} ± {row['kl_stderr']:.1g}"),
        ("median", _n("kl_median", ".2g")),
        ("KL(cold‖warm)", _n("kl_reverse")),
        ("same top-1", _n("same_top", ".0%")),
        ("PPL of the cold answer, ×", _n("ppl_ratio", ".2f")),
        ("cosine of attention", _n("cosine", ".3f")),
    ]


TASKS: list[Column] = [
    ("system", _text("system")),
    ("pair", _text("kind")),
    ("n", _text("n_labelled")),
    ("right, cold", _n("correct_cold", ".1%")),
    ("right, warm", _n("correct", ".1%")),
    ("right, one warm token", _n("correct_head", ".1%")),
    ("the cold answer", _n("same_answer", ".0%")),
]


def _rows(outcomes: Sequence[Outcome], key: Callable[[Outcome], Any], *names: str) -> list[Row]:
    found = metrics.grouped(sorted(outcomes, key=lambda o: metrics.SYSTEMS.index(o.system)), key)
    return [{**dict(zip(names, group, strict=True)), **metrics.summary(own)} for group, own in found.items()]


def systems(outcomes: Sequence[Outcome]) -> str:
    """Every system, those with a neighbour by kind of pair."""
    rows = _rows(outcomes, lambda o: (o.system, o.kind), "system", "kind")
    return grid(rows, _fidelity([("system", _text("system")), ("pair", _text("kind"))]))


def by_similarity(outcomes: Sequence[Outcome]) -> str:
    """The method and its bound over all pairs, by similarity."""
    pairs = [
        o for o in outcomes if o.system in (metrics.METHOD, metrics.NEIGHBOUR) and o.similarity is not None
        and o.kind not in metrics.FOUND
    ]  # fmt: skip
    pairs.sort(key=lambda o: float(o.similarity or 0.0))
    rows = _rows(pairs, lambda o: (o.system, metrics.similarity_bin(float(o.similarity or 0.0))), "system", "bin")
    return grid(rows, _fidelity([("system", _text("system")), ("cosine", _text("bin"))]))


def by_length(outcomes: Sequence[Outcome]) -> str:
    """Paraphrases and the systems without a neighbour, by the words of the passage."""
    chosen = sorted((o for o in outcomes if o.kind in ("", "paraphrase")), key=lambda o: o.words)
    rows = _rows(chosen, lambda o: (o.system, o.words), "system", "words")
    return grid(rows, _fidelity([("system", _text("system")), ("words", _text("words"))]))


def tasks(outcomes: Sequence[Outcome]) -> str:
    """Exact match of the labelled tasks."""
    labelled = [o for o in outcomes if o.correct is not None]
    return grid(_rows(labelled, lambda o: (o.system, o.kind), "system", "kind"), TASKS) if labelled else "None."


def latency(latencies: Sequence[Latency], words: dict[str, int]) -> str:
    """Times by the words of the passage; words: of every target."""
    found: dict[int, list[Latency]] = {}
    for one in latencies:
        found.setdefault(words[one.target], []).append(one)
    rows = []
    for n_words, own in sorted(found.items()):
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
    columns: list[Column] = [
        ("words", _text("words")),
        ("n", _text("n")),
        ("tokens", _n("n_tokens", ".0f")),
        ("cold [ms]", _n("cold", ".1f")),
        ("warm [ms]", _n("warm", ".1f")),
        ("exact prefix [ms]", _n("exact", ".1f")),
        ("cut", _n("cut", ".0%")),
        ("steps of the warm start [ms]", _text("steps")),
    ]
    return grid(rows, columns) if rows else "Not measured."


def guard(outcomes: Sequence[Outcome]) -> str:
    """What `auto` would have started warm, at the paper's limit and at looser ones."""
    judged = [o for o in outcomes if o.kind in metrics.FOUND and o.system == metrics.METHOD]
    if not any(o.predicted_kl is not None for o in judged):
        return "No guard is fitted: `auto` never starts warm."
    rows = [{"limit": limit, **metrics.risk_coverage(judged, limit)} for limit in (metrics.MEAN_KL, 0.2, 0.5, 1.0)]
    columns: list[Column] = [
        ("predicted KL at most", _n("limit", "g")),
        ("n", _text("n")),
        ("started warm", _n("coverage", ".0%")),
        ("their mean KL", _n("kl")),
        ("mean KL of all", _n("kl_all")),
    ]
    return grid(rows, columns)


def conclusion(outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> list[str]:
    """A line per cache and number of slots, with its criteria below: failure to meet any refutes the hypothesis."""
    lines = []
    for (cache, m), own in metrics.grouped(outcomes, lambda o: (o.cache, o.n_slots)).items():
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
        for kind, some in metrics.grouped(pairs, lambda o: o.kind).items():
            kl, error, n = metrics.mean(o.kl for o in some)
            lines.append(f"  of these, {kind}: KL {kl:.3g} ± {error:.2g} (n = {n})")
        known = {(o.target, o.neighbour) for o in pairs}
        bound = {
            (o.target, o.neighbour): o for o in own
            if o.system == metrics.NEIGHBOUR and (o.target, o.neighbour) in known
        }  # fmt: skip
        if bound:
            kl, error, n = metrics.mean(o.kl for o in bound.values())
            lines.append(
                f"  for comparison, a perfect copy of the neighbour's cache: KL {kl:.3g} ± {error:.2g} (n = {n})"
            )
    return lines


def markdown(
    command: str, settings: Row, outcomes: Sequence[Outcome], latencies: Sequence[Latency], pictures: Sequence[str]
) -> str:
    """The whole report."""
    lines = ["# Warm start: evaluation", "", "```", command, "```", ""]
    lines += [f"- {key}: {value}" for key, value in settings.items()]
    lines += ["", "## Criteria", ""]
    lines += [("- " if not line.startswith(" ") else "  - ") + line.strip() for line in conclusion(outcomes, latencies)]
    lines += ["", "## Systems", "", *(f"- {name}: {about}" for name, about in ABOUT.items())]
    words = {o.target: o.words for o in outcomes}
    for (cache, m), own in metrics.grouped(outcomes, lambda o: (o.cache, o.n_slots)).items():
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


def jsonl(settings: Row, outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> str:
    """Settings, outcomes and latencies, one JSON object a line; numbers that are not finite are null."""
    lines = [{"what": "settings", **settings}, *(o.line() for o in outcomes), *(t.line() for t in latencies)]
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
    figure = plots.new_figure(7.5, 4.5)
    axis = figure.subplots()
    paired = [o for o in outcomes if o.similarity is not None and o.kl > 0]
    bound = {(o.target, o.neighbour): o for o in paired if o.system == metrics.NEIGHBOUR}.values()
    axis.plot([o.similarity for o in bound], [o.kl for o in bound], "x", color="0.4", markersize=4,
              label=metrics.NEIGHBOUR)  # fmt: skip
    for m, own in metrics.grouped([o for o in paired if o.system == metrics.METHOD], lambda o: o.n_slots).items():
        axis.plot(
            [o.similarity for o in own], [o.kl for o in own], "o", markersize=3.5, label=f"{metrics.METHOD}, m = {m}"
        )
    axis.axhline(metrics.MEAN_KL, color="tab:red", linestyle="--", linewidth=1, label="the paper's limit of the mean")
    axis.axvline(metrics.SIMILAR, color="tab:red", linewidth=0.8)
    axis.set(xlabel="cosine of prompt and neighbour", ylabel="KL(warm‖cold) [nats]", yscale="log")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _layers_figure(outcomes: Sequence[Outcome]) -> Any:
    figure = plots.new_figure(7.5, 4.2)
    axis = figure.subplots()
    most = max(o.n_slots for o in outcomes)
    chosen = [o for o in outcomes if o.cosines and o.n_slots == most and o.kind in ("", "paraphrase")]
    for system, own in metrics.grouped(chosen, lambda o: o.system).items():
        axis.plot(metrics.layer_cosines(own), label=system)
    axis.set(xlabel="layer", ylabel=f"cosine of attention outputs, last position, m = {most}")
    axis.legend(frameon=False)
    return figure


def _latency_figure(latencies: Sequence[Latency]) -> Any:
    figure = plots.new_figure(7.5, 4.2)
    axis = figure.subplots()
    n_tokens = [t.n_tokens for t in latencies]
    for name, label, color in (("cold", "cold", "0.4"), ("exact", "exact prefix", "tab:green")):
        axis.plot(n_tokens, [1e3 * getattr(t, name) for t in latencies], "o", color=color, markersize=4, label=label)
    for m in dict.fromkeys(t.n_slots for t in latencies):
        own = [t for t in latencies if t.n_slots == m]
        axis.plot([t.n_tokens for t in own], [1e3 * t.warm for t in own], "s", markersize=4, label=f"warm, m = {m}")
    axis.set(xlabel="tokens of the prompt", ylabel="time to the first token [ms]", yscale="log")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _guard_figure(outcomes: Sequence[Outcome]) -> Any:
    figure = plots.new_figure(7.5, 4.2)
    axis = figure.subplots()
    judged = [o for o in outcomes if o.kind in metrics.FOUND and o.system == metrics.METHOD]
    for m, own in metrics.grouped(judged, lambda o: o.n_slots).items():
        curve = metrics.risk_coverage(own, metrics.MEAN_KL)["curve"]
        axis.plot([x for x, _ in curve], [y for _, y in curve], label=f"m = {m}")
    axis.axhline(metrics.MEAN_KL, color="tab:red", linestyle="--", linewidth=1)
    axis.set(xlabel="share of prompts started warm, surest first", ylabel="their mean KL(warm‖cold) [nats]")
    axis.legend(frameon=False)
    return figure


def draw(outcomes: Sequence[Outcome], latencies: Sequence[Latency], folder: Path) -> list[str]:
    """Write the pictures of one cache's results; their file names. Raises SubkvError without matplotlib."""
    wanted: dict[str, Callable[[], Any]] = {"similarity.png": lambda: _similarity_figure(outcomes)}
    if any(o.cosines for o in outcomes):
        wanted["layers.png"] = lambda: _layers_figure(outcomes)
    if latencies:
        wanted["latency.png"] = lambda: _latency_figure(latencies)
    if any(o.predicted_kl is not None for o in outcomes):
        wanted["guard.png"] = lambda: _guard_figure(outcomes)
    for name, figure in wanted.items():
        plots.write_figure(figure(), folder / name)
    return list(wanted)


def write(folder: Path, command: str, settings: Row, outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> None:
    """report.md, results.jsonl and the pictures, each whole or not at all. Without matplotlib a note says so."""
    from subkv.base.files import atomic_file

    first = outcomes[0].cache if outcomes else ""
    pictures: list[str] = []
    try:
        pictures = draw([o for o in outcomes if o.cache == first], [t for t in latencies if t.cache == first], folder)
    except SubkvError as error:
        options.note(f"no plots: {error}")
    files = {
        "results.jsonl": jsonl(settings, outcomes, latencies),
        "report.md": markdown(command, settings, outcomes, latencies, pictures),
    }
    for name, content in files.items():
        with atomic_file(folder / name) as handle:
            handle.write(content.encode("utf-8"))
