"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from subkv.base.errors import SubkvError

T = TypeVar("T")

# what replacing() writes to, and what it did before names had a random part
TEMPORARY = re.compile(r"\.(?P<name>.+?)\.\d+(\.[0-9a-f]{8})?\.tmp", re.DOTALL)
BUSY_SECONDS = 2.0
STALE_SECONDS = 3600.0  # a file still being written is younger


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def check_writable(path: Path) -> None:
    """Refuse an output path that cannot be written, before a long run is spent on it.

    Creates and removes an empty temporary file in the target's folder. Raises SubkvError.
    """
    if path.is_dir():
        raise SubkvError("output", f"expected a file name, found the folder {path}")
    temporary = _temporary_name(path)
    try:
        with open(temporary, "xb"):
            pass
        os.unlink(temporary)
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "the existing file is read-only")
    except OSError as error:
        raise SubkvError("output", f"cannot write {path}: {_reason(error)}") from error


def check_new(path: Path, overwrite: bool) -> None:
    """Refuse an output path that is a file already, unless it may be overwritten. Raises SubkvError."""
    if path.is_file() and not overwrite:
        raise SubkvError("output", f"expected a file that does not exist yet, found {path}; -y overwrites it")


def check_not_input(path: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Refuse an output path that is one of the inputs, each with its name for the user. Raises SubkvError."""
    for other, given in inputs:
        if path.exists() and given.exists() and os.path.samefile(path, given):
            raise SubkvError("output", f"expected another file than {other}, found {path}")


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for what is no file: a pipe would wait for its writer."""
    handle = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise OSError(errno.EINVAL, "expected a regular file, found something else", os.fspath(path))
    return handle


def is_regular(path: Path) -> bool:
    """Whether there is a file of that name, and no link to one. Raises OSError where nobody may look."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _without_waiting(path: str, flags: int) -> int:
    return _when_free(path, os.open, path, flags | getattr(os, "O_NONBLOCK", 0))


def _when_free(path: str | Path, act: Callable[..., T], *arguments: Any) -> T:
    """act(*arguments). Windows refuses it while another process reads or replaces `path`: BUSY_SECONDS are waited."""
    end = time.monotonic() + (BUSY_SECONDS if sys.platform == "win32" else 0.0)
    while True:
        try:
            return act(*arguments)
        except PermissionError:
            if time.monotonic() >= end or os.path.isdir(path):
                raise
            time.sleep(0.02)


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Remove temporary files that processes left in a folder when they were killed, those of one file `name` or all.

    Younger than an hour they may still be written, perhaps by another machine. What cannot be removed stays.
    """
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            found = TEMPORARY.fullmatch(file.name)
            if found and name in (None, found["name"]):
                with contextlib.suppress(OSError):
                    if now - file.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                        os.unlink(file)


def remove(path: Path) -> None:
    """Remove a file that nobody needs any more; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Binary file that replaces `path` when the block ends well; on any exception nothing stays on disk.

    Temporary file in the same folder, flushed and fsynced before the rename. Raises OSError.
    """
    temporary = _temporary_name(path)
    try:
        with open(temporary, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        _when_free(path, os.replace, temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_file(path: Path, kind: type[SubkvError] = SubkvError) -> Iterator[BinaryIO]:
    """replacing(path) whose OSErrors (disk full, file size limit) become errors about `output`, of this kind.

    What earlier processes left of the same file is removed.
    """
    remove_stale(path.parent, path.name)
    try:
        with replacing(path) as handle:
            yield handle
    except OSError as error:
        raise kind("output", f"cannot write {path}: {_reason(error)}; no file was left behind") from error


def _sync_folder(folder: Path) -> None:
    """Make the rename durable where folders can be opened (not on Windows), and synced (some network file systems)."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # the new file is there, and synced itself
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
