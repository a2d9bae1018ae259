"""Pictures: bits against KLD, per-layer sensitivities, and what `inspect --plot` draws. Needs the extra `plot`.

    python -m runtime.plots RESULTS.json… -o frontier.png     from converter.evaluate and runtime.perplexity --compare
    python -m runtime.plots calib.safetensors -o layers.png   a calibration that converter.sensitivity has added to

Functions named *_figure return a matplotlib Figure; the others write it, whole or not at all. The file's suffix says
its format (png without one).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from runtime import labels, options

OURS, WINDOW, FLOOR = "subkv", " + window", "f16 (flash attention"  # how names of results start or end
NOISE = "noise floor"
RELATIVE_ERROR = 1e-4  # ‖e‖²/‖x‖² of a one percent error
DPI = 150

#
# files and the extra
#


def new_figure(flag: str, width: float, height: float) -> Any:
    """An empty figure of this size in inches that no window system and no global state knows of."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise options.ProgramError(f"{flag}: expected matplotlib, found none; pip install 'subkv[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check(flag: str, target: Path) -> None:
    """Refuse what cannot be drawn before a long run is spent on it.

    Raises ProgramError without matplotlib or for an unknown suffix, ConverterError for a target that cannot be written.
    """
    from converter.atomic import check_writable

    kinds = new_figure(flag, 1, 1).canvas.get_supported_filetypes()
    if _kind(target) not in kinds:
        raise options.ProgramError(f"{flag}: expected a file name that ends in .png, .svg or .pdf, found {target.name}")
    check_writable(flag, target)


def _kind(target: Path) -> str:
    return target.suffix[1:].lower() or "png"


def plain(text: str) -> str:
    """Text as matplotlib shows it unchanged: a dollar would start a formula."""
    return text.replace("$", r"\$")


def write_figure(flag: str, figure: Any, target: Path) -> None:
    from converter.atomic import atomic_file

    check(flag, target)
    with atomic_file(flag, target) as handle:
        figure.savefig(handle, format=_kind(target), dpi=DPI)


#
# bits against KLD
#


def frontier(results: Sequence[dict[str, Any]], target: Path, flag: str = "--plot") -> None:
    """Draw bpe (x) against mean KLD in nats (y, log) and write it.

    results: objects as converter.evaluate and runtime.perplexity --compare print them, all of one model; read are
    name, bpe, mean_kld (None: the base, not drawn), mean_kld_stderr, and n_ctx and text where present: one panel for
    each such pair. Raises ProgramError, starting with `flag`, when nothing has a KLD or matplotlib is missing;
    ConverterError when target cannot be written.
    """
    write_figure(flag, frontier_figure(results, flag), target)


def frontier_figure(results: Sequence[dict[str, Any]], flag: str = "--plot") -> Any:
    """The figure of frontier()."""
    panels: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in results:
        if row["mean_kld"] is None:
            continue
        if row["mean_kld"] <= 0:
            options.note(f"{flag}: {row['name']}: a KLD of {row['mean_kld']:g} has no place on a log axis; left out")
            continue
        panels.setdefault((row.get("text"), row.get("n_ctx")), []).append(row)
    panels = {key: rows for key, rows in panels.items() if not all(_is_floor(row) for row in rows)}
    if not panels:
        raise options.ProgramError(f"{flag}: expected results with a mean KLD above 0, found none in {len(results)}")
    columns = min(len(panels), 2)
    n_rows = -(-len(panels) // columns)
    figure = new_figure(flag, 7.5 if columns == 1 else 11, 0.5 + 4.2 * n_rows)
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
        [handles[name] for name in names], names, loc="outside upper center", ncols=min(len(names), 4), frameon=False
    )
    figure.draw_without_rendering()  # settles the axes, so that labels can be placed in pixels
    for axis, wanted in zip(figure.axes, texts, strict=True):
        labels.place(figure, axis, wanted)
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
    groups = [
        (ours, "subkv", "tab:blue", {"marker": "o", "linestyle": "-", "linewidth": 1.8, "zorder": 4}),
        (
            [row for row in others if not str(row["name"]).endswith(WINDOW)],
            "llama.cpp's types",
            "0.3",
            {"marker": "s", "linestyle": "none", "zorder": 3},
        ),
        (
            [row for row in others if str(row["name"]).endswith(WINDOW)],
            "the same with subkv's exact window",
            "tab:orange",
            {"marker": "D", "linestyle": "none", "markerfacecolor": "white", "zorder": 3},
        ),
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
    for i, row in enumerate(filter(_is_floor, rows)):
        axis.axhline(
            row["mean_kld"],
            color="tab:red",
            linestyle="--",
            linewidth=1.0,
            label="" if i else f"{NOISE}: {plain(row['name'])}",
        )
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


#
# sensitivities
#


def _require_sensitivity(flag: str, calibration: Any) -> None:
    if calibration.sensitivity is None:
        raise options.ProgramError(
            f"{flag}: expected a calibration with sensitivities, found none in it; "
            f"`python -m converter.sensitivity` adds them"
        )


def layer_costs(calibration: Any) -> dict[str, Any]:
    """Nats of KLD that one percent of error in the keys (values) of one head costs: k, v [layers, heads] float64.

    The error has covariance 1e-4 Σ, Σ the second moment of the data, so ½ tr(S Σ) 1e-4 with the sensitivity S; it
    counts beyond the exact window the sensitivities were measured with. NaN where a layer has fewer heads than another.
    """
    import numpy as np

    heads = max(stats.shape.n_head_kv for stats in calibration.layers)
    costs = {}
    for side in "kv":
        table = np.full((len(calibration.layers), heads), np.nan)
        for row, stats in zip(table, calibration.layers, strict=True):
            moment = stats.k2 if side == "k" else stats.v2
            values = 0.5 * RELATIVE_ERROR * np.einsum("hij,hij->h", getattr(stats.sensitivity, side), moment)
            row[: len(values)] = values
        costs[side] = table
    return costs


def sensitivity(calibration: Any, target: Path, flag: str = "--plot") -> None:
    """Draw layer_costs(): heat maps of layer and head for K and V, and sums per layer below; write it.

    Raises ProgramError, starting with `flag`, for a calibration without sensitivities or without matplotlib;
    ConverterError when target cannot be written.
    """
    write_figure(flag, sensitivity_figure(calibration, flag), target)


def sensitivity_figure(calibration: Any, flag: str = "--plot") -> Any:
    """The figure of sensitivity()."""
    import numpy as np

    _require_sensitivity(flag, calibration)
    figure = new_figure(flag, 11, 5.5)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    costs = layer_costs(calibration)
    _heat_maps(flag, figure, axes[0], calibration, costs)
    for axis, side in zip(axes[1], "kv", strict=True):
        sums = np.nansum(costs[side], axis=1)
        axis.bar(np.arange(len(sums)), sums, color="tab:blue", width=0.8)
        axis.set(title=f"{side.upper()}: all heads of a layer, in total {sums.sum():.2g} nats", xlabel="layer")
        axis.set_yscale("log")  # K and V, and layers, are orders of magnitude apart
        axis.grid(True, axis="y", color="0.9")
        axis.set_axisbelow(True)
    axes[1, 0].set_ylabel("nats of KLD")
    for axis in axes[0]:
        axis.set_xlabel("")
    method = calibration.sensitivity
    figure.suptitle(
        f"{plain(calibration.name)}: KLD from a one percent error "
        f"beyond the exact window of {method.n_recent} tokens\n({method.method}, {method.tokens} tokens)",
        fontsize=11,
    )
    return figure


def _heat_maps(flag: str, figure: Any, axes: Any, calibration: Any, costs: dict[str, Any]) -> None:
    """costs of K and V as images head x layer on two axes under one log colour scale."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    positive = np.concatenate([costs[side][costs[side] > 0] for side in "kv"])
    if not len(positive):
        raise options.ProgramError(f"{flag}: expected a sensitivity above 0 in the calibration, found none")
    norm = LogNorm(positive.min(), positive.max() if positive.max() > positive.min() else 2 * positive.min())
    order = [stats.shape.il for stats in calibration.layers]

    def layer(index: float, _: Any) -> str:
        return str(order[int(index)]) if index == int(index) and 0 <= index < len(order) else ""

    for axis, side in zip(axes, "kv", strict=True):
        table = np.ma.masked_invalid(np.where(costs[side] > 0, costs[side], np.nan)).T
        image = axis.imshow(table, aspect="auto", interpolation="nearest", cmap="magma", norm=norm, origin="lower")
        axis.set(title=f"{side.upper()}: nats of KLD per percent of error", xlabel="layer", ylabel="KV head")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.xaxis.set_major_formatter(FuncFormatter(layer))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=list(axes), label="nats of KLD")


#
# what a file carries
#


def bit_map(layout: dict[str, Any], side: str) -> Any:
    """[heads of all layers, d] float: bits of every coefficient, 0 for dropped ones."""
    import numpy as np

    d = max(layer[f"d_{side}"] for layer in layout["layers"])
    rows = []
    for layer in layout["layers"]:
        for head in layer[side]:
            row = np.zeros(d)
            for band in head["bands"]:
                row[band["first"] : band["first"] + band["n"]] = band["bits"]
            rows.append(row)
    return np.array(rows)


def spectra(calibration: Any) -> dict[str, Any]:
    """Eigenvalues per head, descending: k, v [heads of all layers, d] float64, zeros behind those of smaller heads.

    With sensitivities of ½ S Σ: nats of KLD that dropping the coefficient costs. Without, as shares of the largest: K
    query-aware (of Σ_q Σ_k), V raw.
    """
    import numpy as np

    measured = calibration.sensitivity is not None

    def descending(values: Any) -> Any:
        values = np.sort(np.maximum(values.real, 0.0), axis=-1)[:, ::-1]
        return values if measured else values / np.maximum(values[:, :1], np.finfo(np.float64).tiny)

    layers = calibration.layers
    if measured:
        k = [descending(0.5 * np.linalg.eigvals(stats.sensitivity.k @ stats.k2)) for stats in layers]
        v = [descending(0.5 * np.linalg.eigvals(stats.sensitivity.v @ stats.v2)) for stats in layers]
    else:
        k = [descending(np.linalg.eigvals(stats.q2 @ stats.k2)) for stats in layers]
        v = [descending(np.linalg.eigvalsh(stats.v2)) for stats in layers]
    widths = [max(x.shape[1] for x in side) for side in (k, v)]
    padded = [
        np.concatenate([np.pad(x, ((0, 0), (0, w - x.shape[1]))) for x in side])
        for side, w in zip((k, v), widths, strict=True)
    ]
    return {"k": padded[0], "v": padded[1]}


def plot(layout: dict[str, Any], calibration: Any, target: Path, flag: str = "--plot") -> None:
    """Bits per head and coefficient; with a calibration its spectra below, and its sensitivities where it has any.

    Raises ProgramError without matplotlib, ConverterError when target cannot be written.
    """
    write_figure(flag, layout_figure(layout, calibration, flag), target)


def layout_figure(layout: dict[str, Any], calibration: Any, flag: str = "--plot") -> Any:
    """The figure of plot()."""
    measured = calibration is not None and calibration.sensitivity is not None
    heights = [5.0] + [5.0] * (calibration is not None) + [3.0] * measured
    figure = new_figure(flag, 11, sum(heights))
    axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    for axis, side in zip(axes[0], "kv", strict=True):
        image = axis.imshow(
            bit_map(layout, side), aspect="auto", interpolation="nearest", vmin=0, vmax=8, cmap="viridis"
        )
        axis.set(title=f"{side.upper()}: bits per coefficient", xlabel="coefficient", ylabel="head (all layers)")
    figure.colorbar(image, ax=list(axes[0]), label="bits")
    if calibration is not None:
        _spectra_panels(axes[1], calibration)
    if measured:
        _heat_maps(flag, figure, axes[2], calibration, layer_costs(calibration))
    return figure


def _spectra_panels(axes: Any, calibration: Any) -> None:
    """All heads' spectra as thin lines with their geometric mean."""
    import numpy as np

    values = spectra(calibration)
    if calibration.sensitivity is not None:
        names = {"k": "K: spectrum of ½ S Σk", "v": "V: spectrum of ½ S Σv"}
        unit, top = "nats of KLD per coefficient", max(float(side.max()) for side in values.values())
    else:
        names = {"k": "K: spectrum of Σq Σk", "v": "V: spectrum of Σv"}
        unit, top = "eigenvalue / largest", 1.0
    for axis, (side, table) in zip(axes, values.items(), strict=True):
        floor = np.maximum(table, 1e-12 * top)
        axis.semilogy(floor.T, color="tab:blue", alpha=0.15, linewidth=0.7)
        axis.semilogy(np.exp(np.log(floor).mean(axis=0)), color="black")
        axis.set(title=names[side], xlabel="coefficient", ylabel=unit, ylim=(1e-8 * top, 2 * top))


#
# command
#


def read_results(path: Path) -> list[dict[str, Any]]:
    """Results out of a JSON file. Raises ProgramError: no file, no JSON list, a row without what frontier() reads."""
    flag = "RESULTS.json"
    try:
        rows = json.loads(path.read_bytes())
    except OSError as error:
        raise options.ProgramError(f"{flag}: cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise options.ProgramError(
            f"{flag}: expected JSON, found text that does not parse in {path} ({error})"
        ) from error
    if not isinstance(rows, list):
        raise options.ProgramError(
            f"{flag}: expected a JSON list as converter.evaluate and runtime.perplexity --compare print it, "
            f"found {type(rows).__name__} in {path}"
        )
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise options.ProgramError(f"{flag}: expected objects, found {json.dumps(row)[:40]} as row {i} of {path}")
        wanted = {
            "name": isinstance(row.get("name"), str),
            "bpe": _is_number(row.get("bpe")),
            "mean_kld": "mean_kld" in row and (row["mean_kld"] is None or _is_number(row["mean_kld"])),
            "mean_kld_stderr": row.get("mean_kld_stderr") is None or _is_number(row["mean_kld_stderr"]),
            "text": row.get("text") is None or isinstance(row["text"], str),
            "n_ctx": row.get("n_ctx") is None or type(row["n_ctx"]) is int,
        }
        for key, good in wanted.items():
            if not good:
                kind = "a string" if key in ("name", "text") else "a number"
                found = json.dumps(row[key])[:40] if key in row else "none"
                raise options.ProgramError(f"{flag}: expected {kind} as {key} of row {i} of {path}, found {found}")
    return rows


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


@options.command()
@click.argument("files", metavar="RESULTS.json…", nargs=-1, required=True)
@click.option("-o", "--output", "target", required=True, metavar="FILE.png", help="picture to write")
def main(files: tuple[str, ...], target: str) -> None:
    """Draw bits against KLD from results that converter.evaluate and runtime.perplexity --compare printed with -o json,
    or the sensitivities of the layers from one calibration (calib.safetensors)."""
    paths = [Path(file) for file in files]
    calibrations = [path for path in paths if path.suffix == ".safetensors"]
    if calibrations and len(paths) > 1:
        raise click.UsageError(f"RESULTS.json: expected results or one calibration, found {len(paths)} files with both")
    check("-o", Path(target))
    if calibrations:
        from converter.calib_io import read_calibration

        calibration = read_calibration("calib.safetensors", paths[0])
        _require_sensitivity("calib.safetensors", calibration)
        sensitivity(calibration, Path(target), "-o")
    else:
        results = [row for path in paths for row in read_results(path)]
        frontier(results, Path(target), "-o")
    options.note(f"wrote {target}")


if __name__ == "__main__":
    main()
