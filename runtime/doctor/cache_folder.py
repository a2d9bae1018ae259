"""What the cache folder holds, by kind, and removing it: only files of subkv, and none that is in use."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import SubkvError
from subkv.base.files import STALE_SECONDS, TEMPORARY
from subkv.base.locks import exclusive

# kind -> (what it is for people, names of its files below the cache folder); the first that matches counts
KINDS = {
    "bases": ("calibrated bases", r"sidecars/.*-(?P<model>[0-9a-f]{12})\.gguf"),
    "bases from weights": ("made again in seconds", r"sidecars/.*-(?P<model>[0-9a-f]{12})\.weights\.gguf"),
    "interrupted work": (
        "of convert; it starts anew",
        r"sidecars/(?P<model>[0-9a-f]{12})\..*\.(part|sensing\.npz)|(sidecars/)?\..+\.tmp",
    ),
    "calibrations": (
        "convert measures again",
        r"sidecars/(?P<model>[0-9a-f]{12})\.[0-9a-f]+\.calib\.safetensors",
    ),
    "models": ("the demo model, converted; made again in seconds", r"smollm2-135m-instruct-[0-9a-f]{16}\.subkv\.gguf"),
    "sources": ("llama.cpp's, for a build; downloaded again", r"llama_cpp_python-[\w.]+\.tar\.gz"),
}


@dataclass(frozen=True)
class Cached:
    """A file of subkv's. kind: of KINDS; model: digits of the model's content that its lock is named by, if any."""

    path: Path
    kind: str
    size: int
    used: float
    model: str | None


def cached(folder: Path) -> list[Cached]:
    """The files of subkv in the folder. Raises OSError where it cannot be read; none where there is no folder."""
    found = []
    for name, status in _files(folder):
        for kind, (_, pattern) in KINDS.items():
            if match := re.fullmatch(pattern, name, re.DOTALL):
                model = match.groupdict().get("model")
                found.append(Cached(folder / name, kind, status.st_size, status.st_mtime, model))
                break
    return found


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files of the folder and of its `sidecars`, named from the folder on."""
    for below in ("", "sidecars/"):
        try:
            with os.scandir(folder / below) as entries:
                names = sorted(entry.name for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(folder / below / name)
                if stat.S_ISREG(status.st_mode):
                    yield below + name, status


def clear(files: list[Cached]) -> tuple[list[Cached], list[str]]:
    """Remove the files; which went, and a sentence for each that stayed.

    Those of a model that somebody prepares now stay, and temporary files young enough to be written still. Locks
    themselves stay: a file that is removed while others open it locks nobody out.
    """
    gone: list[Cached] = []
    stayed: list[str] = []
    for model in sorted({file.model or "" for file in files}):
        own = [file for file in files if (file.model or "") == model]
        with contextlib.ExitStack() as held:
            if model:
                try:
                    lock = next(file.path for file in own).with_name(f"{model}.lock")
                    held.enter_context(exclusive(lock, "use these files"))
                except SubkvError as error:
                    stayed += [f"{file.path} stays: {error.reason}" for file in own]
                    continue
            for file in own:
                if TEMPORARY.fullmatch(file.path.name) and time.time() - file.used < STALE_SECONDS:
                    stayed.append(f"{file.path} stays: it may still be written")
                    continue
                try:
                    os.unlink(file.path)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    stayed.append(f"{file.path} stays: cannot remove it: {error.strerror or error}")
                    continue
                gone.append(file)
    return gone, stayed
