"""Kills a process (SIGKILL) at its n-th step of writing, in forks of a process that has imported everything.

    python killed.py         reads lines [work, folder, n] as JSON; answers each with the child's status: -9, or 0 if
                             there was no n-th step

Steps change a folder: opening a file for writing, writing a piece (half of it at the step of the kill), syncing,
renaming and removing.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from subkv.base import container, files
from subkv.base.container import Container

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.truncate", "os.link", "os.symlink", "shutil.move"}
SMALL = ["-c", "128", "--chunks", "4", "-t", "1", "-y"]


class Steps:
    """Counts, and dies at the last one."""

    def __init__(self, n: int) -> None:
        self.left = n
        sys.addaudithook(self.audit)
        files.open = self.open  # type: ignore[attr-defined]
        fsync = os.fsync
        os.fsync = lambda handle: (self.step(), fsync(handle))[1]  # type: ignore[assignment]

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and arguments[0] != os.devnull
        if event in CHANGES or writes:
            self.step()

    def open(self, path: Path, mode: str, **options: Any) -> Any:
        return io.BufferedWriter(Raw(path, self), 64) if mode == "xb" else open(path, mode, **options)


class Raw(io.FileIO):
    def __init__(self, path: Path, steps: Steps) -> None:
        self.steps = steps
        super().__init__(path, "x")

    def write(self, data: Any) -> int:
        if self.steps.left == 1:
            super().write(bytes(data)[: len(data) // 2])
        self.steps.step()
        return super().write(data) or 0


def state(folder: Path) -> None:
    container.write(folder / "state", Container({"a": 1}, np.arange(9, dtype=np.int32), b"x1" * 150))


def convert(folder: Path) -> None:
    """Calibrates, measures, plans, writes; progress is kept in the store."""
    from converter.cli import main

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    main([str(folder / "m.gguf"), "-o", str(folder / "out.gguf"), "--n-recent", "16", *SMALL])


def calibrate(folder: Path) -> None:
    from converter.calibrate import main

    main(["-m", str(folder / "m.gguf"), "-f", str(folder / "text"), "-o", str(folder / "calib"), *SMALL])


WORK: dict[str, Callable[[Path], None]] = {work.__name__: work for work in (state, convert, calibrate)}


def child(work: str, folder: Path, n: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    log = os.open(folder.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 2)
    Steps(n)
    try:
        WORK[work](folder)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    import converter.calibrate
    import converter.cli  # noqa: F401  children begin with it
    import subkv  # noqa: F401

    for line in sys.stdin:
        work, where, at = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(work, Path(where), at)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
