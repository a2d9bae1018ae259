"""Other projects' codecs and eviction policies in the table of `python -m research.evaluate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from references import N_RECENT, evaluating

from research import evaluate


def test_evaluate_codecs(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    """The table lists other projects' codecs with two windows; llama.cpp's type under another name gives the same
    result.
    """
    reference("llama")
    arguments = evaluating(tiny_model, measured, text, 256)
    arguments += ["--n-recent", "32", "--kv-bits", "", "--stock", "q4_0", "-t", "1", "--bpe-context", "1024"]
    arguments += ["--codecs", "rotated-q4_0,exl3:4,exl3:2/3,kivi:4"]
    result = CliRunner().invoke(evaluate.main, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    names = ["q4_0", "rotated-q4_0", "exl3:4", "exl3:2/3", "kivi:4"]
    assert list(rows) == [name + window for name in names for window in ("", " + window")]
    for name in ("rotated-q4_0", "rotated-q4_0 + window"):
        assert rows[name]["mean_kld"] == rows[name.removeprefix("rotated-")]["mean_kld"]
    assert rows["exl3:4"]["mean_kld"] < rows["exl3:2/3"]["mean_kld"]
    assert rows["exl3:4 + window"]["mean_kld"] < rows["exl3:4"]["mean_kld"]
    assert (rows["exl3:4"]["bpe"], rows["exl3:2/3"]["bpe"]) == (4.5, 3.0)
    assert rows["kivi:4"]["bpe"] == 5.0 + 16 * 128 / 1024 and rows["kivi:4"]["n_recent"] == 128
    assert rows["kivi:4 + window"]["n_recent"] == 32


def test_evaluate_evictions(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    """Who keeps everything is exact, or as good as our cells; who keeps half stores half."""
    reference("llama")
    arguments = evaluating(tiny_model, measured, text, 512)
    arguments += ["--n-recent", str(N_RECENT), "--kv-bits", "4", "--stock", "", "-t", "1", "--bpe-context", "512"]
    policies = ["streaming", "h2o", "snapkv", "quest"]
    names = [f"{name}:{share}" for name in policies for share in ("100", "50", "100@4")]
    result = CliRunner().invoke(evaluate.main, [*arguments, "--evictions", ",".join(names), "-o", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["subkv 4", *names]
    ours = rows["subkv 4"]
    for name in policies:
        half, coded = rows[f"{name}:50"], rows[f"{name}:100@4"]
        if name != "snapkv":  # which leaves room for the tokens to come
            assert rows[f"{name}:100"]["mean_kld"] < 1e-9
            assert coded["mean_kld"] == pytest.approx(ours["mean_kld"], rel=0.01)
        assert half["mean_kld"] > 1e-6
        stored = {"streaming": 8.0, "h2o": 8.0 + 0.5 * 32 / 64, "snapkv": 8.0, "quest": 17.0}[name]
        assert half["bpe"] == pytest.approx(stored)
        assert coded["bpe"] == pytest.approx(ours["bpe"] + {"h2o": 32 / 64, "quest": 1.0}.get(name, 0.0), abs=1e-3)
