"""The wheel of `cmake/build_wheels.py --platform aarch64`, as far as qemu runs it: llama.cpp's programs on our library.

SUBKV_WHEELS=DIR pytest tests/python/test_wheels_aarch64.py
Debian's packages: qemu-user, and g++-aarch64-linux-gnu for the system's libraries.

With SUBKV_ARM64_ROOT=DIR pip installs the wheels (of --dependencies --python 3.11) in a root of Debian 12 for aarch64,
by the user root and with packages qemu-user-static and binfmt-support:
debootstrap --arch=arm64 --variant=minbase --include=python3-venv bookworm DIR
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import calibration, coded_model, text_file

__all__ = ["calibration", "coded_model", "text_file"]

FOLDER, QEMU, SYSTEM = os.environ.get("SUBKV_WHEELS"), shutil.which("qemu-aarch64"), Path("/usr/aarch64-linux-gnu")
WHEELS = [*Path(FOLDER).glob("subkv-*_aarch64.whl")] if FOLDER else []
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="wheels: SUBKV_WHEELS names no folder with a wheel for aarch64"),
    pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64"),
    pytest.mark.skipif(not SYSTEM.is_dir(), reason="needs the system's libraries of g++-aarch64-linux-gnu"),
]
ROOT = os.environ.get("SUBKV_ARM64_ROOT")
PROCESSORS = {"cortex-a72": "armv8.0_1", "cortex-a76": "armv8.2_2"}
"""What qemu emulates, and the variant of ggml's CPU backend for it."""
PROMPT, N = "Once upon a time", 12


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the libraries and programs, of an unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(WHEELS[0]) as archive:
        archive.extractall(folder)
    for program in (folder / "subkv" / "lib").glob("llama-*"):
        program.chmod(0o755)
    return folder / "subkv" / "lib"


def _emulated(cpu: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "QEMU_CPU": cpu, "QEMU_LD_PREFIX": str(SYSTEM)}
    done = subprocess.run(
        [str(QEMU), *map(str, command)], env=env, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done


def _in_root(command: str) -> str:
    """Output of a shell's command in the root of Debian, where there is no network."""
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
    env["QEMU_CPU"] = "cortex-a76"  # with SVE numpy's products are wrong in qemu 7.2
    isolated = ("unshare", "-nmpf", f"--mount-proc={ROOT}/proc", "chroot", str(ROOT), "sh", "-ec", command)
    done = subprocess.run(isolated, env=env, capture_output=True, text=True, timeout=1800, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("cpu", PROCESSORS)
def test_completion(library: Path, coded_model: Callable[..., Path], cpu: str) -> None:
    """On coefficients: the text of this machine, by the processor's variant of ggml's backend."""
    from subkv import Llama

    model = coded_model()
    with Llama(model, n_ctx=512, verbose=False) as llm:
        expected = llm(PROMPT, max_tokens=N, temperature=0.0)["choices"][0]["text"]
    options = (
        "-c",
        "512",
        "-n",
        str(N),
        "--temp",
        "0",
        "-t",
        "2",
        "-no-cnv",
        "--no-display-prompt",
        "--no-warmup",
        "-v",
    )
    done = _emulated(cpu, library / "llama-completion", "-m", model, "-p", PROMPT, "-ctk", "subkv", *options)
    assert "subkv: coded K/V cache" in done.stderr
    assert f"libggml-cpu-{PROCESSORS[cpu]}.so" in done.stderr
    assert done.stdout.strip() == expected.strip()


def test_everything_is_of_the_platform(library: Path) -> None:
    """No library or program of the machine that built the wheel is in it."""
    files = [path for path in library.parents[1].rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    assert {path.name for path in files} > {"libllama.so", "libsubkv.so", "llama-server", "llama-completion"}
    others = [path.name for path in files if path.read_bytes()[18:20] != b"\xb7\x00"]  # EM_AARCH64
    assert others == []


@pytest.mark.skipif(ROOT is None, reason="SUBKV_ARM64_ROOT names no root of Debian for aarch64")
def test_install() -> None:
    """By the root's own pip, without compiler, index and network; the demo model is converted there."""
    for old in ("wheels", "venv", "root/.cache"):
        shutil.rmtree(Path(str(ROOT)) / old, ignore_errors=True)
    shutil.copytree(WHEELS[0].parent, Path(str(ROOT)) / "wheels")
    _in_root("! command -v cc gcc g++ clang")
    _in_root("python3 -m venv /venv && /venv/bin/pip install --no-index --find-links /wheels 'subkv[demo]'")
    question = ("-p", "'What is the capital of France?'", "--single-turn", "--temp", "0", "-n", str(N))
    answer = _in_root(f"/venv/bin/subkv chat {' '.join(question)}")
    assert answer.strip() and "machine" in _in_root("/venv/bin/subkv doctor")
