"""Locks between processes, released when the process ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from subkv.base.errors import SubkvError, system_reason


@contextlib.contextmanager
def exclusive(path: Path, action: str) -> Iterator[None]:
    """Hold the lock of a file, which is created and never removed. Raises SubkvError about `lock` if the file cannot be
    written, and at once if another process holds the lock.

    action: for the message, "cannot {action}". The system releases the lock when the process ends, so locks are never
    stale. Without file locks (Windows), two processes may do the same work; files are still written atomically.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        handle = open(path, "a+")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise SubkvError("lock", f"cannot write {path}: {system_reason(error)}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise SubkvError("lock", f"cannot {action}: process {handle.read().strip()} is doing that now") from error
        except OSError:
            pass  # a file system without locks
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield
