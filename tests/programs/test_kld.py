"""llama-perplexity, with a file of base logits, and `subkv perplexity`, without one, print the same results."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from program_paths import program

from runtime.perplexity import main

N_CTX, CHUNKS = 256, 6
NAMES = {  # of llama-perplexity, and our members
    "Mean    KLD": ["mean_kld", "mean_kld_stderr"],
    "Maximum KLD": ["max_kld"],
    "99.9%   KLD": ["kld_999"],
    "Median  KLD": ["median_kld"],
    "Same top p": ["same_top", "same_top_stderr"],
}


def theirs(model: Path, text_file: Path, subkv: str, *arguments: Any) -> str:
    command = [program("llama-perplexity"), "-m", model, "-f", text_file, "-c", N_CTX, "--chunks", CHUNKS, "-t", 1]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "SUBKV"))}
    words = [str(word) for word in (*command, *arguments)]
    for _ in range(20):
        done = subprocess.run(
            words, env={**env, "SUBKV": subkv}, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        # upstream's programs may end before their whole log is written (common/log.cpp)
        if "--kl-divergence" not in words or "\nSame top p:" in done.stdout:
            break
    return done.stdout + done.stderr


def ours(model: Path, text_file: Path) -> list[dict[str, Any]]:
    """Of an f16 cache, the base, a coded one, and the noise floor."""
    words = ["-m", model, "-f", text_file, "-c", N_CTX, "--chunks", CHUNKS, "-t", 1, "--compare", "f16,subkv"]
    result = CliRunner().invoke(main, [str(word) for word in (*words, "-o", "json")])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def numbers(output: str, name: str) -> list[float]:
    """The numbers after a name, as printed."""
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    return [float(x) for x in re.findall(r"-?[0-9.]+", line[len(name) :])]


@pytest.mark.parametrize("batch", [64, 2048], ids=["chunks in parts", "chunks at once"])
def test_results_are_the_same(model: Path, text_file: Path, tmp_path: Path, batch: int) -> None:
    """Except that llama-perplexity's file of base logits has 16 bits for each, and none far below the largest."""
    base = tmp_path / "base.bin"
    written = theirs(model, text_file, "off", "--kl-divergence-base", base)
    compared = theirs(model, text_file, "auto", "--kl-divergence-base", base, "--kl-divergence", "-b", batch)
    alone = theirs(model, text_file, "auto", "-b", batch)
    coded = [("subkv: coded K/V cache" in output) for output in (written, compared, alone)]
    assert coded == [False, True, True]
    exact, mine, _ = ours(model, text_file)
    for output, row in ((written, exact), (alone, mine)):
        (line,) = [line for line in output.splitlines() if "Final estimate" in line]
        found = [float(x) for x in re.findall(r"[0-9.]+", line.partition("PPL")[2])]
        assert found == pytest.approx([row["ppl"], row["ppl_stderr"]], rel=1e-5)
    for name, members in NAMES.items():
        expected = [mine[member] * (100 if name == "Same top p" else 1) for member in members]
        # the rounded logits of one token are not averaged with others
        error = {"Maximum KLD": 3e-5, "99.9%   KLD": 3e-5, "Median  KLD": 5e-6}.get(name, 1e-6)
        assert numbers(compared, name) == pytest.approx(expected, rel=3e-2, abs=error), name
    assert mine["mean_kld"] > 0
