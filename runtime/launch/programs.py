"""Which program a name means, whether it uses our libraries, and starting it in this process's place."""

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
from subkv.base.errors import SubkvError

INSTALL = "in a clone of subkv, CMAKE_ARGS='-DLLAMA_BUILD=OFF -DSUBKV_PROGRAMS=ON' pip install . installs it"
ENDING = ".exe" if sys.platform == "win32" else ""
_PT_INTERP = 3  # ELF: names the dynamic linker
_LIBLLAMA = re.compile(r"^\s*(libllama\.so\S*) => (.+?)(?: \(0x[0-9a-f]+\))?$", re.M)


def find(program: str, libraries: Path, search: str | None) -> Path:
    """The file of a program: one of llama.cpp's beside our libraries, else by the search path.

    Raises SubkvError about `program`.
    """
    if os.path.basename(program) == program and is_llama_cpp_program(program):
        for folder in (libraries, libraries.parent / "bin"):
            path = folder / (program if program.endswith(ENDING) else f"{program}{ENDING}")
            if path.is_file() and os.access(path, os.X_OK):
                return path
    found = shutil.which(program, path=search)
    if found is None:
        if os.path.basename(program) == program and is_llama_cpp_program(program):
            reason = (
                f"expected one of llama.cpp's programs in {libraries} or on the PATH, found no {program}; {INSTALL}"
            )
            raise SubkvError("program", reason)
        raise SubkvError("program", f"expected a program that can be executed, found no {program}")
    return Path(found)


def linker(path: Path) -> str | None:
    """The dynamic linker that a 64-bit ELF file asks for, "" for a static program; None for other files.

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
            if len(raw) < 40:  # damaged: for the system to refuse
                return None
            kind, _, offset, _, _, length = struct.unpack(f"{order}IIQQQQ", raw)
            if kind == _PT_INTERP:
                handle.seek(offset)
                return os.fsdecode(handle.read(min(length, 4096)).rstrip(b"\0"))
    return ""


def check(program: str, path: Path, libraries: Path, environment: Mapping[str, str]) -> None:
    """Refuse a program that would load another libllama than ours, as far as Linux's dynamic linker can say that.

    It would run, on an ordinary cache, and nobody would know. Raises SubkvError about `program`.
    """
    try:
        interpreter = linker(path)
    except (OSError, ValueError):  # it may be executed and not read, or is damaged
        return
    if interpreter is None or path.parent.resolve() == libraries:
        return
    found = None
    if interpreter:
        # asked to list, glibc's linker runs nothing of the program; others have no such question
        if not re.match(r"ld(-linux|64\.so)", os.path.basename(interpreter)) or not os.path.exists(interpreter):
            return
        listed = subprocess.run(
            [interpreter, "--list", os.path.abspath(path)],
            env=dict(environment),
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
        found = _LIBLLAMA.search(listed.stdout)
        if listed.returncode or (found is None and not is_llama_cpp_program(program)):
            return  # one that lacks a library says so itself; another may have no use for llama.cpp
    elif not is_llama_cpp_program(program):
        return
    if found is None:
        reason = "which brings a llama.cpp of its own"
    elif Path(found[2]).parent.resolve() != libraries:
        reason = f"which loads {found[1]} from {found[2]}"
    else:
        return
    remedy = f"; {INSTALL}" if is_llama_cpp_program(program) else ""
    raise SubkvError(
        "program", f"expected a program that loads {libraries}/libllama.so, found {path}, {reason}{remedy}"
    )


def execute(path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program in this process's place. On Windows wait for it, and return its exit code.

    arguments: the first is the program's name. Raises SubkvError about `program`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        if sys.platform == "win32":
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's
            return subprocess.call(list(arguments), executable=path, env=dict(environment))
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and a program would inherit that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execve(path, list(arguments), dict(environment))
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise SubkvError("program", f"cannot run {path}: {reason}") from error
