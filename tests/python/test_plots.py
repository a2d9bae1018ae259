"""Plots: their contents, their files, and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each

from converter.plots import layers
from converter.plots.frontier import frontier, frontier_figure
from runtime import cli, inspect
from runtime.plot import read_results
from subkv.base.errors import SubkvError
from subkv.format.calibration import Calibration, read_calibration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "format"))
from calib_synthetic import random_calibration, sensitive

Models = Callable[..., Path]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[plot]')")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], prog_name="subkv")


def row(name: str, bpe: float, kld: float | None, **more: Any) -> dict[str, Any]:
    stderr = None if kld is None else kld / 10
    return {"name": name, "bpe": bpe, "mean_kld": kld, "mean_kld_stderr": stderr, "text": "a.txt", "n_ctx": 64, **more}


EVALUATED = [
    row("subkv 5", 5.0, 0.0003),
    row("subkv 3.5", 3.5, 0.002),
    row("q4_0", 4.5, 0.03),
    row("q4_0 + window", 5.8, 0.003),
    row("q8_0", 8.5, 0.0004),
]
COMPARED = [
    row("f16", 16.0, None),
    row("subkv:folder/s45.gguf", 4.98, 0.008),
    row("q8_0/q4_0", 6.5, 0.02),
    row("f16 (flash attention off)", 16.0, 0.0031),
]


def texts(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.texts]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


#
# bits against KLD
#


def test_frontier_shows_every_result(drawn: None) -> None:
    figure = frontier_figure(EVALUATED + COMPARED)
    (axis,) = figure.axes
    assert axis.get_yscale() == "log"
    assert axis.get_title() == "a.txt, 64 tokens"
    assert sorted(texts(axis)) == ["q4_0", "q4_0", "q8_0", "q8_0/q4_0", "s45"]
    lines = {c.get_label(): c.lines[0].get_xydata().tolist() for c in axis.containers}
    assert lines == {
        "subkv": [[3.5, 0.002], [4.98, 0.008], [5.0, 0.0003]],
        "llama.cpp's types": [[4.5, 0.03], [8.5, 0.0004], [6.5, 0.02]],
        "the same with subkv's exact window": [[5.8, 0.003]],
    }
    assert legend(figure) == [*lines, "noise floor: f16 (flash attention off)"]
    (floor,) = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert set(floor.get_ydata()) == {0.0031}


def test_frontier_shows_other_codecs_and_the_bound(drawn: None) -> None:
    """Codecs with their own window and with subkv's are distinct; the bound is left of subkv's points."""
    ours = [row("subkv 3", 3.0, 0.004, bound_bpe=2.0), row("subkv 4", 4.0, 0.001, bound_bpe=2.9)]
    other = [row("kvarn:4/2", 4.1, 0.01), row("kvarn:4/2 + window", 3.9, 0.02), row("rotated-q4_0", 4.5, 0.03)]
    (axis,) = frontier_figure([*EVALUATED, *ours, *other, row("subkv 6", 6.0, 0.0002, bound_bpe=None)]).axes
    points = {c.get_label(): c.lines[0].get_xydata().tolist() for c in axis.containers}
    assert points["other codecs"] == [[4.1, 0.01], [4.5, 0.03]]
    assert points["these with subkv's exact window"] == [[3.9, 0.02]]
    assert points["llama.cpp's types"] == [[4.5, 0.03], [8.5, 0.0004]]
    (bound,) = [line for line in axis.lines if line.get_linestyle() == ":"]
    assert bound.get_xydata().tolist() == [[2.0, 0.004], [2.9, 0.001]]


def test_frontier_has_a_panel_for_every_text_and_context(drawn: None) -> None:
    other = [row("subkv", 4.0, 0.01, text="b$2$.txt"), row("subkv", 4.1, 0.02, n_ctx=128)]
    unnamed = {key: value for key, value in row("q8_0", 8.5, 0.01).items() if key not in ("text", "n_ctx")}
    lonely_floor = row("f16 (flash attention on)", 16.0, 0.001, n_ctx=256)
    figure = frontier_figure([*EVALUATED, *other, unnamed, lonely_floor])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["a.txt, 64 tokens", r"b\$2\$.txt, 64 tokens", "a.txt, 128 tokens", ""]
    assert len({axis.get_ylim() for axis in figure.axes}) == 1
    three = frontier_figure([*EVALUATED, *other])
    assert len(three.axes) == 3


def test_frontier_labels_do_not_overlap(drawn: None) -> None:
    """Ten types crowded into one corner and a line through it."""
    crowd = [row(f"q{i}_0", 5 + 0.1 * i, 0.01 * 1.1**i) for i in range(10)]
    figure = frontier_figure([*crowd, row("subkv 4", 4.0, 0.03), row("subkv 7", 7.0, 0.008)])
    (axis,) = figure.axes
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == 10
    for i, box in enumerate(boxes):
        assert axis.get_window_extent().containsx(box.x0)
        assert axis.get_window_extent().containsx(box.x1)
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_frontier_omits_values_without_a_logarithm(drawn: None, capsys: pytest.CaptureFixture[str]) -> None:
    (axis,) = frontier_figure([*EVALUATED, row("same", 16.0, 0.0)]).axes
    assert "same" not in texts(axis)
    assert capsys.readouterr().err == "plot: same: a KLD of 0 has no place on a log axis; left out\n"


@pytest.mark.parametrize("rows", [[], COMPARED[:1], [COMPARED[0], COMPARED[-1]], [row("q8_0", 8.5, 0.0)]])
def test_frontier_without_a_kld(drawn: None, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match="plot: expected results with a mean KLD above 0, found none in"):
        frontier(rows, tmp_path / "out.png")
    assert list(tmp_path.iterdir()) == []


#
# the command
#


@pytest.mark.parametrize(("name", "start"), [("out.png", PNG), ("out", PNG), ("out.pdf", b"%PDF"), ("o.svg", b"<?xml")])
def test_command_writes_a_picture_of_all_files(drawn: None, tmp_path: Path, name: str, start: bytes) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, rows in zip(paths, (EVALUATED, COMPARED), strict=True):
        path.write_text(json.dumps(rows))
    target = tmp_path / name
    result = run("lab", "plot", *paths, "-o", target)
    assert result.exit_code == 0, result.output
    assert (result.stdout, result.stderr) == ("", f"wrote {target}\n")
    assert target.read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 3


@each(
    ("content", "message"),
    [
        (None, "RESULTS.json: cannot read PATH: No such file or directory"),
        ("| a | table |", "RESULTS.json: expected JSON, found text that does not parse in PATH ("),
        ("[" * 100000, "RESULTS.json: expected JSON, found text that does not parse in PATH ("),
        ("{}", "RESULTS.json: expected a JSON list as research.evaluate and runtime.perplexity print it, "),
        ("[3]", "RESULTS.json: expected objects, found 3 as row 0 of PATH"),
        ('[{"bpe": 1}]', "RESULTS.json: expected a string as name of row 0 of PATH, found none"),
        ('[{"name": "a", "bpe": "x"}]', 'RESULTS.json: expected a number as bpe of row 0 of PATH, found "x"'),
        ('[{"name": "a", "bpe": true}]', "RESULTS.json: expected a number as bpe of row 0 of PATH, found true"),
        ('[{"name": "a", "bpe": 1}]', "RESULTS.json: expected a number as mean_kld of row 0 of PATH, found none"),
        (
            '[{"name": "a", "bpe": 1, "mean_kld": NaN}]',
            "RESULTS.json: expected a number as mean_kld of row 0 of PATH, found NaN",
        ),
        (
            '[{"name": "a", "bpe": 1, "mean_kld": 1, "n_ctx": "2k"}]',
            'RESULTS.json: expected a number as n_ctx of row 0 of PATH, found "2k"',
        ),
        (json.dumps(COMPARED[:1]), "-o: expected results with a mean KLD above 0, found none in 1"),
    ],
)
def test_command_refuses(drawn: None, tmp_path: Path, content: str | None, message: str) -> None:
    path, target = tmp_path / "results.json", tmp_path / "out.png"
    if content is not None:
        path.write_text(content)
    result = run("lab", "plot", path, "-o", target)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(message.replace("PATH", str(path)))
    assert result.stderr.count("\n") == 1
    assert not target.exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing/out.png", "-o: cannot write PATH: No such file or directory"),
        ("", "-o: expected a file name, found the folder PATH"),
        ("out.txt", "-o: expected a file name that ends in .png, .svg or .pdf, found out.txt"),
    ],
)
def test_command_refuses_targets(drawn: None, tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "results.json").write_text(json.dumps(EVALUATED))
    folder = tmp_path / "sub"
    folder.mkdir()
    result = run("lab", "plot", tmp_path / "results.json", "-o", folder / target)
    assert result.exit_code == 1
    assert result.stderr == message.replace("PATH", str(folder / target)) + "\n"
    assert list(folder.iterdir()) == []


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes its import fail
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    (tmp_path / "results.json").write_text(json.dumps(EVALUATED))
    result = run("lab", "plot", tmp_path / "results.json", "-o", tmp_path / "out.png")
    assert result.exit_code == 1
    assert result.stderr == "-o: expected matplotlib, found none; pip install '.[plot]' in the clone of subkv\n"


def test_usage(tmp_path: Path) -> None:
    assert run("lab", "plot", "-o", tmp_path / "out.png").exit_code == 2
    assert run("lab", "plot", tmp_path / "results.json").exit_code == 2


#
# sensitivities
#


def test_layer_costs_equal_the_mean_cost_of_one_percent_errors() -> None:
    """E ½ eᵀ S e over errors drawn with a hundredth of the data's standard deviation."""
    calibration = sensitive(2)
    stats = calibration.layers[1]
    costs = layers.layer_costs(calibration)
    assert costs["k"].shape == costs["v"].shape == (2, 2)
    values, vectors = np.linalg.eigh(stats.v2[0])
    rows = np.random.default_rng(0).standard_normal((200000, len(values))) * np.sqrt(values) @ vectors.T
    errors = 0.01 * rows
    sampled = 0.5 * np.einsum("ni,ij,nj->", errors, stats.sensitivity.v[0], errors) / len(errors)
    assert costs["v"][1, 0] == pytest.approx(sampled, rel=0.01)


def test_layer_costs_of_layers_of_other_shapes() -> None:
    narrow = replace(sensitive(2, n_head_kv=1).layers[1])
    calibration = sensitive(2)
    costs = layers.layer_costs(replace(calibration, layers=(calibration.layers[0], narrow)))
    assert np.isnan(costs["k"]).tolist() == [[False, False], [False, True]]


#
# inspect, perplexity
#


def test_spectra() -> None:
    for values in layers.spectra(random_calibration(2)).values():
        assert values.shape == (4, 32)
        assert (values[:, 0] == 1).all()
        assert (values[:, 1:] <= values[:, :-1]).all()
    calibration = sensitive(2)
    costs = layers.layer_costs(calibration)
    for side, values in layers.spectra(calibration).items():
        assert (values[:, 1:] <= values[:, :-1]).all()
        np.testing.assert_allclose(values.sum(axis=1) * layers.RELATIVE_ERROR, costs[side].ravel(), rtol=1e-6)


def layout_of(model: Path) -> Any:
    return json.loads(run("inspect", model, "-o", "json").stdout)


def test_layout_figure(drawn: None, coded_model: Models, calibration: Path) -> None:
    layout = layout_of(coded_model())
    bits = layers.bit_map(layout, "k")
    assert bits.shape == (sum(layer["n_head_kv"] for layer in layout["layers"]), 32)
    assert (bits == 8).all()

    def titles(with_calibration: Calibration | None) -> list[str]:
        figure = layers.layout_figure(layout, with_calibration, "m$.gguf: 8 bits")
        assert figure.get_suptitle() == r"m\$.gguf: 8 bits"
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert labels == [str(layer["il"]) for layer in layout["layers"]]
        return [axis.get_title() for axis in figure.axes if axis.get_title()]

    latent = {**layout, "layers": [{**layer, "v": []} for layer in layout["layers"]]}
    assert [axis.axison for axis in layers.layout_figure(latent, None, "m").axes[:2]] == [True, False]
    first = [f"{side}: bits per coefficient, 8.00 on average" for side in "KV"]
    assert titles(None) == first
    assert titles(read_calibration(calibration)) == [*first, "K: spectrum of Σq Σk", "V: spectrum of Σv"]
    assert titles(sensitive()) == [
        *first,
        "K: spectrum of ½ S Σk",
        "V: spectrum of ½ S Σv",
        "K: nats of KLD per percent of error",
        "V: nats of KLD per percent of error",
    ]


def test_inspect_plot(drawn: None, coded_model: Models, calibration: Path, tmp_path: Path) -> None:
    target = tmp_path / "plot.png"
    result = CliRunner().invoke(inspect.main, [str(coded_model()), "--plot", str(target), "--bases", str(calibration)])
    assert result.exit_code == 0, result.output
    assert target.read_bytes().startswith(PNG)
    result = run("inspect", coded_model(), "--plot", tmp_path / "none" / "plot.png")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"--plot: cannot write {tmp_path / 'none' / 'plot.png'}: No such file")


def test_perplexity_plot(drawn: None, coded_model: Models, text_file: Path, tmp_path: Path) -> None:
    target, saved = tmp_path / "plot.png", tmp_path / "results.json"
    common = ["perplexity", "-m", coded_model(), "-f", text_file, "-c", 64, "--chunks", 2, "-t", 2]
    result = run(*common, "--compare", "f16,q4_0,subkv", "-o", "json")
    assert result.exit_code == 0, result.output
    saved.write_text(result.stdout)
    assert run("lab", "plot", saved, "-o", target).exit_code == 0
    assert target.read_bytes().startswith(PNG)
    (axis,) = frontier_figure(read_results(saved)).axes
    assert axis.get_title() == f"{text_file.name}, 64 tokens"
    assert texts(axis) == ["q4_0"]
    refused = run("lab", "plot", saved, "-o", tmp_path / "plot.txt")
    assert refused.exit_code == 1
    assert refused.stderr == "-o: expected a file name that ends in .png, .svg or .pdf, found plot.txt\n"
