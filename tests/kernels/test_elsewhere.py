"""Kernels against the reference on other processors and systems: cross-compiled, and run in emulators.

Debian's packages: g++-aarch64-linux-gnu and qemu-user; g++-mingw-w64-x86-64-posix and wine64.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from compiled import linked, objects

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT}/kernels/include"]
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC 12 warns of its own header's undefined registers
AVX512 = [
    *AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")),
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
OPTIONS = {
    "neon": ["-march=armv8.2-a+dotprod"],
    "avx2_vnni": [*AVX2, "-mavxvnni"],
    "avx2": AVX2,
    "avx512_bw": AVX512,
    "avx512": [*AVX512, "-mavx512vnni", "-mavx512vbmi"],
}


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def checked(compiler: str, emulator: str, versions: Sequence[str], n: int, folder: Path) -> str:
    """The output of check.cpp after n rounds. versions: files of kernels/cpu that the processor can run."""
    sources = [*ROOT.glob("kernels/ref/*.cpp"), *ROOT.glob("kernels/cpu/*.cpp"), ROOT / "tests/kernels/check.cpp"]
    version_of = {source: next((name for name in OPTIONS if source.stem.startswith(name)), "") for source in sources}
    chosen = [source for source in sources if version_of[source] in ("", *versions)]
    built = objects(chosen, lambda source: [*FLAGS, *OPTIONS.get(version_of[source], [])], folder, compiler)
    linked(folder / "check.exe", built, ["-static"], compiler)
    environment = os.environ | {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all"}
    done = subprocess.run(
        [*emulator.split(), "./check.exe", str(n)], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("aarch64-linux-gnu-g++", "qemu-aarch64")
def test_neon(tmp_path: Path) -> None:
    assert "neon: 60 rounds" in checked("aarch64-linux-gnu-g++", "qemu-aarch64", ["neon"], 60, tmp_path)


@pytest.mark.slow
@needs("x86_64-w64-mingw32-g++-posix", "wine")
def test_windows(tmp_path: Path) -> None:
    """Instructions run natively; system calls and calling conventions are those of Windows."""
    versions = ["avx2", "avx2_vnni", "avx512_bw", "avx512"]
    assert "ref: 20 rounds" in checked("x86_64-w64-mingw32-g++-posix", "wine", versions, 20, tmp_path)


@needs("c++")
@pytest.mark.skipif("avx512_vnni" not in CPU, reason="needs a processor with AVX-512 VNNI")
def test_avx_vnni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with AVX-512 VNNI only, the test uses its encoding of the instruction."""
    define = ["-DSUBKV_EVEX_VNNI"]
    monkeypatch.setitem(OPTIONS, "avx2_vnni", [*AVX2, "-mavx512vnni", "-mavx512vl", *define])
    monkeypatch.setitem(OPTIONS, "dispatch", define)
    versions = ["avx2", "avx2_vnni", "avx512_bw", "avx512", "dispatch"]
    assert "avx2vnni: 20 rounds" in checked("c++", "env", versions, 20, tmp_path)


@pytest.mark.slow
@needs("zig")
def test_macos_compiles(tmp_path: Path) -> None:
    """Compiles only. zig (PyPI: ziglang) has macOS's headers; Apple's processors need no option for NEON."""
    for source in [*ROOT.glob("kernels/ref/*.cpp"), *ROOT.glob("kernels/cpu/*.cpp")]:
        if not source.stem.startswith(("avx2", "avx512")):
            command = ["zig", "c++", "-target", "aarch64-macos", *FLAGS, "-c", str(source)]
            subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "neon.o").is_file()


@needs("x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-objdump")
def test_windows_interface(tmp_path: Path) -> None:
    """A library exports only the interface, and error messages format sizes correctly."""
    compiler, native = "x86_64-w64-mingw32-g++-posix", ROOT / "runtime/native"
    (tmp_path / "says.cpp").write_text('#include "error.h"\nvoid says() { subkv::reject("%zu", sizeof(int)); }\n')
    sources = ["says.cpp", f"{native}/base/error.cpp"]
    flags = [*FLAGS, f"-I{native}/base", f"-I{native}/include", "-DSUBKV_BUILD", "-shared", "-o", "says.dll"]
    subprocess.run([compiler, *flags, *sources], cwd=tmp_path, check=True)
    printed = subprocess.run(
        ["x86_64-w64-mingw32-objdump", "-p", "says.dll"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    table = printed.partition("[Ordinal/Name Pointer] Table")[2].partition("\n\n")[0]
    names = [line.split()[-1] for line in table.splitlines() if "]" in line]
    assert names == ["subkv_last_error", "subkv_last_error_parts"]
