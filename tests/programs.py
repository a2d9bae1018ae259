"""A tiny model with bases from the real commands, and a function that runs the programs."""

from __future__ import annotations

import os
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English text from CPython's standard library."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n".join(pydoc_data.topics.topics.values())[:60000], "utf-8")
    return path


def _check(result: Result) -> None:
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"


@pytest.fixture(scope="session")
def calibration(tiny_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from converter.calibrate import main

    path = tmp_path_factory.mktemp("calibration") / "calib.safetensors"
    model = str(tiny_model("llama"))
    _check(
        CliRunner().invoke(main, ["-m", model, "-f", str(text_file), "-o", str(path), "-c", "128", "--chunks", "32"])
    )
    return path


@pytest.fixture(scope="session")
def coded_model(
    tiny_model: Callable[..., Path], calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """coded_model("--kv-bits", "8"): the tiny llama converted with these arguments; built once per set of them."""
    from converter.cli import main

    folder = tmp_path_factory.mktemp("coded")
    models: dict[tuple[str, ...], Path] = {}

    def make(*arguments: str) -> Path:
        arguments = arguments or ("--codec", "int8", "--n-recent", "16")
        if arguments not in models:
            path = folder / f"{len(models)}.gguf"
            model = str(tiny_model("llama"))
            _check(CliRunner().invoke(main, [model, "--bases", str(calibration), "-o", str(path), *arguments]))
            models[arguments] = path
        return models[arguments]

    return make


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """program("runtime.chat", "-m", path, stdin=…): runs it as a user would, in a new process."""

    def run(module: str, *arguments: Any, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1", **env},
        )

    return run
