"""The wheels of `cmake/build_wheels.py --dependencies`, installed where there is neither compiler nor network.

SUBKV_WHEELS=DIR pytest tests/python/test_wheels.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = os.environ.get("SUBKV_WHEELS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="wheels: SUBKV_WHEELS names no folder of wheels to install"),
]
VARIANT = """
import subkv.native.library as library
library.load()
from llama_cpp import llama_cpp
llama_cpp.llama_backend_init()
print([line.split()[-1] for line in open("/proc/self/maps") if "/libggml-cpu" in line][-1])
"""


def _run(*command: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds no compiler, no other package and no library of this build."""
    env = {"PATH": str(home / "venv" / "bin"), "HOME": str(home), "LANG": "C.UTF-8"}
    done = subprocess.run([*map(str, command)], env=env, cwd=home, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    pip = home / "venv" / "bin" / "pip"
    _run(pip, "install", "--no-index", "--find-links", Path(str(FOLDER)).resolve(), "subkv[demo]", home=home)
    return home


def test_chat(home: Path) -> None:
    command = ("subkv", "chat", "-p", "What is the capital of France?", "--single-turn", "--temp", "0", "-n", "16")
    chat = _run(home / "venv" / "bin" / command[0], *command[1:], home=home)
    assert chat.stdout.strip()


def test_best_variant(home: Path) -> None:
    """Python is far from the libraries, and the current folder has a file of a backend's name."""
    (home / "libggml-cpu-here.so").write_text("no library")
    taken = Path(_run(home / "venv" / "bin" / "python", "-c", VARIANT, home=home).stdout.strip())
    assert taken.parent.name == "lib" and taken.parent.parent.name == "subkv"
    scores = {}
    for file in taken.parent.glob("libggml-cpu-*.so"):
        scores[file.name] = ctypes.CDLL(str(file)).ggml_backend_score()
    assert scores[taken.name] == max(scores.values()) > 0


def test_llama_server(home: Path) -> None:
    assert "version" in _run(home / "venv" / "bin" / "subkv", "run", "llama-server", "--version", home=home).stderr


def test_bindings_are_of_every_platform() -> None:
    (wheel,) = Path(str(FOLDER)).glob("llama_cpp_python-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith((".so", ".dylib", ".dll", ".a"))]
    assert any(name.endswith("licenses/LICENSE.md") for name in names)
