"""research/gpu/decide.py on the emulated GPU: no step's failure takes the results of others, and the table is last."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "research" / "gpu" / "decide.py"
F16 = "f16 (torch)"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@pytest.fixture(scope="module")
def decide(loaded: Callable[[str], Any]) -> Any:
    return loaded("decide")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version that works."""
    folder = tmp_path_factory.mktemp("decide")
    command = [sys.executable, SCRIPT, "--built", folder, "build", "now=.", "--arch", "emulated"]
    subprocess.run([str(word) for word in command], check=True)
    return folder


def command(built: Path, output: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--built", str(built), "run", "--dry", "-o", str(output), *options]


@pytest.mark.slow
def test_other_versions_and_steps_go_on(
    decide: Any, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    versions = tmp_path / "versions"
    for name in ("broken", "now", "silent"):
        shutil.copytree(built / "now", versions / name)
    (versions / "broken" / "libnative.so").write_text("no library")
    (versions / "silent" / "research/gpu/gpu_ops.py").write_text("import time\n\nprint(1)\ntime.sleep(1000)\n")
    bench = tmp_path / "llama-bench"
    row = {"type_k": "f16", "type_v": "f16", "samples_ts": [4.0, 6.0]}
    bench.write_text(
        f"#!/bin/sh\nwhile [ $1 != -ctk ]; do shift; done\necho loading\necho '{json.dumps(row)}'\n"
        "test $2 = f16 || exit 5\n"
    )
    bench.chmod(0o755)
    monkeypatch.setattr(decide, "START", 30.0)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    run = decide.Run(versions, tmp_path / "out", 300.0, True)
    try:
        run.all(tmp_path / "model.gguf", tmp_path)
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    results = json.loads((tmp_path / "out/decide.json").read_text())
    assert results == [
        dict(step, **({"shape": list(step["shape"])} if "shape" in step else {})) for step in run.results
    ]
    timed = {(step["version"], *step["shape"]) for step in results if step.get("us") and "shape" in step}
    assert timed == {(name, *shape) for name in ("now", F16) for shape in decide.DRY_SHAPES}
    assert {step["rows"] for step in results if "rows" in step and step.get("us")} == {1, 128}
    assert {step["tokens"] for step in results if "tokens" in step and step.get("us")} == {2, 8}
    tests = {step["version"]: step for step in results if step.get("step") == "tests"}
    assert tests["now"]["status"] == 0 and "1 passed" in tests["now"]["output"]
    assert tests["broken"]["status"] != 0
    in_ram = {step["version"]: (step["status"], step["tokens_per_s"]) for step in results if "in_ram" in step}
    assert in_ram == {"f16": (0, [4.0, 6.0]), "subkv": (5, [4.0, 6.0])}
    table = capfd.readouterr().out.split("}\n")[-1]
    for text in ("1 x 1, 1024 cells, us", "encode 128, us", "cache in RAM, 1024 cells, tokens/s f16 5.0 (1.00)"):
        assert text in table
    for text in ("silent: no answer in 30 s", "broken: OSError", "broken step tests: status", "in_ram 1024: status 5"):
        assert text in table


@pytest.mark.slow
def test_told_to_end_it_prints_the_table(built: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(command(built, tmp_path), stdout=subprocess.PIPE, text=True)
    assert child.stdout
    for line in child.stdout:
        if '"us"' in line:
            break
    child.terminate()
    rest = child.stdout.read()
    assert child.wait(30) == 0
    assert "1 x 1, 1024 cells, us    now" in rest and "run: ended by a signal" in rest
    assert json.loads((tmp_path / "decide.json").read_text())


def test_without_time_it_ends_with_a_table(built: Path, tmp_path: Path) -> None:
    done = subprocess.run(command(built, tmp_path, "--seconds", "0"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "run step cache in RAM: no -m MODEL" in done.stdout


def test_no_versions_are_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, tmp_path), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{tmp_path}: expected kernels of a version, found none; `decide.py build NAME=COMMIT` compiles them"
    ]


def test_table_of_odd_numbers(decide: Any) -> None:
    """No number stops the table, and outputs that differ are said."""
    shape = (1, 2048)
    steps: list[dict[str, Any]] = [{"version": F16, "shape": shape, "us": [0.0]}]
    for name, total in (("a", 1.0), ("b", 2.0)):
        steps += [
            {"version": name, "shape": shape, "prepared": {"sum": total, "size": 1.0}},
            {"version": name, "shape": shape, "us": [-1.0, 3.0]},
        ]
    assert decide.table(steps).splitlines() == [
        "outputs differ at (1, 2048): {'a': 1.0, 'b': 2.0}",
        "1 x 1, 2048 cells, us    f16 (torch) 0.0 · a 1.0 · b 1.0",
    ]
    assert decide.table([]) == ""
