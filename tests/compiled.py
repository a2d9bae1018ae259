"""Compiles C++ for tests: several files in parallel, with ccache if installed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Outside the checkout, beside the package's cache: other checkouts use it, too.
CACHE = Path(os.environ["SUBKV_CACHE"]).with_name("subkv-tests")
CXX = os.environ.get("CXX", "c++")
# The compiler runs in the checkout, and ccache hashes paths relative to it, so other checkouts share the objects. The
# environment is read when pytest starts, because each test has a separate cache folder.
ENVIRONMENT = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}


def objects(
    sources: Iterable[Path],
    flags: Sequence[str] | Callable[[Path], Sequence[str]],
    folder: Path,
    compiler: str = CXX,
) -> list[str]:
    """Paths of the object files in `folder`, one per source, in the order of the sources.

    flags: the same for all sources, or a function of the source. Raises subprocess.CalledProcessError.
    """
    ccache = shutil.which("ccache")

    def compile_one(i: int, source: Path) -> str:
        target = folder / f"{i}-{source.name}.o"  # two folders may have a file of one name
        own = flags(source) if callable(flags) else flags
        command = [compiler, *own, "-c", str(source), "-o", str(target)]
        subprocess.run([ccache, *command] if ccache else command, cwd=ROOT, env=ENVIRONMENT, check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, itertools.count(), sources))


def headers(folders: Iterable[Path]) -> list[str]:
    """Compiler options for copies of folders of headers, at a path that depends on their content only.

    ccache hashes the path of a header, and every new environment installs the package's headers elsewhere.
    """
    options = []
    for folder in filter(Path.is_dir, folders):
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*.h")):
            digest.update(bytes(path.relative_to(folder)) + b"\0" + path.read_bytes())
        copied = CACHE / "headers" / digest.hexdigest()
        if not copied.is_dir():
            copied.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=copied.parent) as temporary:
                complete = shutil.copytree(folder, Path(temporary) / "include")
                with contextlib.suppress(OSError):  # another process was first
                    complete.rename(copied)
        options.append(f"-isystem{copied}")
    return options


def linked(target: Path, parts: Sequence[str], flags: Sequence[str] = (), compiler: str = CXX) -> Path:
    """`target`, linked from object files and libraries. Raises subprocess.CalledProcessError."""
    subprocess.run([compiler, *flags, *parts, "-o", str(target)], check=True)
    return target


def preloaded(source: Path, folder: Path) -> str:
    """The value of LD_PRELOAD with a library compiled from one file; skips without a compiler.

    Libraries that this process preloads stay: the runtime of a sanitizer has to be the first.
    """
    if shutil.which(CXX) is None:
        pytest.skip(f"needs {CXX}")
    built = objects([source], ["-std=c++17", "-O1", "-fPIC"], folder)
    library = linked(folder / f"{source.stem}.so", [*built, "-ldl"], ["-shared"])
    return ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)])
