"""Files: non-files, leftovers of killed processes, and the containers of states."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subkv.base import container
from subkv.base.errors import StateError
from subkv.base.files import STALE_SECONDS, atomic_file, open_regular, remove_stale


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


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda tokens: np.array(tokens, np.int32))
HEADS = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=3)


@given(HEADS, TOKENS, st.binary(max_size=200))
def test_containers_round_trip(head: dict[str, Any], tokens: Any, state: bytes) -> None:
    data = b"".join(container.Container(head, tokens, state).pieces())
    back = container.read_whole(io.BytesIO(data))
    assert (back.head, back.tokens.tolist(), back.state) == (head, tokens.tolist(), state)
    found, listed, n_state = container.read_head(io.BytesIO(data))
    assert (found, listed.tolist(), n_state) == (head, tokens.tolist(), len(state))


@given(TOKENS, st.binary(max_size=200), st.data())
def test_every_damage_is_noticed(tokens: Any, state: bytes, data: st.DataObject) -> None:
    good = b"".join(container.Container({"identity": "x"}, tokens, state).pieces())
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(flipped), good[:at], good + b"\0"):
        with pytest.raises(container.ContainerError):
            container.read_whole(io.BytesIO(bad))


def test_a_container_that_is_none(tmp_path: Path) -> None:
    """A state of an earlier version is a ZIP file; it is refused like any other invalid file."""
    (tmp_path / "old").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(StateError, match=r"path: expected a file written by /save, found another format in .*b'PK"):
        container.read(tmp_path / "old", "/save")
    with pytest.raises(StateError, match="path: cannot read"):
        container.read(tmp_path / "none", "/save")
