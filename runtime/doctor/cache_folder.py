"""Lists subkv's files in the cache folder by kind, and removes those that are not in use."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import SubkvError, system_reason
from subkv.base.files import STALE_SECONDS, TEMPORARY
from subkv.base.locks import exclusive

# kind -> (description, pattern of file names below the cache folder); the first match counts
KINDS = {
    "bases": ("calibrated bases", r"sidecars/.*-(?P<model>[0-9a-f]{12})\.gguf"),
    "bases from weights": ("of older builds; not used", r"sidecars/.*-(?P<model>[0-9a-f]{12})\.weights\.gguf"),
    "interrupted work": (
        "of convert; it starts anew",
        r"sidecars/(?P<model>[0-9a-f]{12})\..*\.(part|sensing\.npz)|(sidecars/)?\..+\.tmp",
    ),
    "calibrations": ("convert measures again", r"sidecars/(?P<model>[0-9a-f]{12})\.[0-9a-f]+\.calib\.safetensors"),
    "models": ("the demo model, converted; made again in seconds", r"smollm2-135m-instruct-[0-9a-f]{16}\.subkv\.gguf"),
    "model digests": ("computed again in seconds", r"sidecars/[0-9a-f]{32}\.model-digest"),
    "checks": ("results of subkv check; measured again", r"check-[0-9a-f]{16}\.json"),
    "sources": ("llama.cpp's, for a build; downloaded again", r"llama_cpp_python-[\w.]+\.tar\.gz"),
}


@dataclass(frozen=True)
class Cached:
    """A file of subkv. kind: of KINDS; model: digest of the model, which names the lock, if any."""

    path: Path
    kind: str
    size: int
    used: float
    model: str | None


def cached(folder: Path) -> list[Cached]:
    """The files of subkv in the folder, none without a folder. Raises OSError if it cannot be read."""
    files = []
    for name, status in _files(folder):
        for kind, (_, pattern) in KINDS.items():
            if match := re.fullmatch(pattern, name, re.DOTALL):
                model = match.groupdict().get("model")
                files.append(Cached(folder / name, kind, status.st_size, status.st_mtime, model))
                break
    return files


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files of the folder and its subfolder `sidecars`, with names relative to the folder."""
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
    """Remove the files. Returns the removed ones, and a sentence for each that was kept.

    It keeps files of a model that another process is preparing, recent temporary files, and lock files (a removed lock
    file would no longer exclude processes that open it again).
    """
    removed: list[Cached] = []
    reasons: list[str] = []
    for model in sorted({file.model or "" for file in files}):
        own = [file for file in files if (file.model or "") == model]
        with contextlib.ExitStack() as held:
            if model:
                try:
                    lock = next(file.path for file in own).with_name(f"{model}.lock")
                    held.enter_context(exclusive(lock, "use these files"))
                except SubkvError as error:
                    reasons += [f"{file.path}: kept: {error.reason}" for file in own]
                    continue
            for file in own:
                if TEMPORARY.fullmatch(file.path.name) and time.time() - file.used < STALE_SECONDS:
                    reasons.append(f"{file.path}: kept: it may still be written")
                    continue
                try:
                    os.unlink(file.path)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    reasons.append(f"{file.path}: kept: cannot remove it: {system_reason(error)}")
                    continue
                removed.append(file)
    return removed, reasons
