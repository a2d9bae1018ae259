"""The floors of the native code (docs/development.md, "Layers and packages"): what each folder may include."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
NATIVE = "runtime/native/"
ENGINE = {"include", "base", "contract", "bases", "engine", "kernels"}
# A folder includes its own headers and those of the folders on its line, and nothing else of ours.
FLOORS = {
    "include": set[str](),
    "base": {"include"},
    "contract": {"include", "base"},
    "bases": {"include", "base", "kernels"},
    "engine": ENGINE,
    "adapt": ENGINE,
    "cuda": ENGINE,
    "vulkan": ENGINE,
    "store": {"include", "base", "bases"},
    "capi": {*ENGINE, "adapt", "store"},
    "plugin": ENGINE,
    "hook": {"include", "base", "contract"},
    "server": {"include", "base", "contract", "hook"},
    "kernels": set[str](),
}
INTERNAL = ("hook", "server")  # compiled into libllama and llama-server: they alone see llama.cpp's headers


def folder(path: Path) -> str:
    parts = path.relative_to(REPO).as_posix().removeprefix(NATIVE).split("/")
    return parts[0]


def files(*endings: str) -> list[Path]:
    found = [path for place in (NATIVE, "kernels") for path in (REPO / place).rglob("*") if path.suffix in endings]
    assert found
    return found


def included(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include ["<]([^">]+)[">]', path.read_text("utf-8"), re.M))


def test_no_folder_includes_a_higher_one() -> None:
    headers = {path.name: path for path in files(".h") if folder(path) != "kernels"}
    upward = []
    for path in files(".h", ".cpp", ".cu", ".cuh"):
        for name in included(path):
            beside = (path.parent / name).resolve()
            found = beside if beside.is_file() else headers.get(name)
            other = "kernels" if name.startswith("subkv/") else folder(found) if found else None
            if other not in (None, folder(path), *FLOORS[folder(path)]):
                upward.append(f"{path.relative_to(REPO)} includes {name} of {other}")
    assert not upward, "\n".join(upward)


def test_headers_have_names_of_their_own() -> None:
    """An include names no folder, and must not find another folder's header."""
    names = sorted(path.name for path in files(".h") if folder(path) != "kernels")
    assert names == sorted(set(names))


def test_llama_cpp_is_seen_by_the_hook_alone() -> None:
    for path in (path for path in files(".h", ".cpp") if folder(path) not in INTERNAL):
        assert not any(name.startswith("llama") for name in included(path)), path
