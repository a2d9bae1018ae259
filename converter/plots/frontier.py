"""The picture of bits against KLD."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from converter.plots import labels
from converter.plots.figure import new_figure, plain, write_figure
from subkv.base.command import sentence
from subkv.base.errors import SubkvError

OURS, WINDOW, FLOOR = "subkv", " + window", "f16 (flash attention"  # how names of results start or end
NOISE = "noise floor"
ROTATED = "rotated-"  # these and names with a colon are other projects' codecs


def frontier(results: Sequence[dict[str, Any]], plot: Path) -> None:
    """Draw bpe (x) against mean KLD in nats (y, log) and write it.

    results: objects as research.evaluate and runtime.perplexity print them, all of one model; read are
    name, bpe, mean_kld (None: the base, not drawn), mean_kld_stderr, bound_bpe, and n_ctx and text where present: one
    panel for each such pair. Raises SubkvError about `plot`: nothing has a KLD, no matplotlib, or it cannot be written.
    """
    write_figure(frontier_figure(results), plot)


def frontier_figure(results: Sequence[dict[str, Any]]) -> Any:
    """The figure of frontier()."""
    panels: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in results:
        if row["mean_kld"] is None:
            continue
        if row["mean_kld"] <= 0:
            left_out = f"{row['name']}: a KLD of {row['mean_kld']:g} has no place on a log axis; left out"
            click.echo(sentence(SubkvError("plot", left_out)), err=True)
            continue
        panels.setdefault((row.get("text"), row.get("n_ctx")), []).append(row)
    panels = {key: rows for key, rows in panels.items() if not all(_is_floor(row) for row in rows)}
    if not panels:
        raise SubkvError("plot", f"expected results with a mean KLD above 0, found none in {len(results)}")
    columns = min(len(panels), 2)
    n_rows = -(-len(panels) // columns)
    figure = new_figure(7.5 if columns == 1 else 11, 0.5 + 4.2 * n_rows)
    axes = list(figure.subplots(n_rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    texts = [_frontier_panel(axis, key, rows) for axis, (key, rows) in zip(axes, panels.items(), strict=False)]
    for axis in axes[len(panels) :]:
        axis.remove()
    _decades(axes[0])
    handles = {}
    for axis in figure.axes:
        handles.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)})
    names = sorted(handles, key=lambda name: name.startswith(NOISE))  # lines come first by themselves; these last
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside upper center",
        ncols=min(len(names), 2 * columns),  # as many as the width holds
        frameon=False,
    )
    figure.draw_without_rendering()  # settles the axes, so that labels can be placed in pixels
    for axis, axis_texts in zip(figure.axes, texts, strict=True):
        labels.place(figure, axis, axis_texts)
    return figure


def _is_floor(row: dict[str, Any]) -> bool:
    return str(row["name"]).startswith(FLOOR)


def _frontier_panel(axis: Any, key: tuple[Any, Any], rows: list[dict[str, Any]]) -> list[tuple[float, float, str, str]]:
    """Points and lines of one panel. Returns the labels to place: x, y, text, colour."""
    text, n_ctx = key
    title = ", ".join([str(text)] * (text is not None) + [f"{n_ctx} tokens"] * (n_ctx is not None))
    axis.set(title=plain(title), yscale="log")
    if axis.get_subplotspec().is_first_col():
        axis.set_ylabel("mean KLD [nats]")
    axis.set_xlabel("bits per K/V element (bpe)")
    axis.xaxis.set_tick_params(labelbottom=True)
    axis.grid(True, which="major", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.08, y=0.08)
    ours = sorted((row for row in rows if str(row["name"]).startswith(OURS)), key=lambda row: float(row["bpe"]))
    others = [row for row in rows if not _is_floor(row) and row not in ours]
    rivals = [row for row in others if ":" in str(row["name"]) or str(row["name"]).startswith(ROTATED)]
    types = [row for row in others if row not in rivals]
    windowed = [row for row in others if str(row["name"]).endswith(WINDOW)]
    line = {"marker": "o", "linestyle": "-", "linewidth": 1.8, "zorder": 4}
    squares = {"marker": "s", "linestyle": "none", "zorder": 3}
    diamonds = {"marker": "D", "linestyle": "none", "markerfacecolor": "white", "zorder": 3}
    triangles = {"marker": "^", "linestyle": "none", "zorder": 3}
    hollow = {"marker": "v", "linestyle": "none", "markerfacecolor": "white", "zorder": 3}
    groups = [
        (ours, "subkv", "tab:blue", line),
        ([row for row in types if row not in windowed], "llama.cpp's types", "0.3", squares),
        ([row for row in types if row in windowed], "the same with subkv's exact window", "tab:orange", diamonds),
        ([row for row in rivals if row not in windowed], "other codecs", "tab:green", triangles),
        ([row for row in rivals if row in windowed], "these with subkv's exact window", "tab:olive", hollow),
    ]
    beside = []
    for group, legend, color, style in groups:
        if not group:
            continue
        x, y = [float(row["bpe"]) for row in group], [float(row["mean_kld"]) for row in group]
        error = [float(row.get("mean_kld_stderr") or 0.0) for row in group]
        low = [min(e, 0.9 * value) for e, value in zip(error, y, strict=True)]  # stays above zero
        axis.errorbar(x, y, yerr=[low, error], color=color, label=legend, markersize=5, elinewidth=1.0, **style)
        for row, px, py in zip(group, x, y, strict=True):
            beside.append((px, py, plain(_short(str(row["name"]))), color))
    bounds = [(float(row["bound_bpe"]), float(row["mean_kld"])) for row in ours if row.get("bound_bpe") is not None]
    if bounds:
        axis.plot(
            *zip(*sorted(bounds), strict=True),
            color="tab:blue",
            linestyle=":",
            marker=".",
            label="bound for subkv's errors",
        )
    for i, row in enumerate(filter(_is_floor, rows)):
        legend = "" if i else f"{NOISE}: {plain(row['name'])}"
        axis.axhline(row["mean_kld"], color="tab:red", linestyle="--", linewidth=1.0, label=legend)
    return [label for label in beside if label[2]]


def _short(name: str) -> str:
    """Name of a point beside it: the type, the sidecar; nothing for our budgets, which the x axis shows."""
    if not name.startswith(OURS):
        return name.removesuffix(WINDOW)
    rest = name[len(OURS) :].lstrip(" :")
    try:
        float(rest)
    except ValueError:
        return Path(rest).name.removesuffix(".gguf")
    return ""


def _decades(axis: Any) -> None:
    """Plain numbers on a log y axis, more of them where it spans few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 3000 else (1,), numticks=50))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.12f}".rstrip("0").rstrip(".")))
    axis.yaxis.set_minor_formatter(NullFormatter())
