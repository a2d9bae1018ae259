"""Files: non-files, leftovers of killed processes, and files with too large sizes."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from subkv.base import container
from subkv.base.errors import StateError
from subkv.base.files import STALE_SECONDS, atomic_file, open_regular, remove_stale
from subkv.engine.entries import Entry, Folder


def left_behind(folder: Path, name: str, old: bool = True) -> Path:
    path = folder / name
    path.write_bytes(b"half")
    if old:
        os.utime(path, (0, path.stat().st_mtime - 2 * STALE_SECONDS))
    return path


posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes among files")


@posix
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError):
            open_regular(path)
    with pytest.raises(StateError, match="expected a regular file"):
        container.read(tmp_path / "pipe", "a test")


def test_leftover_files_of_killed_processes(tmp_path: Path) -> None:
    stale = left_behind(tmp_path, ".night.1234.0123abcd.tmp")
    kept = [
        left_behind(tmp_path, ".night.77.0123abcd.tmp", old=False),  # may still be written
        left_behind(tmp_path, ".other.1234.0123abcd.tmp"),
        left_behind(tmp_path, ".night.tmp"),
        left_behind(tmp_path, "night.1234.0123abcd.tmp"),
    ]
    with atomic_file(tmp_path / "night") as handle:
        handle.write(b"whole")
    assert not stale.exists() and all(path.exists() for path in kept)
    remove_stale(tmp_path)
    assert [path.exists() for path in kept] == [True, False, True, True]
    assert (tmp_path / "night").read_bytes() == b"whole"


def test_leftover_entries_of_killed_processes(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(Entry(b"i" * 32, np.arange(3, dtype=np.int32), b"state"))
    (name,) = os.listdir(tmp_path)
    left_behind(tmp_path, f".{name}.12.0123abcd.tmp")
    folder.trim(1 << 20)
    assert os.listdir(tmp_path) == [name]


@posix
def test_a_pipe_among_entries(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entry = Entry(b"i" * 32, np.arange(3, dtype=np.int32), b"state")
    other = Entry(b"i" * 32, np.arange(4, dtype=np.int32), b"state")
    os.mkfifo(tmp_path / entry.name())
    folder.write(other)
    assert list(Folder(tmp_path).heads(entry.identity)) == [other.name()]
    folder.write(entry)
    assert len(Folder(tmp_path).heads(entry.identity)) == 2


def test_sizes_that_no_disk_holds(tmp_path: Path) -> None:
    """A sparse file may claim any size, so the size is checked before the file is read."""
    path = tmp_path / "large"
    whole = container.Container({}, np.zeros(1, np.int32), b"x" * 100)
    container.write(path, whole)
    data = bytearray(path.read_bytes())
    n_tokens = 1 << 31
    changed = bytearray(data)
    struct.pack_into("<I", changed, 12, n_tokens)
    struct.pack_into("<I", changed, 24, zlib.crc32(bytes(changed[:24]) + b"{}" + b"\0" * 4))
    path.write_bytes(changed)
    os.truncate(path, 28 + 2 + 4 * n_tokens + 100 + 32)
    with pytest.raises(StateError, match="tokens"):
        container.read(path, "a test")
    path.write_bytes(data)
    assert container.read(path, "a test").state == whole.state
