"""The experiments on a tiny model: each runs, its results are saved, and the verdicts follow from the numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each

from converter.plots import figure as plots
from research.experiments import cli, oja, quality, rotary, verdicts
from research.experiments.quality import half_exact
from subkv.base.errors import SubkvError
from subkv.format.calibration import read_calibration
from subkv.format.window import N_SINK, Window
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import Fit, Options

N_RECENT = 16


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Letters and digits, unlike the calibration's words."""
    rng = random.Random(5)
    path = tmp_path_factory.mktemp("other") / "digits.txt"
    path.write_text(" ".join(str(rng.randrange(1000)) for _ in range(2000)))
    return path


@pytest.fixture(scope="module")
def arguments(
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    other: Path,
    reference: Callable[[str], Any],
) -> list[str]:
    reference("llama")
    given = ["-m", str(tiny_model("llama")), "--bases", str(calibration("llama")), "-f", str(text), "-f", str(other)]
    return [*given, "-c", "512", "--n-recent", str(N_RECENT), "--kv-bits", "4", "--bpe-context", "4096", "-t", "1"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


@pytest.fixture(scope="module")
def report(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments") / "report"
    result = run("--all", *arguments, "-o", str(folder))
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        *("(1)", "(2)", "(3)", "(4)"),
        *("words.txt:", "digits.txt:"),
    ]
    return folder


@pytest.fixture(scope="module")
def results(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report / "results.json").read_text())["experiments"]
    return found


def test_everything_is_written(report: Path, results: dict[str, Any]) -> None:
    assert tuple(results) == cli.NAMES
    text = (report / "report.md").read_text()
    for name in cli.NAMES:
        assert f"\n`{name}`, " in text
    for name in ("ranks", "matched", "chunks", "domain", "length", "bounds"):
        assert (report / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert f"({name}.png)" in text
    lines = [json.loads(line) for line in (report / "bounds.jsonl").read_text().splitlines()]
    assert lines == results["bounds"]["lines"]
    assert len(lines) == 2 * 2 * 2  # modes, layers, KV heads
    assert str(report.parent) not in text


def test_numbers_are_sound(results: dict[str, Any]) -> None:
    ranks = {(row["energy"], row["n_recent"]): row for row in results["ranks"]["rows"]}
    for n_recent in (0, N_RECENT):
        assert ranks[0.99, n_recent]["share"] >= ranks[0.9, n_recent]["share"]
        assert ranks[0.99, n_recent]["mean_kld"] < ranks[0.9, n_recent]["mean_kld"]
    assert ranks[0.9, N_RECENT]["bpe"] > ranks[0.9, 0]["bpe"]
    both, keys, values = results["sides"]["rows"]
    assert max(keys["mean_kld"], values["mean_kld"]) < 1.1 * both["mean_kld"]
    assert both["bpe"] < min(keys["bpe"], values["bpe"]) < 16.0
    coefficients = {row["name"]: row for row in results["coefficients"]["rows"]}
    assert coefficients["full rank, 16 bits"]["mean_kld"] < coefficients["full rank, 8 bits"]["mean_kld"]
    assert coefficients["full rank, 16 bits"]["bpe"] > coefficients["full rank, 8 bits"]["bpe"] + 7.0
    for pair in results["matched"]["pairs"] + results["domain"]["pairs"]:
        assert pair["bpe_static"] == pytest.approx(pair["bpe"], abs=0.15)  # a plan spends its budget in groups of 8
        assert pair["gain"] == pytest.approx(pair["kld_static"] - pair["kld"], abs=1e-12)


def test_sides_count_bases_as_both_do(calibration: Callable[[str], Path], tiny_model: Callable[..., Path]) -> None:
    """Also where decoders are in bytes."""
    with Gguf(tiny_model("llama")) as base:
        options = Options(window=Window(N_SINK, N_RECENT), bpe_context=4096)
        fit = Fit(base, read_calibration(calibration("llama")), options)
    assert fit.narrow(4.0)
    keys, values = half_exact(fit, 4.0)
    assert keys + values - 16.0 == pytest.approx(fit.account(fit.plan(4.0), narrow=True).total)


def test_subspaces_follow(results: dict[str, Any]) -> None:
    errors = {(row["text"], row["name"]): row["error"] for row in results["domain"]["reconstruction"]}
    # local bases may beat the best global one
    near = ("covariance of the last 256 tokens", "running covariance, 128 tokens ahead")
    for name in ("words.txt", "digits.txt"):
        others = [e for (text, basis), e in errors.items() if text == name and basis not in near]
        assert errors[name, "the text's own best"] <= min(others) + 1e-9
    chunks = {(row["text"], row["name"]): row for row in results["chunks"]["rows"]}
    assert chunks["digits.txt", "static"]["opened"] == 0.0
    assert chunks["digits.txt", "L = 128"]["opened"] + chunks["digits.txt", "L = 128"]["refused"] > 0.0
    assert chunks["digits.txt", "L = 128"]["error"] <= 1.01 * chunks["digits.txt", "static"]["error"]
    assert chunks["digits.txt", "τ per head (50% of its static ρ), no L"]["opened"] > 0.0
    ahead, behind = (errors["digits.txt", f"running covariance{more}"] for more in (", 128 tokens ahead", ""))
    assert ahead <= behind


def test_rotary_pairs_retain_more_energy(results: dict[str, Any]) -> None:
    rows = {(row["text"], row["basis"], row["space"]): row["rank"] for row in results["rotary"]["rows"]}
    assert len(rows) == 2 * 4 * 3
    for text in ("words.txt", "digits.txt"):
        after, pairs, before = (rows[text, "adaptive", space] for space in (rotary.AFTER, rotary.PAIRS, rotary.BEFORE))
        assert before < pairs < after < 1.0


def test_anchors_follow(results: dict[str, Any]) -> None:
    """A basis that looks ahead loses less; every text has every variant of `anchoring`."""
    rows = {(row["text"], row["basis"], row["space"]): row["rank"] for row in results["rotary"]["rows"]}
    for text in ("words.txt", "digits.txt"):
        assert rows[text, rotary.AHEAD, rotary.AFTER] < rows[text, rotary.TRAILING, rotary.AFTER]
    anchored = results["anchoring"]["rows"]
    assert [row["name"] for row in anchored] == 2 * ["static 4", *quality.ANCHORS]
    assert all(0.0 < row["mean_kld"] < 1.0 for row in anchored)
    adaptive = [row for row in anchored if row["name"] in quality.ANCHORS]
    assert all(row["chunks_opened"] + row["chunks_refused"] > 0.0 for row in adaptive)


def test_oja_follows(results: dict[str, Any]) -> None:
    errors = {(row["text"], row["r"], row["name"]): row for row in results["oja"]["errors"]}
    for text in ("words.txt", "digits.txt"):
        for r in (16, 24):
            static, own = errors[text, r, oja.STATIC], errors[text, r, oja.OWN]
            assert own["v_text"] < static["v_text"] and own["k_text"] < static["k_text"]
    assert [row["name"] for row in results["oja"]["rows"]] == 2 * [oja.STATIC, oja.OWN, oja.LATEST]


def test_bounds_hold(results: dict[str, Any]) -> None:
    found = results["bounds"]
    assert found["checks"] > 0 and found["gamma_checks"] > 0
    assert found["logit_violations"] == found["output_violations"] == found["gamma_violations"] == 0
    assert found["fd_violations"] == 0
    assert 0.0 < found["logit_tightness"] <= 1.0 and 0.0 < found["output_tightness"] <= 1.0
    for line in found["lines"]:
        assert 0.0 <= line["logit_error"] <= line["logit_bound"] * 1.001
        assert 0.0 <= line["output_error"] <= line["output_bound"] * 1.001


def test_length_covers_the_chunk(results: dict[str, Any]) -> None:
    found = results["length"]
    assert found["n_ctx"] == 1024
    own = [row for row in found["rows"] if row["name"] == found["rows"][0]["name"]]
    assert [row["to"] for row in own] == [256, 512, 768, 1023]
    assert all(a["to"] == b["from"] for a, b in zip(own, own[1:], strict=False))


def test_finished_experiments_are_reused(
    arguments: list[str], report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(lab: Any) -> Any:
        raise AssertionError("must not run again")

    (tmp_path / "results.json").write_bytes((report / "results.json").read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(cli, "experiments", lambda: dict.fromkeys(cli.NAMES, never))
        result = run("--all", *arguments, "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "reused: ranks, matched, " in result.stderr
    assert (tmp_path / "report.md").exists() and (tmp_path / "ranks.png").exists()


def test_interruption_keeps_finished_results(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = cli.experiments()

    def interrupted(lab: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "experiments", lambda: {**known, "coefficients": interrupted})
    result = run("--only", "sides,coefficients", *arguments, "-o", str(tmp_path))
    assert result.exit_code == 130
    assert list(json.loads((tmp_path / "results.json").read_text())["experiments"]) == ["sides"]
    again = run("--only", "sides", *arguments, "--kv-bits", "5", "-o", str(tmp_path))
    assert again.exit_code == 0, again.output
    assert "-o: results of other settings are replaced" in again.stderr


def test_without_matplotlib(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(width: float, height: float) -> Any:
        raise SubkvError("plot", "expected matplotlib, found none; pip install '.[plot]' in the clone of subkv")

    monkeypatch.setattr(plots, "new_figure", missing)
    result = run("--only", "bounds", *arguments, "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.stderr.count("no plots: -o: expected matplotlib, found none") == 1
    assert "- no plots: " in (tmp_path / "report.md").read_text()
    assert "(1) is there r ≪ d with at most 1% more perplexity? not measured here" in result.stdout


@each(
    ("given", "code", "sentence"),
    [
        ([], 2, "expected --all or --only NAME"),
        (["--all", "--only", "ranks"], 2, "expected --all or --only NAME"),
        (["--only", "ranks,speed"], 2, "expected names out of ranks, matched, "),
        (["--all", "-c", "100000"], 1, "-c: expected at most the trained 4096 tokens, found 100000"),
        (["--all", "-f", "no.txt"], 1, "-f: expected a text file, found no file at no.txt"),
        (["--all", "--kv-bits", "0.2"], 1, "--kv-bits: expected "),
        (["--only", "ranks", "--n-sink", "0"], 1, "--n-sink: expected at least 4, found 0"),
    ],
)
def test_refuses(given: list[str], code: int, sentence: str, arguments: list[str], tmp_path: Path) -> None:
    result = run(*arguments, *given, "-o", str(tmp_path))
    assert result.exit_code == code, result.output
    assert sentence in result.output
    assert not (tmp_path / "results.json").exists()


def test_refuses_a_folder_of_something_else(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('["mine"]')
    result = run("--only", "ranks", *arguments, "-o", str(tmp_path))
    assert result.exit_code == 1 and "-o: expected results of this program in results.json" in result.stderr
    assert (tmp_path / "results.json").read_text() == '["mine"]'
    (tmp_path / "file").write_text("")
    result = run("--only", "ranks", *arguments, "-o", str(tmp_path / "file"))
    assert result.exit_code == 1 and result.stderr.startswith("-o: cannot write ")


#
# verdicts
#


def rank_row(share: float, delta: float, n_recent: int = 0) -> dict[str, Any]:
    row = {"share": share, "delta_percent": delta, "n_recent": n_recent, "energy": 0.9, "text": "t"}
    return {**row, "rank_k": "8", "rank_v": "8"}


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([rank_row(0.3, 0.9), rank_row(0.6, 0.1)], "yes with no recent token exact: with 30% of the coefficients"),
        ([rank_row(0.3, 1.1), rank_row(0.6, 0.1)], "no with no recent token exact: with 60% of the coefficients"),
        ([rank_row(0.3, 3.0), rank_row(0.6, 2.0)], "no with no recent token exact: none that was tried reaches it"),
        ([rank_row(0.6, 0.1)], "no with no recent token exact: with 60% of the coefficients"),
    ],
)
def test_rank_verdict(rows: list[dict[str, Any]], start: str) -> None:
    assert verdicts.rank_verdict({"rows": rows}).startswith(start)


@pytest.mark.parametrize(
    ("gains", "start"),
    [
        ([3.0, 0.0], "yes: adaptive has less KLD in 1 of 2"),
        ([-3.0, 1.0], "no: "),
        ([-3.0, 3.0], "in part: "),
        ([1.0], "undecided: "),
    ],
)
def test_matched_verdict(gains: list[float], start: str) -> None:
    same = {"text": "t", "adaptive": "a", "bpe": 4.0, "kld_static": 10.0, "gain_stderr": 1.0}
    assert verdicts.matched_verdict([{**same, "gain": g, "kld": 10.0 - g} for g in gains]).startswith(start)


@pytest.mark.parametrize(("last", "answer"), [(0.019, "no"), (0.021, "yes")])
def test_length_verdict(last: float, answer: str) -> None:
    rows = [{"name": "a", "mean_kld": kld, "delta_percent": 0.1} for kld in (0.001, 0.01, 0.015, last)]
    assert verdicts.length_verdict({"rows": rows, "n_ctx": 64}).startswith(f"{answer}: ")


@pytest.mark.parametrize(
    ("values", "answer"), [([0.9] * 4, "yes"), ([0.9, 0.1, 0.9, 0.9], "in part"), ([0.1] * 4, "no")]
)
def test_bound_verdict(values: list[float], answer: str) -> None:
    names = ("residual_k", "epsilon_k", "residual_v", "epsilon_v")
    rows = [{"mode": "static", "predictor": n, "spearman": v, "heads": 4} for n, v in zip(names, values, strict=True)]
    counts = dict.fromkeys(("logit_violations", "output_violations", "checks", "gamma_checks", "gamma_violations"), 0)
    found = {"correlations": rows, **counts, "gamma_paper_violations": 7}
    assert verdicts.bound_verdict(found).startswith(f"{answer}: ")


def test_domain_verdict() -> None:
    def row(text: str, name: str, change: float) -> dict[str, Any]:
        return {"text": text, "name": name, "r": 8, "error": 0.2, "change": change}

    errors = [row(text, name, c) for text in "ab" for name, c in ((verdicts.STATIC, 0.0), ("x", -0.5), ("y", -0.4))]
    first, second = verdicts.domain_verdict(errors)
    assert first == "a: error of values behind 8 directions, 0.200 with static PCA: x -50%, y -40%."
    assert second.endswith("x -50%, y -40%; -45% or better: x.")


def test_ranks_hold_their_energy(
    tiny_model: Callable[..., Path], calibration: Callable[[str], Path], reference: Callable[[str], Any]
) -> None:
    from research.experiments.quality import PLAIN, energy_ranks
    from subkv.format.calibration import read_calibration
    from subkv.format.window import N_SINK, Window
    from subkv.native.gguf import Gguf
    from subkv.plan.pipeline import Fit, Options

    stats = read_calibration(calibration("llama"))
    with Gguf(tiny_model("llama")) as base:
        fit = Fit(base, stats, Options(window=Window(N_SINK, N_RECENT), **PLAIN))
    exact, rounded = energy_ranks(fit, 0.95)
    values = np.linalg.eigvalsh(fit.calibration.layers[0].k2[0])[::-1]
    share = np.cumsum(values) / values.sum()
    assert share[exact[0] - 1] >= 0.95 > (share[exact[0] - 2] if exact[0] > 1 else 0.0)
    assert all(r % 8 == 0 and r >= e for e, r in zip(exact, rounded, strict=True))
