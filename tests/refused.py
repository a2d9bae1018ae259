"""Files that the system cannot open now, for reasons that say nothing about their content."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

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


def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder, as that of a service or a container."""
    for name in ("HOME", "USERPROFILE", "HOMEPATH", "HOMEDRIVE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform != "win32":
        import pwd

        def unknown(uid: int) -> NoReturn:
            raise KeyError(uid)

        monkeypatch.setattr(pwd, "getpwuid", unknown)
