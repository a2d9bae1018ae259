"""research/gpu/gpu.py: results after a failed step, messages without a GPU, and the parts for whole models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "research" / "gpu" / "gpu.py"


@pytest.fixture(scope="module")
def script(loaded: Callable[[str], Any]) -> Any:
    return loaded("gpu")


def test_results_are_kept_when_a_step_fails(script: Any, tmp_path: Path) -> None:
    def fail() -> Any:
        raise ValueError("no memory")

    report = script.Report(tmp_path / "out.json")
    report.run("first", lambda: ("fine", {"gbs": 3.5}))
    report.run("second", fail)
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert [(s["step"], s["result"]) for s in steps] == [("first", "fine"), ("second", "FAILED: ValueError: no memory")]
    assert steps[0]["gbs"] == 3.5
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_without_a_gpu_skipped_steps_are_listed(
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
        "skipped: no package gguf",
    ):
        assert text in out


def test_missing_vulkan_packages_are_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    monkeypatch.setattr(script.v, "missing", lambda: "no glslc: shaders are not compiled")
    monkeypatch.setattr(script, "run_tests", lambda file, ref: (ran.append(file), ("3 skipped", {}))[1])
    options = ["-o", str(tmp_path / "out.json"), "--steps", "tests,ops"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--backend", "vulkan", *options])
    assert script.main() == 0
    assert ran == ["test_vulkan.py"]
    assert "skipped: no glslc: shaders are not compiled" in capsys.readouterr().out


def test_cells_that_no_workload_has_are_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--cells", "1000"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--cells: positive multiples of 1024 expected, 1000 found" in done.stderr


def test_a_part_that_crashes_or_hangs_keeps_its_results(script: Any, tmp_path: Path) -> None:
    report = script.Report(tmp_path / "out.json")
    printed = "import json, os, time; print(json.dumps({'step': 'a', 'result': 'fine', 'ms': 2}), flush=True); "
    report.follow("crash", [sys.executable, "-c", printed + "print('why', flush=True); os.abort()"], 60)
    report.follow("hang", [sys.executable, "-c", printed + "time.sleep(600)"], 2)
    assert [(s["step"], s["result"]) for s in report.steps] == [
        ("a", "fine"),
        ("crash", "FAILED: exit status -6: why"),
        ("a", "fine"),
        ("hang", "FAILED: stopped after 2 s: "),
    ]
    assert report.steps[0]["ms"] == 2


def test_times_of_ops_are_ratios_to_the_baseline(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ops = sys.modules["gpu_ops"]
    work = SimpleNamespace(bytes=4 * 10**6, n_tps=1)
    times = {ops.BASELINE: [2.0, 3.0, 4.0], "CUDA attend_decode": [1.5, 1.0, 1.0], "Triton attend": "FAILED: why"}
    ops.report(times, "a shape", work, 8.0)
    base, cuda, triton = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (base["step"], base["ms"]) == (f"{ops.BASELINE}: a shape", 3.0)
    assert cuda["result"] == "1000 us, 4 GB/s of codes, 50% of the copy, 3.00 times the speed of torch SDPA f16"
    assert (cuda["gbs"], cuda["speed_of_sdpa"], cuda["samples_ms"]) == (4.0, 3.0, [1.5, 1.0, 1.0])
    assert triton["result"] == "FAILED: why"


@pytest.fixture
def small(script: Any, tmp_path: Path) -> tuple[Path, Path]:
    """A small model and its bases, built like the script's."""
    import gpu_models

    try:
        gpu_models.engine_folder()
    except ImportError as error:
        pytest.skip(f"native engine: {error}")

    shape = {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_head_kv": 1, "head_size": 128, "n_ff": 256}
    model, bases = gpu_models.make_model(tmp_path, **shape)
    return model, bases


def test_longest_contexts_are_those_that_fit(small: tuple[Path, Path]) -> None:
    import gpu_models

    budget = 64 << 20
    by_cache = dict(gpu_models.contexts(*small, budget))
    assert list(by_cache) == ["f16", "q8_0", "q4_0", "subkv"]
    lengths = [sizes.pop("n_ctx") for sizes in by_cache.values()]
    assert lengths[0] < lengths[1] < lengths[2]
    for n_ctx, sizes in zip(lengths, by_cache.values(), strict=True):
        assert n_ctx % 1024 == 0
        assert sum(sizes.values()) <= budget < sum(sizes.values()) * (n_ctx + 1024) / n_ctx  # 1024 more do not fit
    assert by_cache["f16"]["cells"] == lengths[0] * 2 * 2 * 128 * 2
    assert by_cache["subkv"]["cells"] == lengths[3] * 2 * (71 + 67)  # bytes of gpu_ops.BANDS, scales and all
    assert by_cache["subkv"]["bases"] > 0
    assert by_cache["subkv"]["exact window"] > 0
    assert next(gpu_models.contexts(*small, 1000)) == ("f16", {"n_ctx": 0, "weights": small[0].stat().st_size})


def test_whole_models_are_timed(small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_models

    gpu_models.bench(*small, depth=64, repetitions=1, n_gpu_layers=0, n_gen=2)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tests = ("pp512 @ d64", "tg2 @ d64")
    steps = [f"whole model, {test}: {cache}" for test in tests for cache in ("f16", "q8_0", "subkv")]
    assert [one["step"] for one in printed] == steps
    assert "times the best ordinary cache" in printed[-1]["result"]
    assert printed[-1]["kv_bytes_per_token"] == 2 * (71 + 67)
    with pytest.raises(RuntimeError, match="--bases: expected subkv"):
        gpu_models.bench(small[0], small[0], 64, 1, 0)
