"""ruff, mypy, clang-format and import-linter, in the versions of the extra `test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

from lint.files import CPP, REPO

NUMPY = tuple(int(part) for part in version("numpy").split(".")[:2])
# Outside the checkout: other checkouts use it, too.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subkv-tests"


def tool(name: str, *arguments: str, **variables: str) -> Iterator[str]:
    """The tool of this environment, not another one on the PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        yield f"{name}: expected in {sysconfig.get_path('scripts')}, found none; pip install '.[test]'"
        return
    done = subprocess.run(
        [found, *arguments], cwd=REPO, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    if done.returncode != 0:
        yield (done.stdout + done.stderr)[:8000] or f"{name}: ended with {done.returncode}"


def mypy() -> Iterator[str]:
    if NUMPY < (2, 4):
        print(f"lint: mypy is left out: the types of numpy {version('numpy')} differ from those of 2.4")
        return
    cache = ["--cache-dir", str(CACHE / "mypy")]
    yield from tool("mypy", "--no-error-summary", "--python-executable", sys.executable, *cache)


def imports() -> Iterator[str]:
    """The contracts of pyproject.toml: layers, packages, research apart, no PyTorch in programs, no circle."""
    paths = os.pathsep.join(str(REPO / folder) for folder in ("python", "", "kernels/triton"))
    yield from tool("lint-imports", "--no-cache", PYTHONPATH=paths)


RULES = {
    "mypy": mypy,
    "ruff-check": partial(tool, "ruff", "check", "--no-cache"),
    "ruff-format": partial(tool, "ruff", "format", "--check", "--no-cache"),
    "clang-format": partial(tool, "clang-format", "--dry-run", "-Werror", *map(str, CPP)),
    "imports": imports,
}
