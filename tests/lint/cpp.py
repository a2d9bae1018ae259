"""Rooms of our C++, and what it leaves to one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lint.files import CPP, NATIVE, REPO, shown

# A folder of runtime/native includes its own headers and those of the folders on its line, and nothing else of ours.
ENGINE = {"include", "base", "contract", "bases", "engine", "kernels"}
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
    "capi": {*ENGINE, "adapt", "cuda", "store"},
    "plugin": ENGINE,
    "hook": {"include", "base", "contract"},
    "server": {"include", "base", "contract", "hook"},
    "kernels": set[str](),
}
INTERNAL = ("hook", "server")  # compiled into libllama and llama-server: they alone see llama.cpp's headers
NODES = {"engine/node_sources.h", "plugin/abi.cpp"}  # the latter computes nothing
INCLUDE = re.compile(r'^\s*#\s*include ["<]([^">]+)[">]', re.M)
FRACTION = re.compile(r"%[-+ #0-9.*]*[lL]?[aefgAEFG]\b|\b(?:strto[fd]|strtold|sto[fd]|stold|atof)\(")


def native() -> Iterator[tuple[Path, str]]:
    """Files of runtime/native and their text."""
    for path in CPP:
        if NATIVE in path.parents:
            yield path, path.read_text("utf-8")


def folder(path: Path) -> str:
    return path.relative_to(NATIVE if NATIVE in path.parents else REPO).parts[0]


def floors() -> Iterator[str]:
    """The floors of the native code (docs/development.md, "Layers and packages"): no folder includes a higher one.

    An include names no folder, so headers have names of their own.
    """
    places = [path for place in (NATIVE, REPO / "kernels") for path in sorted(place.rglob("*"))]
    native_headers = [path for path in places if path.suffix == ".h" and NATIVE in path.parents]
    headers = {path.name: path for path in native_headers}
    for path in native_headers:
        if headers[path.name] != path:
            yield f"{shown(path)}: {shown(headers[path.name])} has the same name"
    for path in (path for path in places if path.suffix in (".h", ".cpp", ".cu", ".cuh")):
        room = folder(path)
        for name in INCLUDE.findall(path.read_text("utf-8")):
            beside = (path.parent / name).resolve()
            found = beside if beside.is_file() else headers.get(name)
            other = "kernels" if name.startswith("subkv/") else folder(found) if found else None
            if other not in (None, room, *FLOORS[room]):
                yield f"{shown(path)}: {room}/ does not include {name} of {other}/"
            if name.startswith("llama") and room not in INTERNAL:
                yield f"{shown(path)}: {room}/ does not include {name} of llama.cpp"


def nodes() -> Iterator[str]:
    """Custom nodes are made in one place, so that no exception passes through ggml (node_work.h)."""
    for path, text in native():
        if "ggml_custom_4d(" in text and path.relative_to(NATIVE).as_posix() not in NODES:
            yield f"{shown(path)}: custom nodes are made by node_sources.h"
        if path.name != "node_sources.h" and (found := re.search(r"\bggml_(?:map_custom\w*|custom_inplace)\(", text)):
            yield f"{shown(path)}: custom nodes are made by node_sources.h, not by {found[0]})"


def numbers() -> Iterator[str]:
    """Fractions are written and read by base/numbers.h, in the C locale."""
    for path, text in native():
        for i, line in enumerate(text.splitlines(), 1):
            if FRACTION.search(line.split("//")[0]):
                yield f"{shown(path, i)}: fractions are written and read by base/numbers.h"


def includes() -> Iterator[str]:
    """Headers named by a relative path exist: most machines do not compile the backends of GPUs."""
    for path in CPP:
        for name in re.findall(r'#include "(\.\.?/[\w./-]+)"', path.read_text("utf-8")):
            if not (path.parent / name).is_file():
                yield f"{shown(path)}: {name} does not exist"


RULES = {"floors": floors, "nodes": nodes, "numbers": numbers, "includes": includes}
