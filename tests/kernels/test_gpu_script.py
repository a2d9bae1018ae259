"""kernels/bench/gpu.py: what it keeps when a step fails, what it says without a GPU. Its steps have their own tests."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "bench" / "gpu.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_are_kept_when_a_step_fails(script: Any, tmp_path: Path) -> None:
    def fail() -> Any:
        raise ValueError("no memory")

    report = script.Report(tmp_path / "out.json")
    report.run("first", lambda: ("fine", {"gbs": 3.5}))
    report.run("second", fail)
    kept = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert [(s["step"], s["result"]) for s in kept] == [("first", "fine"), ("second", "FAILED: ValueError: no memory")]
    assert kept[0]["gbs"] == 3.5
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_without_a_gpu_it_says_what_was_skipped(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run_tests(file: str, ref: Path, only: str = "") -> tuple[str, dict[str, Any]]:
        ran.append((file, only, ref.exists()))
        return "1 passed", {}

    monkeypatch.setattr(script, "gpu", lambda: None)
    monkeypatch.setattr(script.c, "nvcc", lambda: None)
    monkeypatch.setattr(script, "missing", lambda name: f"skipped: no package {name}")
    monkeypatch.setattr(script, "run_tests", run_tests)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "-o", str(tmp_path / "out.json")])
    assert script.main() == 0
    assert ran == [("test_cuda.py", "emulated", True)]
    out = capsys.readouterr().out
    for text in (
        "none that PyTorch sees",
        "CUDA's kernels run on the CPU only",
        "skipped: no package torch",
        "skipped: no GPU",
    ):
        assert text in out


def test_cells_that_no_workload_has_are_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--cells", "1000"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--cells: a positive multiple of 1024 expected, 1000 found" in done.stderr
