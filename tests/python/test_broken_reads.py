"""Reads that fail or end early at every piece: each gives a message, and the remaining files stay readable."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import killed
import pytest

from subkv.base import container, files
from subkv.base.errors import StateError


class Raw(io.FileIO):
    """The n-th read of a file fails or returns the end of the file; every read returns at most 40 bytes, like a slow
    disk.
    """

    left, kind = 0, ""

    def readinto(self, buffer: Any) -> int:
        Raw.left -= 1
        if Raw.left == 0 and Raw.kind == "error":
            raise OSError(errno.EIO, "Input/output error")
        if Raw.left == 0 and Raw.kind == "end":
            return 0
        return super().readinto(memoryview(buffer)[:40]) or 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[Raw]:
    def opened(path: Path, mode: str, **options: Any) -> Any:
        options.pop("opener", None)
        return io.BufferedReader(Raw(path, "r"), 16) if mode == "rb" else open(path, mode, **options)

    monkeypatch.setattr(files, "open", opened, raising=False)
    return Raw


def break_at(disk: type[Raw], kind: str, n: int) -> None:
    disk.kind, disk.left = kind, n


@pytest.mark.parametrize("kind", ["error", "end"])
def test_states(disk: type[Raw], kind: str, tmp_path: Path) -> None:
    killed.state(tmp_path)
    path = tmp_path / "state"
    break_at(disk, "", 0)
    whole = container.read(path, "a test")
    n_reads = -disk.left
    assert n_reads > 8
    for n in range(1, n_reads):
        break_at(disk, kind, n)
        with pytest.raises(StateError, match="cannot read" if kind == "error" else "found another format"):
            container.read(path, "a test")
    break_at(disk, "", 0)
    assert container.read(path, "a test").state == whole.state
