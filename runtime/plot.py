"""Pictures: bits against KLD, per-layer sensitivities, and what `inspect --plot` draws. Needs the extra `plot`.

    subkv plot RESULTS.json… -o frontier.png     from `subkv evaluate` and `subkv perplexity --compare`
    subkv plot calib.safetensors -o layers.png   a calibration that `subkv sensitivity` has added to

Functions named *_figure return a matplotlib Figure; the others write it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from converter.plots.figure import check, new_figure, plain, write_figure
from converter.plots.frontier import frontier
from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError

RELATIVE_ERROR = 1e-4  # ‖e‖²/‖x‖² of a one percent error


#
# sensitivities
#


def _require_sensitivity(calibration: Any) -> None:
    if calibration.sensitivity is None:
        raise SubkvError(
            "plot",
            "expected a calibration with sensitivities, found none in it; `python -m converter.sensitivity` adds them",
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


def sensitivity(calibration: Any, target: Path) -> None:
    """Draw layer_costs(): heat maps of layer and head for K and V, and sums per layer below; write it.

    Raises SubkvError, starting with `flag`, for a calibration without sensitivities or without matplotlib;
    SubkvError when target cannot be written.
    """
    write_figure(sensitivity_figure(calibration), target)


def sensitivity_figure(calibration: Any) -> Any:
    """The figure of sensitivity()."""
    import numpy as np

    _require_sensitivity(calibration)
    figure = new_figure(11, 5.5)
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    costs = layer_costs(calibration)
    _heat_maps(figure, axes[0], calibration, costs)
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


def _heat_maps(figure: Any, axes: Any, calibration: Any, costs: dict[str, Any]) -> None:
    """costs of K and V as images head x layer on two axes under one log colour scale."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    positive = np.concatenate([costs[side][costs[side] > 0] for side in "kv"])
    if not len(positive):
        raise SubkvError("plot", "expected a sensitivity above 0 in the calibration, found none")
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


def plot(layout: dict[str, Any], calibration: Any, target: Path) -> None:
    """Bits per head and coefficient; with a calibration its spectra below, and its sensitivities where it has any.

    Raises SubkvError without matplotlib, SubkvError when target cannot be written.
    """
    write_figure(layout_figure(layout, calibration), target)


def layout_figure(layout: dict[str, Any], calibration: Any) -> Any:
    """The figure of plot()."""
    measured = calibration is not None and calibration.sensitivity is not None
    heights = [5.0] + [5.0] * (calibration is not None) + [3.0] * measured
    figure = new_figure(11, sum(heights))
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
        _heat_maps(figure, axes[2], calibration, layer_costs(calibration))
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
    """Results out of a JSON file. Raises SubkvError: no file, no JSON list, a row without what frontier() reads."""
    try:
        rows = json.loads(path.read_bytes())
    except OSError as error:
        raise SubkvError("plot", f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SubkvError("plot", f"expected JSON, found text that does not parse in {path} ({error})") from error
    if not isinstance(rows, list):
        raise SubkvError(
            "plot",
            f"expected a JSON list as converter.evaluate and runtime.perplexity --compare print it, "
            f"found {type(rows).__name__} in {path}",
        )
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise SubkvError("plot", f"expected objects, found {json.dumps(row)[:40]} as row {i} of {path}")
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
                raise SubkvError("plot", f"expected {kind} as {key} of row {i} of {path}, found {found}")
    return rows


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


@command()
@click.argument("files", metavar="RESULTS.json…", nargs=-1, required=True)
@click.option("-o", "--output", "target", required=True, metavar="FILE.png", help="picture to write")
def main(files: tuple[str, ...], target: str) -> None:
    """Draw bits against KLD from results that converter.evaluate and runtime.perplexity --compare printed with -o json,
    or the sensitivities of the layers from one calibration (calib.safetensors)."""
    paths = [Path(file) for file in files]
    calibrations = [path for path in paths if path.suffix == ".safetensors"]
    if calibrations and len(paths) > 1:
        raise click.UsageError(f"RESULTS.json: expected results or one calibration, found {len(paths)} files with both")
    check(Path(target))
    if calibrations:
        from subkv.format.calibration import read_calibration

        calibration = read_calibration(paths[0])
        _require_sensitivity(calibration)
        sensitivity(calibration, Path(target))
    else:
        results = [row for path in paths for row in read_results(path)]
        frontier(results, Path(target))
    options.note(f"wrote {target}")


if __name__ == "__main__":
    main()
