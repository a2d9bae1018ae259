"""The table of `python -m research.evaluate`: our rows, llama.cpp's types, adaptive bases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from each import each
from references import N_RECENT, evaluating

from research import evaluate


def test_evaluate_command(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    reference("llama")
    arguments = evaluating(tiny_model, measured, text, 256)
    arguments += ["--n-recent", str(N_RECENT), "--kv-bits", "4,6", "--uncalibrated", "6", "--stock", "q8_0,q4_0"]
    arguments += ["-t", "1"]
    result = CliRunner().invoke(evaluate.main, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    derived, stock = "subkv 6 uncalibrated", ["q8_0", "q8_0 + window", "q4_0", "q4_0 + window"]
    assert list(rows) == ["subkv 4", "subkv 6", derived, *stock]
    assert 5.5 < rows[derived]["bpe"] <= 6.0 and 0.0 < rows[derived]["mean_kld"] < rows["subkv 4"]["mean_kld"]
    assert rows["subkv 6"]["mean_kld"] < rows["subkv 4"]["mean_kld"]
    assert rows["q4_0 + window"]["mean_kld"] < rows["q4_0"]["mean_kld"]
    assert rows["q4_0"]["bpe"] == 4.5 and rows["q4_0 + window"]["bpe"] > 4.5
    assert abs(rows["subkv 6"]["bpe"] - 6.0) < 0.2
    table = CliRunner().invoke(evaluate.main, arguments)
    assert table.exit_code == 0 and "| words.txt | subkv 4 |" in table.output


def test_plans_beside_files_of_their_own(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    reference("llama")
    arguments = [*evaluating(tiny_model, measured, text, 256), "--n-recent", str(N_RECENT), "--kv-bits", "4"]
    arguments += ["--stock", "", "-t", "1", "--plans"]
    own, plan = json.loads(CliRunner().invoke(evaluate.main, [*arguments, "-o", "json"]).stdout)
    assert (own["name"], plan["name"]) == ("subkv 4", "subkv 4 plan") and "kld_over_own" not in own
    assert plan["bpe"] == own["bpe"] and plan["mean_kld"] != own["mean_kld"]
    assert plan["kld_over_own"] == pytest.approx(plan["mean_kld"] / own["mean_kld"])
    assert 0.0 < plan["kld_over_own_stderr"] < 0.5
    table = CliRunner().invoke(evaluate.main, arguments)
    assert f"| {plan['kld_over_own']:.3f} ± " in table.output


def test_evaluate_adaptive_bases(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    """A coder that never adapts equals the static one; one that adapts pays for its bases and sketches."""
    reference("llama")
    arguments = [*evaluating(tiny_model, measured, text, 256, chunks=2), "-t", "1"]
    arguments += ["--n-recent", str(N_RECENT), "--kv-bits", "4", "--stock", "q4_0", "--bpe-context", "1024"]
    arguments += [
        "--adapt",
        "kv,warm=1000000",
        "--adapt",
        "v,length=32,warm=32,gain=1",
        "--adapt",
        "k,warm=1000000,kind=oja",
    ]
    result = CliRunner().invoke(evaluate.main, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    static, never, values, oja, *_ = rows = json.loads(result.stdout)
    assert [row["name"] for row in rows[:2]] == ["subkv 4", "subkv 4 adapt kv,warm=1000000"]
    assert never["mean_kld"] == pytest.approx(static["mean_kld"], rel=0.02)
    assert static["chunks_opened"] is None and static["bpe_adapt"] == 0.0
    assert never["chunks_opened"] == oja["chunks_opened"] == 0.0
    assert values["chunks_opened"] > 0.0 and values["mean_kld"] < 1.1 * static["mean_kld"]
    assert values["bpe"] == pytest.approx(static["bpe"] + values["bpe_adapt"], abs=2e-4)
    # sketches alone: a triangle of at most 32 x 33 / 2 numbers, f32, and 40 bytes, per 32 elements of 1024 tokens
    assert 0.0 < never["bpe_adapt"] <= 8 * (40 + 4 * 32 * 33 / 2) / (32 * 1024) + 1e-4
    table = CliRunner().invoke(evaluate.main, arguments)
    assert table.exit_code == 0 and " opened | refused | merged |" in table.output


@each(
    ("arguments", "sentence"),
    [
        (["--kv-bits", "x"], "expected numbers separated by commas, found 'x'"),
        (["--stock", "q3_9"], "expected types out of f16, q8_0"),
        (["-c", "100000"], "-c: expected at most the trained 4096 tokens, found 100000"),
        (["-f", "no.txt"], "-f: expected a text file, found no file at no.txt"),
        (["--bpe-context", "0"], "0 is not in the range"),
        (["--kv-bits", "", "--stock", ""], "--kv-bits: expected a budget or --stock types to evaluate, found none"),
        (["--kv-bits", "0.2"], "--kv-bits: expected "),
        (["--adapt", "q"], "--adapt: expected k, v or kv, found 'q'"),
        (["--adapt", "v,size=3"], "--adapt: expected one of kind, rank, rows, "),
        (["--adapt", "v,gain=x"], "--adapt: gain: expected a number, found 'x'"),
        (["--adapt", "v,gain=0", "-c", "256"], "gain: expected a factor above 0, found 0"),
        (["--evictions", "h2o"], "--evictions': expected policies out of streaming, h2o, snapkv, quest with the"),
        (["--evictions", "h2o:10", "-c", "256"], "--evictions: expected at least 256 kept tokens, found 25 of 256"),
        (["--codecs", "exl4:4"], "--codecs': expected codecs out of exl3:2…8, turboquant:2…8, kivi:2…8"),
        (["--codecs", "kivi:2", "--n-recent", "16"], "--n-recent: expected at least the 32 tokens that kivi:2 codes"),
    ],
)
def test_evaluate_refuses(
    arguments: list[str],
    sentence: str,
    measured: Path,
    tiny_model: Callable[..., Path],
    text: Path,
    reference: Callable[[str], Any],
) -> None:
    reference("llama")
    given = ["-m", str(tiny_model("llama")), "--bases", str(measured), "-f", str(text), "-t", "1", *arguments]
    result = CliRunner().invoke(evaluate.main, given)
    assert result.exit_code in (1, 2)
    assert sentence in result.output
