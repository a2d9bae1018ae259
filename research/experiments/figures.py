"""Pictures of the experiments, PNG. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converter.plots import figure as plots
from research.experiments.grids import axes, framed, grouped

Found = dict[str, Any]  # what an experiment returned


def _ranks(found: Found) -> Any:
    labels = {"xlabel": "coefficients kept [%]; labels: energy", "ylabel": "mean KLD [nats]"}
    figure, axis = axes(7, 4.2, **labels, yscale="log")
    for n_recent, own in sorted(grouped(found["rows"], lambda row: row["n_recent"]).items()):
        x = [100 * row["share"] for row in own]
        axis.plot(x, [row["mean_kld"] for row in own], "o-", label=f"{n_recent} recent tokens exact")
        for row, at in zip(own, x, strict=True):
            axis.annotate(f"{100 * row['energy']:g}%", (at, row["mean_kld"]), textcoords="offset points", xytext=(5, 4))
    axis.legend(frameon=False)
    return figure


def _pairs(found: Found) -> Any:
    pairs = found["pairs"]
    xlabel = "KLD of adaptive against static of the same bytes [%]; left is better"
    figure, axis = axes(8.5, 1.2 + 0.4 * len(pairs), xlabel=xlabel)
    y = range(len(pairs))
    axis.barh(y, [100 * (pair["kld"] / max(pair["kld_static"], 1e-30) - 1) for pair in pairs], color="tab:blue")
    axis.set_yticks(y, [plots.plain(f"{pair['adaptive']}, {pair['text']}") for pair in pairs])
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.invert_yaxis()
    return figure


def _chunks(found: Found) -> Any:
    labels = {"xlabel": "bits per element for bases and sketches", "ylabel": "predicted cost of V against static"}
    figure, axis = axes(8, 4.5, **labels)
    for text, own in grouped(found["rows"], lambda row: row["text"]).items():
        static = max(own[0]["cost"], 1e-30)
        axis.plot([row["bits"] for row in own], [row["cost"] / static for row in own], "o", label=plots.plain(text))
    axis.axhline(1, color="0.3", linewidth=0.8)
    axis.legend(frameon=False)
    return figure


def _length(found: Found) -> Any:
    figure, axis = axes(7, 4.2, xlabel="position", ylabel="mean KLD [nats]")
    for name, own in grouped(found["rows"], lambda row: row["name"]).items():
        x = [0.5 * (row["from"] + row["to"]) for row in own]
        y, e = [row["mean_kld"] for row in own], [row["mean_kld_stderr"] for row in own]
        axis.errorbar(x, y, yerr=e, marker="o", capsize=2, label=name)
    axis.set_ylim(0, None)
    axis.legend(frameon=False)
    return figure


def _bounds(found: Found) -> Any:
    figure = plots.new_figure(9.5, 8)
    panels = (
        ("residual_k", "logit_error", "‖K(I − P)‖", "‖l − l̂‖∞"),
        ("epsilon_k", "logit_error", "FD ε of K", "‖l − l̂‖∞"),
        ("residual_v", "output_error", "‖V(I − P)‖", "‖o − ô‖"),
        ("epsilon_v", "output_error", "FD ε of V", "‖o − ô‖"),
    )
    marks = {"static": "o", "chunks": "x"}
    for axis, (predictor, measured, x, y) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        framed(axis, xlabel=x, ylabel=y, xscale="log", yscale="log")
        for mode, own in grouped(found["lines"], lambda line: line["mode"]).items():
            both = ([line[key] for line in own] for key in (predictor, measured))
            axis.plot(*both, marks[mode], markersize=4, label=mode)
    figure.axes[0].legend(frameon=False)
    return figure


FIGURES = {
    "ranks": _ranks,
    "matched": _pairs,
    "domain": _pairs,
    "chunks": _chunks,
    "length": _length,
    "bounds": _bounds,
}


def draw(name: str, found: Found, folder: Path) -> str | None:
    """Writes folder/name.png and returns its name; None where an experiment has no picture.

    Raises SubkvError about `plot` without matplotlib and when the file cannot be written.
    """
    if name not in FIGURES:
        return None
    plots.write_figure(FIGURES[name](found), folder / f"{name}.png")
    return f"{name}.png"
