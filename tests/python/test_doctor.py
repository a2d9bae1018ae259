"""`subkv doctor`: its report of the machine, the problems it finds, and the files it removes from the cache folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from refused import homeless

from runtime import cli
from runtime.doctor import cache_folder, report
from subkv.base.errors import SubkvError
from subkv.base.folders import expanded
from subkv.base.locks import exclusive
from subkv.base.version import __version__
from subkv.native.library import lib_dir

REPO = Path(__file__).resolve().parents[2]
MODEL, OTHER = "7123456789ab", "ba9876543210"
FILES = {
    f"sidecars/name-{MODEL}.gguf": "bases",
    f"sidecars/name-{MODEL}.weights.gguf": "bases from weights",
    f"sidecars/{MODEL}.1a2b3c4d.calib.safetensors": "calibrations",
    f"sidecars/{MODEL}.1a2b3c4d.calib.safetensors.000001-of-000009.part": "interrupted work",
    f"sidecars/{MODEL}.1a2b3c4d.calib.safetensors.128.sensing.npz": "interrupted work",
    f"sidecars/name-{OTHER}.gguf": "bases",
    f"sidecars/.name-{OTHER}.gguf.17.0123abcd.tmp": "interrupted work",
    "smollm2-135m-instruct-0123456789abcdef.subkv.gguf": "models",
    "check-0123456789abcdef.json": "checks",
    "llama_cpp_python-0.3.36.tar.gz": "sources",
}


def run(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(cli.main, ["doctor", *arguments], prog_name="subkv", **more)


def run_doctor(*arguments: str, **variables: str | None) -> subprocess.CompletedProcess[str]:
    """Runs it in a new process, because libraries are loaded only once."""
    env = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "runtime.doctor", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def filled(cache_home: Path) -> Path:
    folder = cache_home / "subkv"
    old = time.time() - 2 * 3600
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        os.utime(path, (old, old))
    (folder / "notes.txt").write_text("of the user")
    (folder / f"sidecars/{MODEL}.lock").write_text("")
    return folder


def test_report_is_complete() -> None:
    done = run_doctor("-o", "json", SUBKV_KERNEL=None)
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["broken"]
    assert found["versions"]["subkv"] == __version__
    assert found["versions"]["llama-cpp-python"] == importlib.metadata.version("llama-cpp-python") == report.pinned()
    assert re.fullmatch("[0-9a-f]{9}", found["versions"]["llama.cpp"])
    assert f"libsubkv{report.SUFFIX}" in found["libraries"]["files"]
    assert found["processor"]["kernel"] == found["processor"]["kernels"][-1]
    assert found["processor"]["kernels"][0] == "ref"
    assert "CPU" in found["backends"]
    assert all(device["kind"] != "cpu" for device in found["devices"])
    assert found["memory"]["bytes_available"] > 0
    assert found["formats"]["model"]["reads"] == [4, 5]
    text = run_doctor(SUBKV_KERNEL=None)
    assert text.returncode == 0 and text.stdout.endswith("all is well\n")
    for value in (__version__, found["versions"]["llama.cpp"], found["processor"]["name"]):
        assert value in text.stdout


def test_the_commit_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build writes it; without it, and without a repository in pip's notes, it is unknown."""
    monkeypatch.setattr("runtime.doctor.report.REPO", tmp_path)
    monkeypatch.setattr("runtime.doctor.report.package_folders", lambda name: [tmp_path / name])
    monkeypatch.setattr(importlib.metadata.Distribution, "read_text", lambda *_: '{"dir_info": {}}')
    assert report.report()[0]["versions"]["commit"] is None
    (tmp_path / "commit.txt").write_text("0123abcde-dirty\n")
    assert report.report()[0]["versions"]["commit"] == "0123abcde-dirty"


def test_an_unknown_kernel_is_broken() -> None:
    done = run_doctor(SUBKV_KERNEL="fast")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2] == "broken"
    assert re.fullmatch(
        r"  SUBKV_KERNEL: expected one of ref\b.* on this processor, found 'fast'", done.stdout.splitlines()[-1]
    )
    assert "\n  kernel              none; also runs ref" in done.stdout


def test_missing_libraries_are_broken_once(tmp_path: Path) -> None:
    done = run_doctor("-o", "json", SUBKV_LIB_PATH=str(tmp_path), LLAMA_CPP_LIB_PATH=None)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert len(found["broken"]) == 1 and found["broken"][0].startswith("SUBKV_LIB_PATH: expected libsubkv")
    assert found["libraries"] == {"folder": None, "files": [], "programs": []}
    assert found["versions"]["llama.cpp"] is None


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_one_missing_library_is_named(tmp_path: Path) -> None:
    for path in lib_dir().iterdir():
        if not path.name.startswith("libllama."):
            (tmp_path / path.name).symlink_to(path)
    done = run_doctor("-o", "json", SUBKV_LIB_PATH=str(tmp_path), LLAMA_CPP_LIB_PATH=None)
    assert done.returncode == 1
    broken = json.loads(done.stdout)["broken"]
    assert f"libllama{report.SUFFIX}: expected it in {tmp_path}, found none; install subkv again" in broken


def test_libraries_that_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **more: real([sys.executable, "-c", script], **more))
    from runtime.doctor.probe import probe

    assert probe() == {
        "error": "libraries: expected them to load, found that the process was ended by SIGILL; "
        "they were built for another processor"
    }


def test_another_version_of_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "pinned", lambda: "0.0.1")
    found, broken = report.report()
    version = found["versions"]["llama-cpp-python"]
    assert f"llama-cpp-python: expected 0.0.1, found {version}; pip install llama-cpp-python==0.0.1" in broken


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _, broken = report.report()
    assert broken == [f"XDG_CACHE_HOME: cannot write to {tmp_path / 'file'}: Not a directory"]


def test_a_cache_folder_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1 << 19))
    _, broken = report.report()
    assert len(broken) == 1
    assert broken[0].startswith("XDG_CACHE_HOME: expected 16 MiB of free space for bases, found 0.5 MiB in ")


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    homeless(monkeypatch)
    found, broken = report.report()
    assert broken == ["XDG_CACHE_HOME: expected an absolute path, as there is no home folder, found nothing"]
    assert found["cache"]["folder"] is None
    result = CliRunner().invoke(cli.main, ["doctor", "--clear-cache", "-y"])
    assert (result.exit_code, result.stderr) == (1, f"{broken[0]}\n")
    for path in ("~/x", "~nobody-here/x"):
        with pytest.raises(SubkvError) as error:
            expanded(path, "prompt_cache")
        assert str(error.value) == f"prompt_cache: expected a path, as there is no home folder for ~, found {path}"


def test_variables_of_the_pages_are_known() -> None:
    pages = "".join((REPO / "docs" / name).read_text("utf-8") for name in ("programs.md", "plugin.md", "limits.md"))
    rows = re.findall(r"^\| (`SUBKV.*?) \|", pages, re.M)
    named = {name for row in rows for name in re.findall(r"`(SUBKV\w*)`", row)}
    assert {"SUBKV", "SUBKV_RESUME", "SUBKV_SEQUENCES", "SUBKV_KERNEL"} <= named <= report.OURS


def test_nothing_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SUBKV_STORE", str(tmp_path / "prompts"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LLAMA_API_KEY", "sk-secret")
    monkeypatch.setenv("SUBKV_STROE", "x")
    monkeypatch.setenv("UNRELATED", "y")
    found = report.environment()
    assert (found["HF_TOKEN"], found["LLAMA_API_KEY"]) == ("(set)", "(set)")
    assert found["SUBKV_STROE"] == "x  (unknown to this version)"
    assert "UNRELATED" not in found
    assert report.hide_home(found["SUBKV_STORE"]) == "~/prompts"
    assert report.hide_home(f"{tmp_path}x {tmp_path}:{tmp_path}/a") == f"{tmp_path}x ~:~/a"


def test_kinds_of_cached_files(filled: Path) -> None:
    assert {file.path.relative_to(filled).as_posix(): file.kind for file in cache_folder.cached(filled)} == FILES
    found, _ = report.report()
    assert found["cache"]["kinds"]["bases"] == {"files": 2, "bytes": 2000, "about": cache_folder.KINDS["bases"][0]}


def test_clear_asks_first(filled: Path) -> None:
    done = run("--clear-cache", input="n\n")
    assert done.exit_code == 1
    assert all(name in done.stdout for name in FILES)
    assert len(cache_folder.cached(filled)) == len(FILES)
    assert run("-y").exit_code == 2


def test_clear_removes_files_of_ours_alone(filled: Path) -> None:
    done = run("--clear-cache", "-y")
    assert done.exit_code == 0, done.output
    assert f"removed {len(FILES)} files" in done.stdout
    assert cache_folder.cached(filled) == []
    assert (filled / "notes.txt").read_text() == "of the user"
    assert run("--clear-cache", "-y").stdout.startswith("nothing to remove in ")


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_clear_keeps_files_in_use(filled: Path) -> None:
    writing = filled / f"sidecars/.name-{OTHER}.gguf.18.0123abcd.tmp"
    writing.write_bytes(b"half")
    with exclusive(filled / f"sidecars/{MODEL}.lock", "prepare it"):
        done = run("--clear-cache", "-y")
    left = {file.path.name for file in cache_folder.cached(filled)}
    assert left == {Path(name).name for name in FILES if MODEL in name} | {writing.name}
    assert f"process {os.getpid()} is doing that now" in done.stderr
    assert f"{writing.name}: kept: it may still be written" in done.stderr
