"""kill -9 at every step of every write: a file under its final name is complete, and nothing else is lost.

A killed command resumes, and gives the same result.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import killed
import pytest

from subkv.base import container
from subkv.base.files import TEMPORARY, remove_stale
from subkv.format.calibration import read_calibration
from subkv.native.gguf import Gguf

Kill = Callable[[str, Path, int], int]


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    """kill("convert", folder, n): whether the n-th step came: -9; 0 when the work ended before."""
    with run() as process:
        assert process.stdin and process.stdout

        def ask(work: str, folder: Path, n: int) -> int:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([work, str(folder), n]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            assert status in (-9, 0), (folder.parent / "log").read_text()[-2000:]
            return status

        yield ask


@contextmanager
def run() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, killed.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.stdin:
                process.stdin.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Files by path, without partial files and locks."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    temporary = [name for name, path in found.items() if TEMPORARY.fullmatch(path.name)]
    return {name: found[name].read_bytes() for name in found if name not in temporary and not name.endswith(".lock")}


def check(folder: Path) -> None:
    """Everything under its own name is whole."""
    for name, data in contents(folder).items():
        path = folder / name
        if name == "mine":
            assert data == b"not yours"
        elif name == "state":
            container.read(path, "a test")
        elif name.endswith((".safetensors", "calib", ".part")):
            read_calibration(path)
        elif name.endswith(".gguf"):
            Gguf(path).close()
        else:
            assert name.endswith((".npz", ".entry", ".lock")) or path.parent == folder, name


def begin(folder: Path, model: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "mine").write_bytes(b"not yours")
    (folder / "text").write_text(" ".join(f"{k} and {k * k} words" for k in range(300)))
    shutil.copy(model, folder / "m.gguf")
    return folder


def test_a_small_file(kill: Kill, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Killed at every step, each in a separate folder."""
    model = tiny_model("llama")
    whole = begin(tmp_path / "whole", model)
    assert kill("state", whole, 0) == 0
    for n in range(1, 100):
        folder = begin(tmp_path / str(n), model)
        status = kill("state", folder, n)
        check(folder)
        if status == 0:
            break
        assert kill("state", folder, 0) == 0
        assert contents(folder) == contents(whole), n
        for path in folder.iterdir():
            os.utime(path, (0, 0))
        remove_stale(folder)
        assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    assert n > 6, "hardly any step: the test proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("work", "step"), [("calibrate", 2), ("convert", 6)])
def test_programs(kill: Kill, work: str, step: int, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Killed again and again in one folder, each time later."""
    whole, folder = (begin(tmp_path / name / "folder", tiny_model("llama")) for name in ("whole", "killed"))
    assert kill(work, whole, 0) == 0
    n = 1
    while kill(work, folder, n) != 0:
        check(folder)
        n += 1 if n < 4 else step
    check(folder)
    assert n > 3 * step, "hardly any step: the test proves nothing"
    assert outputs(folder) == outputs(whole)


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if "/" not in name}
