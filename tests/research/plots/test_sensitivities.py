"""research.plot_sensitivities: the figure's numbers, its file, and calibrations without sensitivities."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from converter.plots import layers
from research.plot_sensitivities import main, sensitivity_figure
from subkv.base.errors import SubkvError
from subkv.format.calibration import write_calibration

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "format"))
from calib_synthetic import random_calibration, sensitive

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[plot]')")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_sensitivity_figure(drawn: None) -> None:
    calibration = sensitive()
    costs = layers.layer_costs(calibration)
    figure = sensitivity_figure(calibration)
    heat, bars = figure.axes[:2], figure.axes[2:4]
    for axis, below, side in zip(heat, bars, "kv", strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array(), costs[side].T)
        assert [bar.get_height() for bar in below.patches] == pytest.approx(costs[side].sum(axis=1))
        assert axis.get_title().startswith(f"{side.upper()}: nats of KLD")
        assert below.get_xlabel() == "layer"
    limits = {(axis.images[0].norm.vmin, axis.images[0].norm.vmax) for axis in heat}
    assert limits == {(min(c.min() for c in costs.values()), max(c.max() for c in costs.values()))}
    assert "tiny: KLD from a one percent error beyond the exact window of 128 tokens" in figure.get_suptitle()


def test_layers_keep_their_numbers(drawn: None) -> None:
    calibration = sensitive(2)
    numbered = [
        replace(stats, shape=replace(stats.shape, il=il)) for stats, il in zip(calibration.layers, (3, 7), strict=True)
    ]
    axis = sensitivity_figure(replace(calibration, layers=tuple(numbered))).axes[0]
    assert [axis.xaxis.get_major_formatter()(x) for x in (-1, 0, 0.5, 1, 2)] == ["", "3", "", "7", ""]


def test_command_draws_a_calibration(drawn: None, tmp_path: Path) -> None:
    path, target = tmp_path / "calib.safetensors", tmp_path / "out.png"
    write_calibration(path, sensitive())
    assert run(path, "-o", target).exit_code == 0
    assert target.read_bytes().startswith(PNG)
    target.unlink()
    write_calibration(path, random_calibration())
    result = run(path, "-o", target)
    assert result.exit_code == 1
    assert result.stderr == (
        "calib.safetensors: expected a calibration with sensitivities, found none in it; "
        "`python -m converter.sensitivity` adds them\n"
    )
    assert not target.exists()


def test_sensitivities_of_zero(drawn: None) -> None:
    calibration = sensitive(1)
    stats = calibration.layers[0]
    nothing = replace(stats.sensitivity, k=0 * stats.sensitivity.k, v=0 * stats.sensitivity.v)
    with pytest.raises(SubkvError, match="plot: expected a sensitivity above 0 in the calibration"):
        sensitivity_figure(replace(calibration, layers=(replace(stats, sensitivity=nothing),)))
