"""Fixtures of a tiny model in the float32 reference; everything here skips without the extra `torch`."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

N_RECENT = 16  # tokens in the window of `measured`
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "over", "hills", "to", "an", "old", "house"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few thousand words of seeded nonsense."""
    rng = random.Random(3)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(WORDS) for _ in range(6000)))
    return path


@pytest.fixture(scope="session")
def reference(tiny_model: Callable[..., Path]) -> Callable[[str], Any]:
    """reference(arch): the tiny model of an architecture in transformers."""
    for package in ("torch", "transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"float32 reference: package {package} is not installed (pip install '.[torch]')")
    from research.float32.reference import Reference

    made: dict[str, Reference] = {}

    def load(arch: str) -> Reference:
        if arch not in made:
            made[arch] = Reference(tiny_model(arch), 1)
        return made[arch]

    return load


@pytest.fixture(scope="session")
def calibration(
    tiny_model: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """calibration(arch): the tiny model's calibration by the native engine, without sensitivities."""
    from click.testing import CliRunner

    from converter.calibrate import main

    folder = tmp_path_factory.mktemp("calibrations")

    def make(arch: str) -> Path:
        path = folder / f"{arch}.safetensors"
        if not path.exists():
            arguments = ["-m", str(tiny_model(arch)), "-f", str(text), "-o", str(path), "-c", "256", "--chunks", "8"]
            result = CliRunner().invoke(main, [*arguments, "-t", "1"])
            assert result.exit_code == 0, result.output
        return path

    return make


@pytest.fixture(scope="session")
def measured(
    reference: Callable[[str], Any],
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The tiny llama's calibration with sensitivities of 12 chunks."""
    from click.testing import CliRunner

    from research import fisher

    reference("llama")
    path = tmp_path_factory.mktemp("measured") / "calib.safetensors"
    arguments = ["-m", str(tiny_model("llama")), "--bases", str(calibration("llama")), "-f", str(text), "-o", str(path)]
    result = CliRunner().invoke(
        fisher.main, [*arguments, "-c", "256", "--chunks", "12", "--n-recent", str(N_RECENT), "-t", "1"]
    )
    assert result.exit_code == 0, result.output
    return path


# Arguments about a text that the commands for sensitivities refuse, and their sentence.
REFUSED_TEXTS = [
    (["-c", "100000"], "-c: expected at most the trained 4096 tokens, found 100000"),
    (["-c", "128"], "-c: expected more than the exact window of 128 tokens, found 128"),
    (["-f", "no.txt"], "-f: expected a text file, found no file at no.txt"),
]


def check_refused_text(
    command: Any, model: Path, bases: Path, text: Path, output: Path, arguments: list[str], sentence: str
) -> None:
    """The command exits with 1 and this sentence, and writes no output."""
    from click.testing import CliRunner

    given = ["-m", str(model), "--bases", str(bases), "-f", str(text), "-t", "1", "-o", str(output), *arguments]
    result = CliRunner().invoke(command, given)
    assert result.exit_code == 1
    assert sentence in result.output
    assert not output.exists()


def evaluating(tiny_model: Callable[..., Path], bases: Path, text: Path, n_ctx: int, chunks: int = 1) -> list[str]:
    """Arguments of the evaluations that all their tests share."""
    files = ["-m", str(tiny_model("llama")), "--bases", str(bases), "-f", str(text)]
    return [*files, "-c", str(n_ctx), "--chunks", str(chunks)]
