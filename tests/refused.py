"""Files that the system cannot open now, for reasons that say nothing about their content."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REASONS = {"disk": errno.EIO, "files": errno.EMFILE, "access": errno.EACCES, "memory": errno.ENOMEM}


@contextlib.contextmanager
def unreadable(is_refused: Callable[[Path], bool], error: int) -> Iterator[None]:
    """Inside the block, opening these files for reading fails with this error of the system."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and "r" in mode and is_refused(Path(os.fspath(path))):
                raise OSError(error, os.strerror(error), os.fspath(path))
            return function(path, mode, *more, **options)

        return replaced

    before = builtins.open, io.open
    builtins.open, io.open = map(refusing, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.open, io.open = before
