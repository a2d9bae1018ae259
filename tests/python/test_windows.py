"""Features that Python lacks on Windows: programs work without them, or report it (docs/limits.md)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli import COMMANDS, LAB
from subkv.base import files
from subkv.base.locks import exclusive

REPO = Path(__file__).resolve().parents[2]

MODULES = ("fcntl", "grp", "pwd", "readline", "resource", "termios", "tty")
MEMBERS = {
    "os": ("O_NONBLOCK", "fork", "getuid", "register_at_fork", "sched_getaffinity", "sysconf"),
    "select": ("poll",),
    "signal": ("SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGXCPU"),
    "socket": ("AF_UNIX", "TCP_USER_TIMEOUT", "recv_fds", "send_fds"),
}
WITHOUT = f"""
import importlib, os, select, signal, socket, subprocess, sys
import asyncio, gguf, matplotlib.pyplot, prompt_toolkit.output.vt100  # look for it themselves

sys.modules.update(dict.fromkeys({MODULES}))  # importing them fails
for module, names in {MEMBERS}.items():
    for name in names:
        delattr(sys.modules[module], name)
"""


def run_without(*lines: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a Python reduced to its features on Windows."""
    program = "\n".join([WITHOUT, *lines])
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)


RESEARCH = [
    f"research.{name}"
    for name in (
        "evaluate",
        "experiments.cli",
        "experiments.tracker",
        "fisher",
        "load",
        "soak",
        "speculation",
        "tasks.cli",
        "warmstart.cli",
    )
]


def test_every_program_imports() -> None:
    names = [*(module for module, _ in (COMMANDS | LAB).values()), *RESEARCH]
    done = run_without(f"for name in {names}:", "    importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_locks_without_fcntl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with exclusive(tmp_path / "lock", "work"), exclusive(tmp_path / "lock", "work"):
        pass


@pytest.mark.parametrize("platform", ["win32", "linux"])
def test_a_file_in_use_is_replaced_later(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two attempts raise Windows' error; other systems do not wait."""
    replace, n_calls = os.replace, 0

    def refused(source: Path, target: Path) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls < 3:
            raise PermissionError(13, "Access denied")
        replace(source, target)

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "replace", refused)
    (tmp_path / "file").write_bytes(b"old")
    denied = pytest.raises(PermissionError) if platform == "linux" else contextlib.nullcontext()
    with denied, files.replacing(tmp_path / "file") as handle:
        handle.write(b"new")
    assert (tmp_path / "file").read_bytes() == (b"old" if platform == "linux" else b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
