"""Disks that are full, fail, write short or lose their process, at every step of everything that is written.

The file of before stays, or the new one is there, whole; and nothing else in the folder is touched.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from each import each

from subkv.base import container, files
from subkv.base.container import Container
from subkv.base.errors import SubkvError
from subkv.base.files import TEMPORARY, remove_stale
from subkv.format.calibration import read_calibration, write_calibration
from subkv.native.gguf import Gguf, write_copy, write_sidecar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "format"))
from calib_synthetic import random_calibration

Write = Callable[[Path, int], None]  # of version 0 or 1, into a folder
KINDS = ["no space", "error", "short", "killed"]


class Killed(BaseException):
    """Nothing that the process does from here on reaches the disk."""


class Disk:
    """Counts steps and breaks at one of them; a dead one does nothing any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str = "", at: int = 0) -> None:
        self.kind, self.at, self.n, self.dead = kind, at, 0, False
        for name in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self.before(getattr(os, name)))
        monkeypatch.setattr(files, "open", self.open, raising=False)

    def step(self) -> None:
        self.n += 1
        if self.dead or (self.n == self.at and self.kind == "killed"):
            self.dead = True
            raise Killed
        if self.n == self.at:
            raise OSError(errno.EIO if self.kind == "error" else errno.ENOSPC, "broken")

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if call.__name__ != "unlink" or self.dead:  # cleaning up is not a separate step
                self.step()
            return call(*args, **options)

        return called

    def open(self, path: Path, mode: str, **options: Any) -> BinaryIO:
        if mode != "xb":
            return open(path, mode, **options)
        self.step()
        return io.BufferedWriter(Raw(path, self), 64)


class Raw(io.FileIO):
    """At the step of the failure, writes half of its data and reports the number of bytes."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.disk = disk
        super().__init__(path, "x")

    def write(self, data: Any) -> int:
        if self.disk.n + 1 == self.disk.at and not self.disk.dead and self.disk.kind != "no space":
            half = super().write(bytes(data)[: len(data) // 2]) or 0
            if self.disk.kind == "short" and half:
                self.disk.n, self.disk.at = self.disk.n + 1, self.disk.at + 1
                return half
        self.disk.step()
        return super().write(data) or 0


def write_state(folder: Path, version: int) -> None:
    container.write(folder / "state", Container({"a": version}, np.arange(9, dtype=np.int32), b"x%d" % version * 150))


def write_calib(folder: Path, version: int) -> None:
    write_calibration(folder / "calib", random_calibration(n_layer=1, seed=version, samples=1))


@pytest.fixture(params=["state", "calibration", "copy", "sidecar"])
def write(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Write:
    """States and slots, calibrations, converted models and sidecars."""
    name = request.param
    if name in ("state", "calibration"):
        return {"state": write_state, "calibration": write_calib}[name]
    make, base = {"copy": write_copy, "sidecar": write_sidecar}[name], tiny_model("llama")

    def converted(folder: Path, version: int) -> None:
        with Gguf(base) as opened:
            make(opened, folder / "out.gguf", {"general.description": ("str", f"version {version}")})

    return converted


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def versions(folder: Path, write: Write) -> list[dict[str, bytes]]:
    """The folder's contents after each version; version 1 last."""
    found = []
    for version in (0, 1):
        write(folder, version)
        found.append(contents(folder))
    return found


@each("kind", KINDS)
def test_the_old_file_or_the_new_one(write: Write, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").write_bytes(b"mine")
    old, new = versions(tmp_path, write)
    assert old != new and len(old) == 2
    write(tmp_path, 0)
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        write(tmp_path, 1)
    n_steps, n_failed = disk.n, 0
    assert n_steps > 4
    ends = 10  # of the steps at either end every one, of those between some
    steps = range(1, n_steps + 1)
    for at in sorted({*steps[:ends], *steps[-ends:], *steps[:: max(1, n_steps // ends)]}):
        write(tmp_path, 0)
        with monkeypatch.context() as patch:
            disk = Disk(patch, kind, at)
            try:
                write(tmp_path, 1)
                failed = False
            except (OSError, SubkvError, Killed):
                failed = True
        found = contents(tmp_path)
        if kind == "killed":
            left = [name for name in found if TEMPORARY.fullmatch(name)]
            for name in left:
                del found[name]
                os.utime(tmp_path / name, (0, 0))
            remove_stale(tmp_path)
            assert contents(tmp_path) == found, at
        n_failed += failed
        assert found == new or (failed and found == old), (at, n_steps)
    assert n_failed > 3, "nothing broke: the test proves nothing"


def test_a_truncated_file_is_ignored(tmp_path: Path) -> None:
    """A file cut anywhere under its final name, as after a power failure on a disk that reports writes too early."""
    for write, name, read in (
        (write_state, "state", lambda path: container.read(path, "a test")),
        (write_calib, "calib", read_calibration),
    ):
        write(tmp_path, 0)
        whole = (tmp_path / name).read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(SubkvError):
                read(tmp_path / name)
            (tmp_path / name).write_bytes(whole[:size] + b"\0" * (len(whole) - size))
            if name == "state":  # a calibration has no checksum: its numbers are checked, not its bytes
                with pytest.raises(SubkvError):
                    read(tmp_path / name)
