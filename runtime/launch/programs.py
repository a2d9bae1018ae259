"""Finds a program by name, checks that it loads our libraries, and replaces this process by it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.launch.arguments import is_llama_cpp_program
from subkv.base.errors import SubkvError, system_reason

INSTALL = (
    "in a clone of subkv, `CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install --no-cache-dir .` installs it"
)
ENDING = ".exe" if sys.platform == "win32" else ""
_PT_INTERP = 3  # ELF: names the dynamic linker


def find(program: str, libraries: Path, search: str | None, ours: bool = True) -> Path:
    """The file of a program: with `ours`, a llama.cpp program beside our libraries, else by the search path.

    Raises SubkvError about `program`.
    """
    if ours and os.path.basename(program) == program and is_llama_cpp_program(program):
        for folder in (libraries, libraries.parent / "bin"):
            path = folder / (program if program.endswith(ENDING) else f"{program}{ENDING}")
            if path.is_file() and os.access(path, os.X_OK):
                return path
    executable = shutil.which(program, path=search)
    if executable is None:
        if ours and os.path.basename(program) == program and is_llama_cpp_program(program):
            reason = (
                f"expected one of llama.cpp's programs in {libraries} or on the PATH, found no {program}; {INSTALL}"
            )
            raise SubkvError("program", reason)
        found = f"the folder {program}" if os.path.isdir(program) else f"no {program}"
        if os.path.isfile(program):
            found = f"{program}, which is no program (its mode has no x)"
        raise SubkvError("program", f"expected a program that can be executed, found {found}")
    return Path(executable)


def linker(path: Path) -> str | None:
    """The dynamic linker of a 64-bit ELF file, "" for a static program, None for other files.

    Raises OSError, or ValueError for some damaged files.
    """
    with open(path, "rb") as handle:
        head = handle.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return None
        order = "<" if head[5] == 1 else ">"
        (start,) = struct.unpack_from(f"{order}Q", head, 32)
        size, n = struct.unpack_from(f"{order}HH", head, 54)
        for i in range(n):
            handle.seek(start + i * size)
            raw = handle.read(40)
            if len(raw) < 40:  # damaged; the system rejects it
                return None
            kind, _, offset, _, _, length = struct.unpack(f"{order}IIQQQQ", raw)
            if kind == _PT_INTERP:
                handle.seek(offset)
                return os.fsdecode(handle.read(min(length, 4096)).rstrip(b"\0"))
    return ""


def listed_libraries(path: Path, environment: Mapping[str, str]) -> str | None:
    """What Linux's dynamic linker lists for a program, "" for a static one, or None if it cannot tell."""
    try:
        interpreter = linker(path)
    except (OSError, ValueError):  # executable but not readable, or damaged
        return None
    if not interpreter:
        return interpreter
    # glibc's linker can list libraries without running the program; others cannot
    if not re.match(r"ld(-linux|64\.so)", os.path.basename(interpreter)) or not os.path.exists(interpreter):
        return None
    return listed_by(interpreter, path, environment)


def listed_by(interpreter: str, path: Path, environment: Mapping[str, str]) -> str | None:
    """What a dynamic linker lists for a program or a library, or None if it lacks a library."""
    listed = subprocess.run(
        [interpreter, "--list", os.path.abspath(path)],
        env=dict(environment),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )
    return None if listed.returncode else listed.stdout  # a program reports that itself


def library_in(listed: str, name: str) -> tuple[str, Path] | None:
    """The full name and the file of a library in listed_libraries()."""
    # node-llama-cpp: libllama.v0.5.0.so
    match = re.search(rf"^\s*({name}(?:\.v[\d.]+)?\.so\S*) => (.+?)(?: \(0x[0-9a-f]+\))?$", listed, re.M)
    return (match[1], Path(match[2])) if match else None


def other_llama_cpp(program: str, path: Path, libraries: Path, listed: str | None) -> str:
    """Which other llama.cpp a program would use, as far as its listed_libraries() tell, or "" if there is none."""
    if listed is None or path.parent.resolve() == libraries:
        return ""
    llama = library_in(listed, "libllama")
    if llama is None:
        return "contains its own llama.cpp" if is_llama_cpp_program(program) else ""
    return "" if llama[1].parent.resolve() == libraries else f"loads {llama[0]} from {llama[1]}"


def check(program: str, path: Path, libraries: Path, environment: Mapping[str, str]) -> None:
    """Reject a program that would use another llama.cpp, and silently run on an ordinary cache.

    Raises SubkvError about `program`.
    """
    if other := other_llama_cpp(program, path, libraries, listed_libraries(path, environment)):
        remedy = f"; {INSTALL}" if is_llama_cpp_program(program) else ""
        reason = f"expected a program that loads {libraries}/libllama.so, found {path}, which {other}{remedy}"
        raise SubkvError("program", reason)


def execute(path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Replace this process by a program. On Windows, run it and return its exit code.

    arguments: the first is the program's name. Raises SubkvError about `program`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        if sys.platform == "win32":
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C
            return subprocess.call(list(arguments), executable=path, env=dict(environment))
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; the program would inherit that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execve(path, list(arguments), dict(environment))
    except (OSError, ValueError) as error:
        raise SubkvError("program", f"cannot run {path}: {system_reason(error)}") from error
