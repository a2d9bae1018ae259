"""Costs and energies of layers: sensitivities and spectra of a calibration, bits of a layout. Extra `plot`."""

from __future__ import annotations

from typing import Any

import numpy as np

from converter.plots.figure import new_figure, plain
from subkv.base.errors import SubkvError

MAX_TICKS = 16
RELATIVE_ERROR = 1e-4  # ‖e‖²/‖x‖² of a one percent error


def layer_costs(calibration: Any) -> dict[str, Any]:
    """The cost of a one percent error in one head's keys or values, nats of KLD: k, v [layers, heads] float64.

    It is ½ tr(S Σ) 1e-4 for sensitivity S and second moment Σ, since the error has covariance 1e-4 Σ. Only cells beyond
    the exact window of the sensitivities count. NaN if a layer has fewer heads than another.
    """
    heads = max(stats.shape.n_head_kv for stats in calibration.layers)
    costs = {}
    for side in "kv":
        table = np.full((len(calibration.layers), heads), np.nan)
        for row, stats in zip(table, calibration.layers, strict=True):
            moments = getattr(stats.sensitivity, side), getattr(stats, f"{side}2")
            values = 0.5 * RELATIVE_ERROR * np.einsum("hij,hij->h", *moments)
            row[: len(values)] = values
        costs[side] = table
    return costs


def heat_maps(figure: Any, axes: Any, calibration: Any, costs: dict[str, Any]) -> None:
    """costs of K and V as images head x layer on two axes under one log colour scale."""
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


def bit_map(layout: dict[str, Any], side: str) -> Any:
    """Bits of every coefficient, 0 for dropped ones: [heads of all layers, d] float64."""
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
    """Eigenvalues per head, descending: k, v [heads of all layers, d] float64, with zeros after those of smaller heads.

    With sensitivities: of ½ S Σ, the cost of dropping the coefficient, nats of KLD. Without: of Σ_q Σ_k for keys and of
    Σ_v for values, divided by the largest.
    """
    measured = calibration.sensitivity is not None

    def descending(values: Any) -> Any:
        values = np.sort(np.maximum(values.real, 0.0), axis=-1)[:, ::-1]
        return values if measured else values / np.maximum(values[:, :1], np.finfo(np.float64).tiny)

    def eigenvalues(stats: Any, side: str) -> Any:
        moment = getattr(stats, f"{side}2")
        if measured:
            return 0.5 * np.linalg.eigvals(getattr(stats.sensitivity, side) @ moment)
        return np.linalg.eigvals(stats.q2 @ moment) if side == "k" else np.linalg.eigvalsh(moment)

    by_side = {}
    for side in "kv":
        tables = [descending(eigenvalues(stats, side)) for stats in calibration.layers]
        width = max(table.shape[1] for table in tables)
        by_side[side] = np.concatenate([np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables])
    return by_side


def layout_figure(layout: dict[str, Any], calibration: Any, title: str) -> Any:
    """Bits per head and coefficient; with a calibration also its spectra, and its sensitivities if it has any."""
    from matplotlib.ticker import FixedLocator

    measured = calibration is not None and calibration.sensitivity is not None
    heights = [5.0] + [5.0] * (calibration is not None) + [3.0] * measured
    figure = new_figure(11, sum(heights))
    figure.suptitle(plain(title))
    axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    for axis, side in zip(axes[0], "kv", strict=True):
        bits = bit_map(layout, side)
        if not len(bits):  # of latent attention: a row of K contains the values
            axis.set_axis_off()
            continue
        image = axis.imshow(bits, aspect="auto", interpolation="nearest", vmin=0, vmax=8, cmap="viridis")
        name = f"{side.upper()}: bits per coefficient, {bits.mean():.2f} on average"
        axis.set(title=name, xlabel="coefficient", ylabel="layer, its heads below each other")
        first = np.cumsum([0, *(len(layer[side]) for layer in layout["layers"])])[:-1]
        shown = slice(None, None, len(first) // MAX_TICKS + 1)
        axis.yaxis.set_major_locator(FixedLocator(first[shown].tolist()))
        axis.set_yticklabels([str(layer["il"]) for layer in layout["layers"][shown]])
    figure.colorbar(image, ax=list(axes[0]), label="bits")
    if calibration is not None:
        _spectra_panels(axes[1], calibration)
    if measured:
        heat_maps(figure, axes[2], calibration, layer_costs(calibration))
    return figure


def _spectra_panels(axes: Any, calibration: Any) -> None:
    """All heads' spectra as thin lines with their geometric mean."""
    values = spectra(calibration)
    if calibration.sensitivity is not None:
        products = {"k": "½ S Σk", "v": "½ S Σv"}
        unit, top = "nats of KLD per coefficient", max(float(side.max()) for side in values.values())
    else:
        products = {"k": "Σq Σk", "v": "Σv"}
        unit, top = "eigenvalue / largest", 1.0
    for axis, (side, table) in zip(axes, values.items(), strict=True):
        floor = np.maximum(table, 1e-12 * top)
        axis.semilogy(floor.T, color="tab:blue", alpha=0.15, linewidth=0.7)
        axis.semilogy(np.exp(np.log(floor).mean(axis=0)), color="black")
        title = f"{side.upper()}: spectrum of {products[side]}"
        axis.set(title=title, xlabel="coefficient", ylabel=unit, ylim=(1e-8 * top, 2 * top))
