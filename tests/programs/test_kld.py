"""llama-perplexity and `subkv perplexity` print the same results for the same cache."""

from __future__ import annotations

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
NAMES = [
    "Mean PPL(base)",
    "Mean PPL(Q)/PPL(base)",
    "Mean    KLD",
    "Maximum KLD",
    "99.9%   KLD",
    "Median  KLD",
    "Same top p",
]


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
        if "--kl-divergence" not in words or f"\n{NAMES[-1]}:" in done.stdout:
            break
    return done.stdout + done.stderr


def ours(model: Path, text_file: Path, *arguments: Any) -> str:
    words = ["-m", model, "-f", text_file, "-c", N_CTX, "--chunks", CHUNKS, "-t", 1, *arguments]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def number_of(output: str, name: str) -> str:
    """The numbers after a name, as printed."""
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    return re.sub(r"\s+", " ", line[len(name) :].strip(" :"))


@pytest.mark.parametrize("batch", [64, 2048], ids=["chunks in parts", "chunks at once"])
def test_divergence_is_the_same(model: Path, text_file: Path, tmp_path: Path, batch: int) -> None:
    base = tmp_path / "base.bin"
    written = theirs(model, text_file, "off", "--kl-divergence-base", base)
    output = theirs(model, text_file, "auto", "--kl-divergence-base", base, "--kl-divergence", "-b", batch)
    assert "subkv: coded K/V cache" in output and "subkv: coded" not in written
    mine = ours(model, text_file, "--kl-divergence-base", base, "--kl-divergence", "-ctk", "subkv")
    # the same perplexity of the base in another order of sums; it has seven digits
    assert float(number_of(output, NAMES[0]).split()[0]) == pytest.approx(float(number_of(mine, NAMES[0])), rel=1e-7)
    for name in NAMES[1:]:  # these, too, may have another last digit
        theirs_and_mine = ([float(x) for x in re.findall(r"-?[0-9.]+", number_of(out, name))] for out in (output, mine))
        assert next(theirs_and_mine) == pytest.approx(next(theirs_and_mine), rel=2e-6, abs=1e-6), name
    assert float(number_of(output, "Mean    KLD").split()[0]) > 0


def test_bases_are_exchanged(model: Path, text_file: Path, tmp_path: Path) -> None:
    """Each program reads the base file that the other one wrote."""
    ours(model, text_file, "-ctk", "f16", "--kl-divergence-base", tmp_path / "ours.bin")
    theirs(model, text_file, "off", "--kl-divergence-base", tmp_path / "theirs.bin")
    output = theirs(model, text_file, "auto", "--kl-divergence-base", tmp_path / "ours.bin", "--kl-divergence")
    mine = ours(model, text_file, "--kl-divergence-base", tmp_path / "theirs.bin", "--kl-divergence", "-ctk", "subkv")
    for name in NAMES[2:]:
        assert number_of(output, name) == number_of(mine, name), name
