"""The wheel of subkv-plugin, with the libraries of this build: its files and its commands."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import plugin_wheel
import pytest

from subkv.native.library import lib_dir

LIBRARIES = lib_dir()
STOCK = LIBRARIES / "stock"
MIB = 1 << 20
pytestmark = pytest.mark.skipif(not (LIBRARIES / "libggml-subkv.so").is_file(), reason="the plug-in: not built")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugin_wheel.write(LIBRARIES, tmp_path_factory.mktemp("wheel"), f"linux_{platform.machine()}")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip installs it, beside a llama_cpp that must not be imported."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    (site / "llama_cpp.py").write_text("raise SystemExit('llama_cpp is imported')")
    return site


def run(site: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SUBKV", "LLAMA", "GGML"))}
    command = list(map(str, [sys.executable, site / "bin" / "subkv-plugin", *arguments]))
    env = {**kept, "PYTHONPATH": str(site), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)


def test_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.partition("/")[0] for name in names} == {"subkv_plugin", wheel.name.split("-py3")[0] + ".dist-info"}
    native = {name for name in names if ".so" in name}
    assert native == {f"subkv_plugin/subkv/lib/lib{name}.so" for name in ("subkv", "ggml-base", "ggml-subkv")}
    assert wheel.stat().st_size < 5 * MIB
    assert "Requires-Dist: numpy" in metadata and "llama" not in metadata.replace("llama.cpp", "")


def test_commands_without_a_llama_cpp(site: Path, tiny_model: object) -> None:
    """Loading libsubkv shows that it needs no libllama: there is none beside it."""
    found = json.loads(run(site, "doctor", "-o", "json").stdout)
    assert found["broken"] == [] and found["processor"]["kernel"]
    assert Path(found["libraries"]["folder"]).name == "lib" and "libllama.so" not in found["libraries"]["files"]
    for name in ("convert", "chat", "lab"):
        refused = run(site, name, "model.gguf")
        assert refused.returncode == 2 and f"{name} needs our llama.cpp: pip install subkv" in refused.stderr
    options = ["-m", tiny_model(), "-c", "512"]  # type: ignore[operator]
    refused = run(site, "run", "--kv-memory", "1G", sys.executable, *options)
    assert refused.returncode == 1 and "--kv-memory: expected --kv-bits, because it needs" in refused.stderr
    completed = run(site, _SUBKV_PLUGIN_COMPLETE="bash_complete", COMP_WORDS="subkv-plugin convert ", COMP_CWORD="2")
    assert "Traceback" not in completed.stderr


def test_bases_of_a_model(site: Path, tiny_model: object) -> None:
    """Derived in memory where the cache is made, as by package subkv."""
    from subkv.engine.cache import choose_cache
    from subkv.engine.request import CacheRequest

    model = tiny_model()  # type: ignore[operator]
    printed = run(site, "env", "-m", model, "--format", "json")
    variables = json.loads(printed.stdout)
    assert json.loads(run(site, "env", "--plugin", "-m", model, "--format", "json").stdout) == variables
    assert Path(variables["GGML_BACKEND_PATH"]).is_relative_to(site) and "LD_LIBRARY_PATH" not in variables
    assert variables["SUBKV"] == "auto" and choose_cache(model, CacheRequest("subkv")).derived
    assert "bases: from the weights" in printed.stderr and "subkv convert" in printed.stderr


def test_any_program_gets_the_plugin(site: Path) -> None:
    """One whose llama.cpp is loaded later, as in node; no variable names libraries of ours."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    done = run(site, "run", sys.executable, "-c", show)
    variables = json.loads(done.stdout)
    assert Path(variables["GGML_BACKEND_PATH"]).is_relative_to(site) and variables["SUBKV"] == "auto"
    assert "LLAMA_CPP_LIB_PATH" not in variables and str(site) not in variables.get("LD_LIBRARY_PATH", "")
    assert "gets the plug-in, which the llama.cpp that it loads must be able to load" in done.stderr


@pytest.mark.skipif(not (STOCK / "llama-completion").is_file(), reason="unpatched programs: not built")
def test_an_unpatched_program(site: Path, tiny_model: object) -> None:
    program, model = STOCK / "llama-completion", tiny_model()  # type: ignore[operator]
    path = {"LD_LIBRARY_PATH": str(LIBRARIES)}  # of its ggml
    assert "whose ggml loads the plug-in" in run(site, "doctor", program, **path).stdout
    options = ["-m", model, "-t", 1, "-c", 256, "-n", 4, "-no-cnv", "-p", "a b c"]
    done = run(site, "run", program, *options, **path)
    # not at the beginning of a line: the thread of llama.cpp's log writes a line in pieces
    assert done.returncode == 0 and "subkv: coded K/V cache, " in done.stderr, done.stderr[-2000:]
