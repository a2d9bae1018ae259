"""Paths of llama.cpp's programs in this build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from subkv.native.library import lib_dir


def program(name: str) -> Path:
    """The program's path; skips if the build does not have it (SUBKV_PROGRAMS)."""
    file = f"{name}.exe" if sys.platform == "win32" else name
    for folder in (lib_dir(), lib_dir().parent / "bin"):
        if (folder / file).is_file():
            return folder / file
    pytest.skip(f"{name}: llama.cpp's programs are not built (-DSUBKV_PROGRAMS=ON)")
