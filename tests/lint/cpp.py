"""Rooms of our C++, and what it leaves to one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lint.files import CPP, NATIVE, shown

SHARED = {"hook.h", "calls.h"}  # headers of hook/ for libsubkv: the rest is compiled into libllama
ENTRANCES = {"chunked.h", "attend_chunks.h"}  # all that the rest of the engine sees of runtime/native/adapt
NODES = {"engine/node_sources.h", "plugin/abi.cpp"}  # the latter computes nothing
FRACTION = re.compile(r"%[-+ #0-9.*]*[lL]?[aefgAEFG]\b|\b(?:strto[fd]|strtold|sto[fd]|stold|atof)\(")


def native(*rooms: str) -> Iterator[tuple[Path, str]]:
    """Files of runtime/native and their text; rooms: of these folders only."""
    for path in CPP:
        if NATIVE in path.parents and (not rooms or path.parent.name in rooms):
            yield path, path.read_text("utf-8")


def headers(room: str) -> set[str]:
    return {path.name for path in (NATIVE / room).glob("*.h")}


def rooms() -> Iterator[str]:
    """Few headers of adapt/ are used outside it; only the C API includes the headers of research and of tests.

    libsubkv knows two headers of hook/ and none of llama.cpp's; server/ is part of llama-server. Files of bases are
    read without the engine.
    """
    for path, text in native():
        room = path.parent.name
        included = set(re.findall(r'#include ["<]([\w./-]+)', text))
        names = {name.removeprefix("adapt/") for name in included}
        foreign: set[str] = set()
        if room not in ("hook", "server"):
            foreign |= included & (headers("hook") - SHARED) | {name for name in included if name.startswith("llama")}
        if room == "bases":
            foreign |= included & headers("engine")
        if room != "adapt":
            foreign |= names & headers("adapt") - ENTRANCES
            if room != "capi":
                foreign |= names & {"subkv_research.h", "subkv_test.h"}
        if foreign:
            yield f"{shown(path)}: {room}/ does not include {', '.join(sorted(foreign))}"


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


RULES = {"rooms": rooms, "nodes": nodes, "numbers": numbers, "includes": includes}
