"""The wheel of `cmake/build_wheels.py --platform macos`, as far as it can be checked without a Mac: its files.

SUBKV_WHEELS=DIR pytest tests/python/test_wheels_macos.py
Package macholib reads them.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

macho = pytest.importorskip("macholib.MachO")
constants = pytest.importorskip("macholib.mach_o")

FOLDER = os.environ.get("SUBKV_WHEELS")
WHEELS = [*Path(FOLDER).glob("subkv-*-macosx_*_arm64.whl")] if FOLDER else []
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="wheels: SUBKV_WHEELS names no folder with a wheel for macOS"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Libraries and programs of an unpacked wheel by name."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(WHEELS[0]) as archive:
        archive.extractall(folder)
    magic = b"\xcf\xfa\xed\xfe"  # of 64 bits
    return {path.name: path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == magic}


def test_everything_is_there(files: dict[str, Path]) -> None:
    assert set(files) > {"libsubkv.dylib", "libllama.dylib", "libggml-cpu-apple_m1.so", "llama-server"}


def test_libraries_are_found_and_signed(files: dict[str, Path]) -> None:
    """Each file runs on Apple's processors from the version in the wheel's name on, is signed, as macOS requires, and
    depends only on libraries next to it and on macOS's own.
    """
    oldest = tuple(map(int, WHEELS[0].stem.split("-macosx_")[1].split("_")[:2]))
    for name, path in files.items():
        (header,) = macho.MachO(str(path)).headers
        assert constants.CPU_TYPE_NAMES[header.header.cputype] == "ARM64", name
        commands = {command.cmd: body for command, body, _ in header.commands}
        assert constants.LC_CODE_SIGNATURE in commands, name
        minimum = int(commands[constants.LC_BUILD_VERSION].minos)
        assert (minimum >> 16, minimum >> 8 & 255) <= oldest, name
        for _, _, dependency in header.walkRelocatables():
            beside = dependency.startswith("@loader_path/") and dependency.rpartition("/")[2] in files
            assert beside or dependency == "/usr/lib/libSystem.B.dylib", (name, dependency)
