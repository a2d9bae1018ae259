"""The wheel of `cmake/build_wheels.py --platform windows --dependencies --python 3.13`, installed by pip in wine.

SUBKV_WHEELS=DIR pytest tests/windows/test_wheel.py
Debian's packages: wine64 and g++-mingw-w64-x86-64-posix; package pefile. CPython for Windows comes from the index.
"""

from __future__ import annotations

import ensurepip
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import wine

pytest.importorskip("pefile")

FOLDER = os.environ.get("SUBKV_WHEELS")
WHEELS = [*Path(FOLDER).resolve().glob("subkv-*-win_amd64.whl")] if FOLDER else []
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="wheels: SUBKV_WHEELS names no folder with a wheel for Windows"),
    pytest.mark.skipif(shutil.which("wine") is None, reason="needs wine"),
    pytest.mark.skipif(shutil.which("x86_64-w64-mingw32-gcc-posix") is None, reason="needs MinGW-w64"),
]
SYSTEM = {"KERNEL32.dll", "msvcrt.dll", "ADVAPI32.dll", "WS2_32.dll", "SHELL32.dll", "USER32.dll", "CRYPT32.dll"}
"""What every Windows has."""
PYTHON, SUBKV = Path("python/python.exe"), Path("python/Scripts/subkv.exe")
QUESTION = ("-p", "What is the capital of France?", "--single-turn", "--temp", "0", "-n", "16")
DEMO = "import runtime.demo; print(runtime.demo.model_path())"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Windows' Python, into which pip installed the wheel, without compiler and index."""
    home = tmp_path_factory.mktemp("windows")
    python = wine.make_python(home)
    (pip,) = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")
    install = ("install", "--no-index", "--no-warn-script-location", "--find-links", f"Z:{WHEELS[0].parent}")
    _run(home, home / PYTHON, "-m", "pip", *install, "subkv[demo]", paths=[pip])
    wine.mend_numpy(python, python / "Lib" / "site-packages")
    return home


def _run(home: Path, *command: str | Path, code: int = 0, paths: Sequence[Path] = ()) -> str:
    """Output of a program in wine."""
    with wine.start(home, *command, paths=paths) as started:
        try:
            output = started.communicate(timeout=600)[0].decode()
        except subprocess.TimeoutExpired:
            started.kill()
            raise
    assert started.returncode == code, output
    return output


def test_chat(home: Path) -> None:
    """With the program that pip installed, on the demo model, which the package converts first."""
    answer = _run(home, home / SUBKV, "chat", *QUESTION)
    assert "Étoile" in answer and "KV cache: subkv" in answer  # as on Linux


def test_doctor(home: Path) -> None:
    found = json.loads(_run(home, home / SUBKV, "doctor", "-o", "json"))
    assert found["broken"] == []
    assert found["backends"] == ["CPU"] and found["processor"]["kernel"] != "ref"


def test_pictures(home: Path) -> None:
    """llama_cpp uses the libmtmd of the wheel."""
    program = "import subkv.native.library as l; l.load(); import llama_cpp.mtmd_cpp as m; print(m._libmtmd._name)"
    name = _run(home, home / PYTHON, "-c", program).strip()
    assert name.endswith("\\subkv\\lib\\libmtmd.dll"), name


def test_mistake(home: Path) -> None:
    answer = _run(home, home / SUBKV, "chat", "-m", "none.gguf", *QUESTION, code=1)
    assert re.fullmatch(r".*expected.*found.*none\.gguf\s*", answer), answer


def test_llama_server(home: Path) -> None:
    """llama.cpp's server, on a coded cache, with bases that the package derives for the demo model."""
    model = _run(home, home / PYTHON, "-c", DEMO).strip()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ("run", "llama-server", "-m", model, "-c", "1024", "--port", str(port), "--temp", "0")
    question = json.dumps({"prompt": "The capital of France is", "n_predict": 4, "temperature": 0}).encode()
    with wine.start(home, home / SUBKV, *server) as started:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and started.poll() is None:
                try:
                    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", question)
                    with urllib.request.urlopen(request, timeout=60) as response:
                        answer = json.loads(response.read())["content"]
                    break
                except OSError:
                    time.sleep(0.5)
            else:
                pytest.fail("the server did not answer")
        finally:
            subprocess.run(["wineserver", "-k"], env=os.environ | {"WINEPREFIX": str(home / "wine")}, check=False)
            output = started.communicate(timeout=60)[0].decode()
    assert "Paris" in answer
    assert "subkv: coded K/V cache" in output


def test_every_library_is_in_the_wheel(tmp_path: Path) -> None:
    """Every dependency of a library or program is in the same folder or part of Windows."""
    with zipfile.ZipFile(WHEELS[0]) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "subkv" / "lib"
    files = [*folder.glob("*.dll"), *folder.glob("*.exe")]
    names = {path.name for path in files}
    assert {"libsubkv.dll", "libllama.dll", "ggml-cpu-haswell.dll", "llama-server.exe"} <= names
    for path in files:
        imported = set(wine.imports(path))
        assert imported <= names | SYSTEM, (path.name, imported - names - SYSTEM)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]


def test_licences() -> None:
    with zipfile.ZipFile(WHEELS[0]) as archive:
        licences = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/licenses/" in name}
    assert {"LICENSE", "THIRD_PARTY.md", "libgomp.txt", "libwinpthread.txt"} <= licences
