"""No exported function ends the process: not for NULL, any number, or without memory. Each says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported
import pytest
from compiled import preloaded

from subkv.native.paths import SUFFIX, lib_dir

HERE = Path(__file__).resolve().parent
INTERNAL = {"subkv_connect"}  # for libllama, looked up by name: no handle
# succeed with NULL for every pointer and 0 for every number
SUCCEED = {
    "subkv_last_error",
    "subkv_last_error_parts",
    "subkv_kernel_name",
    "subkv_device_kernel_name",
    "subkv_constants",
    "subkv_available_memory",
    "subkv_layout_free",
    "subkv_bases_free",
    "subkv_sidecar_folder",
    "subkv_attach",  # cancels
    "subkv_attach_ordinary",
    "subkv_observer_new",
    "subkv_observer_free",
    "subkv_store_close",
    "subkv_store_found_free",
    "subkv_ops_count",
    "subkv_ops_name",
    "subkv_ops_table",
    "subkv_adapt_free",
    "subkv_sketch_free",
}


def called(model: Path, folder: Path, allocation: int = 0) -> list[dict[str, Any]]:
    """The lines of exported.py after its calls."""
    folder.mkdir()
    paths = [str(HERE), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if allocation:
        environment["LD_PRELOAD"] = preloaded(HERE / "failing_new.cpp", folder)
    done = subprocess.run(
        [sys.executable, str(HERE / "exported.py"), str(model), str(folder), str(allocation)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if "name" in line]


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("nm"), reason="nm")
def test_the_headers_declare_every_exported_function() -> None:
    library = lib_dir() / f"libsubkv{SUFFIX}"
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    declared = [function.name for function in exported.functions()]
    assert {name for name in names if name.startswith("subkv_")} == {*declared, *INTERNAL}
    assert len(declared) == len({*declared}) > 60


def test_null_and_any_number(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    lines = called(tiny_model("llama"), tmp_path / "own")
    nothing = [line for line in lines if not line["valid"]]
    assert {line["name"] for line in nothing} == {function.name for function in exported.functions()}
    for line in nothing:
        if line["number"] == 0:
            assert bool(line["error"]) != (line["name"] in SUCCEED), line
        elif line["name"] not in SUCCEED:
            assert line["error"], line
    assert len([line for line in lines if line["valid"]]) > 100
    for line in lines:
        assert line["error"].isprintable(), line


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer's allocations come first")
@pytest.mark.parametrize("allocation", [1, 2, 4])
def test_no_exception_leaves(allocation: int, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    lines = called(tiny_model("llama"), tmp_path / "own", allocation)
    for line in lines:
        if not line["valid"] and line["name"] not in SUCCEED:
            assert line["error"], line
    out_of_memory = {line["name"] for line in lines if "out of memory" in line["error"]}
    assert allocation > 1 or len(out_of_memory) > 40, out_of_memory
