"""The prototype of research/ggml_backend compiles against the pinned source, without warnings.

It is in no build: this keeps it in step with our kernels and with ggml's interface for backends.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import llama_source as s
import pytest

COMPILER = shutil.which("c++") or ""
HEADERS = ("ggml/include/", "ggml/src/", "include/")


@pytest.mark.skipif(not COMPILER, reason="needs c++")
def test_compiles(repo: Path, pristine: s.Tree, tmp_path: Path) -> None:
    for path, data in pristine.items():
        folder, _, name = path.rpartition("/")
        if f"{folder}/" in HEADERS and name.endswith(".h"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(data)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    own = [f"runtime/native/{name}" for name in ("base", "bases", "capi", "engine", "hook")]
    flags += [f"-I{repo / folder}" for folder in (*own, "kernels/include")]
    for folder in HEADERS:
        flags += ["-isystem", str(tmp_path / folder)]
    sources = sorted((repo / "research" / "ggml_backend").glob("*.cpp"))
    listed = (repo / "research" / "ggml_backend" / "CMakeLists.txt").read_text("utf-8")
    assert sources and all(source.name in listed for source in sources)
    done = subprocess.run([COMPILER, *flags, *map(str, sources)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
