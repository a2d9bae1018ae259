"""Atomic file writes, and checks of paths."""

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

from subkv.base.errors import SubkvError, system_reason

T = TypeVar("T")

# names of temporary files of replacing()
TEMPORARY = re.compile(r"\.(?P<name>.+?)\.\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
BUSY_SECONDS = 2.0
STALE_SECONDS = 3600.0  # older temporary files are of killed processes


def check_writable(path: Path) -> None:
    """Reject an output path that cannot be written, before a long run starts.

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
        raise SubkvError("output", f"cannot write {path}: {system_reason(error)}") from error


def other_writers(path: Path) -> str:
    """Who else can write to a file or folder that is believed without a key; "": only this user and root, or no file.

    As other_writers() of runtime/native/base/owner.h. Windows has no owners in this sense.
    """
    try:
        status = os.stat(path)
    except OSError:  # whoever reads it says why it cannot
        return ""
    if sys.platform == "win32":
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"owner {status.st_uid} (chown it to user {os.geteuid()})"
    return f"mode {stat.S_IMODE(status.st_mode):04o} (chmod go-w)" if status.st_mode & stat.S_IWOTH else ""


def check_owner(path: Path, key: str) -> None:
    """Reject a file or folder that another user can write to. Raises SubkvError about `key`."""
    if others := other_writers(path):
        raise SubkvError(key, f"expected a path that only this user can write to, found {others}: {path}")


def check_new(path: Path, overwrite: bool) -> None:
    """Reject an existing output file, unless it may be overwritten. Raises SubkvError."""
    if path.is_file() and not overwrite:
        raise SubkvError("output", f"expected a file that does not exist yet, found {path}; -y overwrites it")


def check_not_input(path: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Reject an output path that is also an input; each input has a name for the message. Raises SubkvError."""
    for name, file in inputs:
        if path.exists() and file.exists() and os.path.samefile(path, file):
            raise SubkvError("output", f"expected another file than {name}, found {path}")


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for pipes, which would block."""
    handle = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise OSError(errno.EINVAL, "expected a regular file, found another kind", os.fspath(path))
    return handle


def exists(path: Path) -> bool:
    """Whether a path exists. Raises OSError if the system cannot tell; os.path.exists is False then."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    return True


def _without_waiting(path: str, flags: int) -> int:
    return _retry_while_busy(path, os.open, path, flags | getattr(os, "O_NONBLOCK", 0))


def _retry_while_busy(path: str | Path, act: Callable[..., T], *arguments: Any) -> T:
    """act(*arguments). On Windows, retry for BUSY_SECONDS while another process reads or replaces `path`."""
    end = time.monotonic() + (BUSY_SECONDS if sys.platform == "win32" else 0.0)
    while True:
        try:
            return act(*arguments)
        except PermissionError:
            if time.monotonic() >= end or os.path.isdir(path):
                raise
            time.sleep(0.02)


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Remove temporary files of killed processes in a folder: those of one file `name`, or all.

    Files younger than an hour are kept, because another process may be writing them. Errors are ignored.
    """
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            match = TEMPORARY.fullmatch(file.name)
            if match and name in (None, match["name"]):
                with contextlib.suppress(OSError):
                    if now - file.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                        os.unlink(file)


def remove(path: Path) -> None:
    """Remove a file; errors are ignored."""
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` when the block succeeds; on an exception it is removed.

    It is written in the same folder and fsynced before the rename. Raises OSError.
    """
    temporary = _temporary_name(path)
    try:
        with open(temporary, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        _retry_while_busy(path, os.replace, temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_file(path: Path, kind: type[SubkvError] = SubkvError) -> Iterator[BinaryIO]:
    """replacing(path), with OSErrors (disk full, file size limit) as errors about `output` of this kind.

    Removes left-over temporary files of earlier processes.
    """
    remove_stale(path.parent, path.name)
    try:
        with replacing(path) as handle:
            yield handle
    except OSError as error:
        raise kind("output", f"cannot write {path}: {system_reason(error)}; no file was left behind") from error


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, if the system can open folders (not Windows) and sync them."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # the new file itself is synced already
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
