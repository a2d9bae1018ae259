"""Lint as tests, so that one command tests everything. The tools and their versions are in the extra `test`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from compiled import CACHE

REPO = Path(__file__).resolve().parent.parent
NUMPY = tuple(int(part) for part in version("numpy").split(".")[:2])
CPP_FOLDERS = ("examples", "research", "runtime/native", "kernels", "tests")
CPP_ENDINGS = ("*.h", "*.c", "*.cpp", "*.cu", "*.cuh")
CPP = sorted(p for d in CPP_FOLDERS for e in CPP_ENDINGS for p in (REPO / d).rglob(e))


def tool(name: str) -> str:
    """The tool of this environment, not another one on the PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    assert found, f"{name}: expected in {sysconfig.get_path('scripts')}, found none; pip install '.[test]'"
    return found


@pytest.mark.parametrize(
    "command",
    [["ruff", "check"], ["ruff", "format", "--check"], ["mypy", "--no-error-summary"]],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_python(command: list[str], tmp_path: Path) -> None:
    if command[0] == "mypy" and NUMPY < (2, 4):
        pytest.skip(f"mypy: the types of numpy {version('numpy')} differ from those the code is checked with (2.4)")
    env_python = ["--python-executable", sys.executable] if command[0] == "mypy" else []
    folder = CACHE / "mypy" if command[0] == "mypy" else tmp_path
    cache = ["--cache-dir", str(folder)]
    done = subprocess.run(
        [tool(command[0]), *command[1:], *env_python, *cache], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports() -> None:
    """The contracts of pyproject.toml: layers, packages, research apart, no PyTorch in programs, no circle."""
    paths = os.pathsep.join(str(REPO / folder) for folder in ("python", "", "kernels/triton"))
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [tool("lint-imports"), "--no-cache"], cwd=REPO, capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cpp() -> None:
    assert CPP
    done = subprocess.run(
        [tool("clang-format"), "--dry-run", "-Werror", *map(str, CPP)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]


def test_cpp_nodes() -> None:
    """Custom nodes are made in one place, so that no exception passes through ggml (node_work.h)."""
    native = REPO / "runtime/native"
    makers = {
        p.relative_to(native).as_posix() for p in CPP if native in p.parents and "ggml_custom_4d(" in p.read_text()
    }
    assert makers == {"engine/node_sources.h", "plugin/abi.cpp"}  # the latter computes nothing
    for path in (p for p in CPP if native in p.parents):
        found = re.findall(r"\bggml_(?:map_custom\w*|custom_inplace)\(", path.read_text("utf-8"))
        assert not found or path.name == "node_sources.h", path


def test_cpp_numbers() -> None:
    """Fractions are written and read by base/numbers.h, in the C locale."""
    fraction = re.compile(r"%[-+ #0-9.*]*[lL]?[aefgAEFG]\b|\b(?:strto[fd]|strtold|sto[fd]|stold|atof)\(")
    for path in (p for p in CPP if REPO / "runtime/native" in p.parents):
        for line in path.read_text("utf-8").splitlines():
            code = line.split("//")[0]
            assert not fraction.search(code), f"{path}: {line}"


def test_cpp_includes_by_path() -> None:
    """Headers named by a relative path exist: most machines do not compile the backends of GPUs."""
    for path in CPP:
        for name in re.findall(r'#include "(\.\.?/[\w./-]+)"', path.read_text("utf-8")):
            assert (path.parent / name).is_file(), f"{path.relative_to(REPO)}: {name}"
