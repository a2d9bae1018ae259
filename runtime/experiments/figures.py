"""Pictures of the experiments, PNG. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converter.plots import figure as plots


def _ranks(found: dict[str, Any]) -> Any:
    figure = plots.new_figure(7, 4.2)
    axis = figure.subplots()
    for n_recent in sorted({row["n_recent"] for row in found["rows"]}):
        own = [row for row in found["rows"] if row["n_recent"] == n_recent]
        x = [100 * row["share"] for row in own]
        axis.plot(x, [row["mean_kld"] for row in own], "o-", label=f"{n_recent} recent tokens exact")
        for row, at in zip(own, x, strict=True):
            axis.annotate(f"{100 * row['energy']:g}%", (at, row["mean_kld"]), textcoords="offset points", xytext=(5, 4))
    axis.set(xlabel="coefficients kept [%]; labels: energy", ylabel="mean KLD [nats]", yscale="log")
    return _framed(figure)


def _pairs(found: dict[str, Any]) -> Any:
    pairs = found["pairs"]
    figure = plots.new_figure(8.5, 1.2 + 0.4 * len(pairs))
    axis = figure.subplots()
    y = range(len(pairs))
    axis.barh(y, [100 * (pair["kld"] / max(pair["kld_static"], 1e-30) - 1) for pair in pairs], color="tab:blue")
    axis.set_yticks(y, [plots.plain(f"{pair['adaptive']}, {pair['text']}") for pair in pairs])
    axis.axvline(0, color="0.3", linewidth=0.8)
    axis.invert_yaxis()
    axis.set(xlabel="KLD of adaptive against static of the same bytes [%]; left is better")
    return figure


def _chunks(found: dict[str, Any]) -> Any:
    figure = plots.new_figure(8, 4.5)
    axis = figure.subplots()
    for text in dict.fromkeys(row["text"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["text"] == text]
        static = max(own[0]["cost"], 1e-30)
        axis.plot([row["bits"] for row in own], [row["cost"] / static for row in own], "o", label=plots.plain(text))
    axis.axhline(1, color="0.3", linewidth=0.8)
    axis.set(xlabel="bits per element for bases and sketches", ylabel="predicted cost of V against static")
    return _framed(figure)


def _length(found: dict[str, Any]) -> Any:
    figure = plots.new_figure(7, 4.2)
    axis = figure.subplots()
    for name in dict.fromkeys(row["name"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["name"] == name]
        x = [0.5 * (row["from"] + row["to"]) for row in own]
        y, e = [row["mean_kld"] for row in own], [row["mean_kld_stderr"] for row in own]
        axis.errorbar(x, y, yerr=e, marker="o", capsize=2, label=name)
    axis.set(xlabel="position", ylabel="mean KLD [nats]", ylim=(0, None))
    return _framed(figure)


def _bounds(found: dict[str, Any]) -> Any:
    figure = plots.new_figure(9.5, 8)
    axes = figure.subplots(2, 2)
    panels = (
        ("residual_k", "logit_error", "‖K(I − P)‖", "‖l − l̂‖∞"),
        ("epsilon_k", "logit_error", "FD ε of K", "‖l − l̂‖∞"),
        ("residual_v", "output_error", "‖V(I − P)‖", "‖o − ô‖"),
        ("epsilon_v", "output_error", "FD ε of V", "‖o − ô‖"),
    )
    for axis, (predictor, measured, x, y) in zip(axes.flat, panels, strict=True):
        for mode, marker in (("static", "o"), ("chunks", "x")):
            own = [line for line in found["lines"] if line["mode"] == mode]
            axis.plot(
                [line[predictor] for line in own], [line[measured] for line in own], marker, markersize=4, label=mode
            )
        axis.set(xlabel=x, ylabel=y, xscale="log", yscale="log")
        axis.grid(True, color="0.9")
    axes[0, 0].legend(frameon=False)
    return figure


def _framed(figure: Any) -> Any:
    for axis in figure.axes:
        axis.grid(True, color="0.9")
        axis.set_axisbelow(True)
        axis.legend(frameon=False)
    return figure


FIGURES = {
    "ranks": _ranks,
    "matched": _pairs,
    "domain": _pairs,
    "chunks": _chunks,
    "length": _length,
    "bounds": _bounds,
}


def draw(name: str, found: dict[str, Any], folder: Path) -> str | None:
    """Writes folder/name.png and returns its name; None where an experiment has no picture.

    Raises SubkvError without matplotlib, SubkvError when the file cannot be written.
    """
    if name not in FIGURES:
        return None
    plots.write_figure(FIGURES[name](found), folder / f"{name}.png")
    return f"{name}.png"
