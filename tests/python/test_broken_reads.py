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
from subkv.engine.entries import Folder


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


def test_an_entry_that_cannot_be_read_hides_no_other(disk: type[Raw], tmp_path: Path) -> None:
    """A disk that fails in one place; and the file is not taken for damaged."""
    for version in range(3):
        Folder(tmp_path).write(killed.entry(version))
    identity = killed.entry(0).identity
    break_at(disk, "", 0)
    assert len(Folder(tmp_path).heads(identity)) == 3
    n_reads = -disk.left
    for n in range(1, n_reads + 1):
        break_at(disk, "error", n)
        folder = Folder(tmp_path)
        assert len(folder.heads(identity)) >= 2, n
        break_at(disk, "", 0)
        assert len(folder.heads(identity)) == 3
        assert len(list(tmp_path.iterdir())) == 3
