"""Locks between processes that end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from subkv.base.errors import SubkvError


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file, which is made and stays; nobody waits.

    what: what only one process may do, for the error. The system drops the lock of a process that ended in whatever
    way, so none is ever stale. Where there are no such locks (Windows) nothing is held: files still appear whole or not
    at all, and two processes only do the work twice. Raises SubkvError about `lock`.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        handle = open(path, "a+")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise SubkvError("lock", f"cannot write {path}: {error.strerror or error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise SubkvError(
                "lock", f"expected nobody else to {what}, found process {handle.read().strip()} at it"
            ) from error
        except OSError:
            pass  # a file system without locks
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield
