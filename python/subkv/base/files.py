"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from subkv.base.errors import SubkvError


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
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_file(path: Path, kind: type[SubkvError] = SubkvError) -> Iterator[BinaryIO]:
    """replacing(path) whose OSErrors (disk full, file size limit) become errors about `output`, of this kind."""
    try:
        with replacing(path) as handle:
            yield handle
    except OSError as error:
        raise kind("output", f"cannot write {path}: {_reason(error)}; no file was left behind") from error


def _sync_folder(folder: Path) -> None:
    """Make the rename durable where folders can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        return  # some network file systems refuse this; the file itself is already synced
    finally:
        os.close(descriptor)
