"""Finds the llama.cpp that a program loads while it runs: one of a package of node or Python, or beside the program."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.launch.arguments import program_name
from subkv.base.files import open_regular

NODE, PYTHON = "node", "python"  # kinds of interpreters
_NODE = re.compile(r"node(js)?(-?\d+)?|bunx?|deno|np[mx]|pnpm|yarn|tsx|ts-node|electron")
_PYTHON = re.compile(r"(python|pypy)[\d.]*w?")
_LIBLLAMA = re.compile(r"libllama(\.v[\d.]+)?\.so[\d.]*")  # node-llama-cpp: libllama.v0.5.0.so
_PACKAGES = ("*llama*", "@*llama*/*", "@*/*llama*", ".pnpm/*llama*")  # of node_modules
N_FILES = 20_000  # of a folder that are looked at
SECONDS = 20.0
REPO = Path(__file__).resolve().parent.parent.parent
# prints the folder and the version of the llama_cpp that a program would import; argv: the folder of the program, and
# those of PYTHONPATH, where this text imports no modules
_ASK = """
import importlib.util, json, os, re, sys
sys.path[:1] = sys.argv[1:]
found = importlib.util.find_spec("llama_cpp")
folders = [folder for folder in (found.submodule_search_locations or [])] if found else []
if folders:
    with open(os.path.join(folders[0], "__init__.py"), encoding="utf-8") as file:
        version = re.search(r'^__version__ *= *["\\']([^"\\']*)', file.read(), re.M)
    print(json.dumps([folders[0], version[1] if version else ""]))
"""


@dataclass(frozen=True)
class Interpreter:
    """What runs a program. kind: NODE or PYTHON; path: of the interpreter; script: the program's text, if it is one;
    options: of the interpreter in the first line of the text.
    """

    kind: str
    path: Path
    script: Path | None = None
    options: tuple[str, ...] = ()


def pinned() -> str | None:
    """The pinned version of llama-cpp-python, from the checkout or the package's metadata; None if unknown."""
    try:
        words = (REPO / "runtime" / "llama.cpp" / "VERSION").read_text().split()
        return words[words.index("version") + 1]
    except (OSError, ValueError):
        pass
    try:
        listed = importlib.metadata.requires("subkv") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    versions = [match[1] for line in listed if (match := re.match(r"llama[-_]cpp[-_]python ?\(?==([\w.]+)", line))]
    return versions[0] if versions else None


def interpreter_of(path: Path, environment: Mapping[str, str]) -> Interpreter | None:
    """The interpreter of a program: node, Python, or a script whose first line names one of them."""
    if kind := _kind(path):
        return Interpreter(kind, path, script_of(path))
    script = script_of(path)
    if script is None:
        return None
    with open(script, "rb") as handle:
        words = os.fsdecode(handle.readline(4096))[2:].split()
    if words and program_name(words[0]) == "env":
        words = list(itertools.dropwhile(lambda word: word.startswith("-") or "=" in word, words[1:]))
    found = shutil.which(words[0], path=environment.get("PATH")) if words else None
    kind = _kind(Path(found)) if found else ""
    return Interpreter(kind, Path(found), script, tuple(words[1:])) if found and kind else None


def _kind(path: Path) -> str:
    name = program_name(str(path))
    return NODE if _NODE.fullmatch(name) else PYTHON if _PYTHON.fullmatch(name) else ""


def script_of(path: Path) -> Path | None:
    """The file, if it starts with #!."""
    try:
        with open(path, "rb") as handle:
            return path.resolve() if handle.read(2) == b"#!" else None
    except OSError:
        return None


def python_package(python: Path, folder: Path, environment: Mapping[str, str]) -> tuple[Path, str] | None:
    """Folder and version ("" if it is unknown) of the llama_cpp that a Python imports, or None if it has none, or does
    not answer.

    folder: of the program, where Python looks first.
    """
    own = environment.get("PYTHONPATH")  # relative to the current folder
    folders = [folder, *map(os.path.abspath, own.split(os.pathsep))] if own else [folder]
    try:
        done = subprocess.run(
            [os.path.abspath(python), "-c", _ASK, *folders],  # not resolved, because the link tells the environment
            env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
            cwd=python.resolve().parent,  # where Python looks for modules at first: not in a folder of others
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
        package, version = json.loads(done.stdout)
        return Path(package), str(version)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def other_package(python: Path, folder: Path, environment: Mapping[str, str]) -> tuple[Path, str] | None:
    """As python_package(), but None also for the version that our libraries fit."""
    found, version = python_package(python, folder, environment), pinned()
    return found if found and found[1] and version and found[1] != version else None


def bundled_libllama(path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """The libllama that a program brings and loads while it runs, or None if none is found. Only Linux's are looked
    for."""
    if sys.platform != "linux":
        return None
    interpreter = interpreter_of(path, environment)
    if interpreter is None:
        folders = _of_application(path.resolve().parent)
    elif interpreter.kind == NODE:
        folders = _of_node(interpreter, arguments, environment)
    else:
        folders = _of_python(interpreter, arguments, environment)
    for folder in folders:
        if found := _libllama_below(folder):
            return found
    return None


def _folder(interpreter: Interpreter, arguments: Sequence[str]) -> Path:
    """The folder of a program's text: of the script, or of the first argument that is a file; else the current one."""
    if interpreter.kind == PYTHON and not interpreter.script:
        return python_command(arguments).folder
    files = [interpreter.script] if interpreter.script else [Path(word) for word in arguments if _is_file(word)]
    return files[0].resolve().parent if files else Path.cwd()


@dataclass(frozen=True)
class PythonCommand:
    """What a command line tells Python. folder: where it looks for modules first; isolated: it imports no sitecustomize
    of PYTHONPATH.
    """

    folder: Path
    isolated: bool


def python_command(arguments: Sequence[str]) -> PythonCommand:
    """The arguments of Python up to a script, -m or -c."""
    isolated, words = False, iter(arguments)
    for word in words:
        if word == "-" or not word.startswith("-"):
            text = Path(word).resolve()
            return PythonCommand(text if text.is_dir() else text.parent, isolated)
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        flags = re.match(r"-[bBdEhiIOPqRsStuvVx?]*", word)
        isolated = isolated or bool(flags and {"E", "I", "S"} & set(flags[0]))
        rest = word[flags.end() :] if flags else ""
        if rest[:1] in ("m", "c"):
            break
        if rest in ("W", "X"):  # their value is the next word
            next(words, None)
    return PythonCommand(Path.cwd(), isolated)


def _is_file(word: str) -> bool:
    try:
        return not word.startswith("-") and Path(word).is_file()
    except (OSError, ValueError):
        return False


def _of_node(interpreter: Interpreter, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path]:
    """Packages whose name has the word llama, in the folders where node looks for modules."""
    starts = [_folder(interpreter, arguments), *(Path(word).resolve().parent for word in arguments if _is_file(word))]
    roots = [folder / "node_modules" for start in [*starts, Path.cwd()] for folder in [start, *start.parents]]
    roots += [Path(folder) for folder in environment.get("NODE_PATH", "").split(os.pathsep) if folder]
    for root in dict.fromkeys(roots):
        if root.is_dir():
            yield from sorted({folder for pattern in _PACKAGES for folder in root.glob(pattern)})


def _of_python(interpreter: Interpreter, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path]:
    """The package llama_cpp, if it is of another version than ours."""
    if other := other_package(interpreter.path, _folder(interpreter, arguments), environment):
        yield other[0]


def _of_application(folder: Path) -> Iterator[Path]:
    """Where an application has its libraries; none for programs in a common folder, such as /usr/bin."""
    if folder.name in ("bin", "sbin", "libexec"):
        return
    resources = folder / "resources"  # of electron
    if (resources / "app.asar").exists() or (resources / "app").is_dir():
        yield resources
    with contextlib.suppress(OSError):
        if any(_LIBLLAMA.fullmatch(name) for name in os.listdir(folder)):
            yield folder


def _libllama_below(folder: Path) -> Path | None:
    """The first libllama in a folder and those below it, among N_FILES files."""
    n = 0
    for at, below, names in os.walk(folder):
        below.sort()
        for name in sorted(names):
            if _LIBLLAMA.fullmatch(name) and _machine(Path(at, name)) == _machine(Path(sys.executable)):
                return Path(at, name)
        n += len(names)
        if n > N_FILES:
            return None
    return None


def _machine(library: Path) -> bytes:
    """Class, byte order and processor of an ELF file; empty for others."""
    try:
        with open_regular(library) as handle:
            head = handle.read(20)
    except OSError:
        return b""
    return head[4:6] + head[18:20] if head[:4] == b"\x7fELF" else b""
