"""The wheels of `cmake/build_wheels.py --dependencies`, and of `--plugin` if there are any, installed without compiler
and network.

SUBKV_WHEELS=DIR pytest tests/python/test_wheels.py
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
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
WHEEL = f"subkv-*_{platform.machine()}.whl"
FORKED = Path(__file__).with_name("forked.py")
DEMO = "import runtime.demo; print(runtime.demo.model_path())"
VARIANT = """
import subkv.native.library as library
library.load()
from llama_cpp import llama_cpp
llama_cpp.llama_backend_init()
print([line.split()[-1] for line in open("/proc/self/maps") if "/libggml-cpu" in line][-1])
"""


def _run(*command: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program without access to a compiler, other packages or libraries of this build."""
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


def test_doctor(home: Path) -> None:
    found = json.loads(_run(home / "venv" / "bin" / "subkv", "doctor", "-o", "json", home=home).stdout)
    assert "CPU" in found["backends"]


def test_llama_server(home: Path) -> None:
    assert "version" in _run(home / "venv" / "bin" / "subkv", "run", "llama-server", "--version", home=home).stderr


def test_fork(home: Path) -> None:
    """ggml's CPU backend is loaded with a model, and its OpenMP library has a unique name."""
    model = _run(home / "venv" / "bin" / "python", "-c", DEMO, home=home).stdout.strip()
    forked = _run(home / "venv" / "bin" / "python", FORKED, model, "subkv", home=home)
    assert (forked.stdout, forked.stderr) == ("done\n", "")


def test_glibc() -> None:
    """The libraries need at most the glibc version in the wheel's name, which systems of 2021 have."""
    (wheel,) = Path(str(FOLDER)).glob(WHEEL)
    found = re.fullmatch(r"subkv-.*-py3-none-manylinux_2_(\d+)_\w+\.whl", wheel.name)
    assert found and int(found[1]) <= 34, wheel.name


def test_the_plugin_alone(tmp_path: Path) -> None:
    """Of subkv-plugin: in an environment without subkv and llama_cpp, with kernels of every processor."""
    wheels = list(Path(str(FOLDER)).glob(f"subkv_plugin-*_{platform.machine()}.whl"))
    if not wheels:
        pytest.skip("subkv-plugin: not built (build_wheels.py --plugin)")
    (wheel,) = wheels
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    found = ("--no-index", "--find-links", Path(str(FOLDER)).resolve())
    _run(programs / "pip", "install", *found, "subkv-plugin", home=tmp_path)
    report = json.loads(_run(programs / "subkv-plugin", "doctor", "-o", "json", home=tmp_path).stdout)
    assert {Path(name).stem for name in report["libraries"]["files"]} == {"libsubkv", "libggml-base", "libggml-subkv"}
    minor = re.search(r"manylinux_2_(\d+)_", wheel.name)
    assert minor and int(minor[1]) <= 34 and wheel.stat().st_size < 5 << 20


def test_licences() -> None:
    """Every library that auditwheel took in has its licence in the wheel; drivers' loaders are not taken."""
    (wheel,) = Path(str(FOLDER)).glob(WHEEL)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    taken = {name.split("/")[1].split("-")[0] for name in names if re.match(r"subkv\.libs/.", name)}
    assert taken <= {"libgomp"}
    licences = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    assert {"LICENSE", "THIRD_PARTY.md", *(f"{name}.txt" for name in taken)} <= licences


def test_bindings_are_of_every_platform() -> None:
    (wheel,) = Path(str(FOLDER)).glob("llama_cpp_python-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.endswith((".so", ".dylib", ".dll", ".a"))]
    assert any(name.endswith("licenses/LICENSE.md") for name in names)
