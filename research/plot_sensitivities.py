"""Draws the sensitivities of a calibration: heat maps of layer and head, and sums per layer. Needs the extra `plot`.

python -m research.plot_sensitivities calib.safetensors -o layers.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from converter.plots import figure, layers
from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning
from subkv.format.calibration import read_calibration


def sensitivity_figure(calibration: Any) -> Any:
    """layer_costs() as heat maps of layer and head for K and V, with sums per layer below.

    Raises SubkvError about `calibration` where it has no sensitivities, and about `plot`.
    """
    method = calibration.sensitivity
    if method is None:
        raise SubkvError(
            "calibration",
            "expected a calibration with sensitivities, found none in it; `python -m converter.sensitivity` adds them",
        )
    drawn = figure.new_figure(11, 5.5)
    axes = drawn.subplots(2, 2, sharex=True, sharey="row")
    costs = layers.layer_costs(calibration)
    layers.heat_maps(drawn, axes[0], calibration, costs)
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
    drawn.suptitle(
        f"{figure.plain(calibration.name)}: KLD from a one percent error "
        f"beyond the exact window of {method.n_recent} tokens\n({method.method}, {method.tokens} tokens)",
        fontsize=11,
    )
    return drawn


@command()
@click.argument("calibration", type=options.PATH)
@click.option("-o", "--output", "plot", type=options.PATH, required=True, metavar="FILE.png", help="file to write")
def main(calibration: Path, plot: Path) -> None:
    """Draw the sensitivities of a calibration (calib.safetensors)."""
    figure.check(plot)
    with concerning(calibration="calib.safetensors"):
        figure.write_figure(sensitivity_figure(read_calibration(calibration)), plot)
    options.note(f"wrote {plot}")


if __name__ == "__main__":
    main()
