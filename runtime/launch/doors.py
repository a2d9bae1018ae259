"""How a program gets the coded cache: by our libllama, or by the plug-in that its own llama.cpp loads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.launch import programs
from runtime.launch.arguments import is_llama_cpp_program
from subkv.base.errors import SubkvError

PLUGIN = "libggml-subkv.so"
BACKEND_PATH = "GGML_BACKEND_PATH"
_VERSION = """
import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).ggml_version
version.restype = ctypes.c_char_p
print(version().decode())
"""


@dataclass(frozen=True)
class Door:
    """plugin: the plug-in's file; None: the program uses our libllama. why: the end of a sentence about the program."""

    plugin: Path | None
    why: str


def plugin_file(libraries: Path) -> Path:
    """The plug-in beside our libraries. Raises SubkvError about `plugin`."""
    path = libraries / PLUGIN
    if not path.is_file():
        raise SubkvError("plugin", f"expected {path}, found none; it is built on Linux, unless -DSUBKV_PLUGIN=OFF")
    return path


def ggml_version(library: Path) -> str:
    """The version of a ggml, read in a process of its own; "": it does not say."""
    done = subprocess.run([sys.executable, "-c", _VERSION, library], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def our_door(libraries: Path) -> Door:
    """The door of a program that uses our libraries."""
    return Door(None, f"finds our libraries in {libraries}")


def choose_door(
    program: str, path: Path, libraries: Path, environment: Mapping[str, str], with_libraries: Mapping[str, str]
) -> Door:
    """The door of a program. environment: the user's; with_libraries: that in which programs find our libraries.

    Raises SubkvError about `program` if it has none.
    """
    if not programs.other_llama_cpp(program, path, libraries, programs.listed_libraries(path, with_libraries)):
        return our_door(libraries)
    listed = programs.listed_libraries(path, environment)
    if listed is None:
        other, reason = "does not start", "a shared library that it needs is missing"
    else:
        other = programs.other_llama_cpp(program, path, libraries, listed)
        reason = _missing(listed, libraries)
    if not reason:
        return Door(plugin_file(libraries), f"{other}, whose ggml loads the plug-in")
    remedy = f"; {programs.INSTALL}" if is_llama_cpp_program(program) else ""
    raise SubkvError(
        "program",
        f"expected a program that loads {libraries}/libllama.so, or a llama.cpp that can load the plug-in, "
        f"found {path}, which {other}: {reason}{remedy}",
    )


def _missing(listed: str, libraries: Path) -> str:
    """Why the ggml of a program that has these libraries cannot load the plug-in; "": it can."""
    base, registry = (programs.library_in(listed, name) for name in ("libggml-base", "libggml"))
    if base is None or registry is None:
        return "its ggml is no shared library"
    try:
        if BACKEND_PATH.encode() not in registry[1].read_bytes():
            return f"its ggml does not read {BACKEND_PATH}"
    except OSError:
        return f"{registry[1]} cannot be read"
    version, ours = (ggml_version(library) for library in (base[1], libraries / "libggml-base.so"))
    return "" if version == ours else f"its ggml has version {version or 'unknown'}, and the plug-in is for {ours}"


def plugin_variables(plugin: Path) -> dict[str, str]:
    """Variables with which a llama.cpp loads the plug-in."""
    return {BACKEND_PATH: os.path.abspath(plugin)}
