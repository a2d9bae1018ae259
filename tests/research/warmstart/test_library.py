"""The library of summaries: lookups, limits, complete files, and no mixing of models."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from hypothesis import given

from research.warmstart.frame import Frame
from research.warmstart.pooled import Plan, Slots
from research.warmstart.summaries import Library
from research.warmstart.trained import Trained
from subkv.base import container
from subkv.base.errors import SubkvError
from subkv.plan.positions import Pairs

HERE = Path(__file__).resolve().parent
N = 6  # numbers of an embedding
CENTRE = np.ones(N, np.float32)
TRAINED = Trained("a" * 64, Plan(4, 0, 1), (), Frame(Pairs.none(8)), "tokens", CENTRE)


def summary(seed: int = 0) -> Slots:
    rng = np.random.default_rng(seed)
    shapes = [(2, 4, 8), (1, 4, 16)]  # layers may differ
    k, v = ([rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(2))
    return Slots(k, v)


def opened(folder: Path, **more: Any) -> Library:
    """more: capacity, or settings of another trained file."""
    limit = {"capacity": more.pop("capacity")} if "capacity" in more else {}
    return Library(folder, dataclasses.replace(TRAINED, **more), **limit)


def n_bytes(library: Library) -> int:
    return sum(path.stat().st_size for path in library.folder.path.iterdir())


def vector(*values: float) -> Any:
    return CENTRE + np.array([*values, *[0.0] * (N - len(values))], np.float32)


def test_added_entries_are_found(tmp_path: Path) -> None:
    library = opened(tmp_path / "new")
    assert library.nearest(vector(1), 3) == []
    made = [library.add([1, 2, 3, i], vector(1, i), summary(i)) for i in range(4)]
    for found in (library, opened(tmp_path / "new")):  # another process reads the same
        nearest = found.nearest(vector(1, 2), 2)
        assert [entry.name for entry, _ in nearest] == [made[2].name, made[3].name]
        assert nearest[0][1] == pytest.approx(1.0)
        assert nearest[1][1] == pytest.approx(7 / np.sqrt(5 * 10), abs=1e-6)  # centred
        assert nearest[0][0].tokens.tolist() == [1, 2, 3, 2]
        loaded, expected = found.load(nearest[0][0]), summary(2)
        for a, b in zip([*loaded.k, *loaded.v], [*expected.k, *expected.v], strict=True):
            np.testing.assert_array_equal(a, b.astype(np.float16))
        assert [1, 2, 3, 2] in found and [1, 2, 3] not in found
        assert made[2].name not in [e.name for e, _ in found.nearest(vector(1, 2), 9, exclude=[made[2].name])]


@pytest.mark.parametrize("other", [{"identity": "c" * 64}, {"plan": Plan(4, 0, 2)}, {"embedding": "hidden"}], ids=str)
def test_entries_of_others(tmp_path: Path, other: dict[str, Any]) -> None:
    opened(tmp_path).add([1, 2], vector(1), summary())
    library = opened(tmp_path, **other)
    assert library.entries() == []
    with pytest.raises(SubkvError) as caught:
        library.nearest(vector(1), 1)
    expected = "expected prompts summarised for this model and trained file, found 1 of others in"
    assert str(caught.value) == f"folder: {expected} {tmp_path}"
    library.add([1, 2], vector(1), summary())
    assert len(library.entries()) == len(opened(tmp_path).entries()) == 1


def test_bad_arguments(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SubkvError, match="folder: expected a folder, found the file"):
        opened(tmp_path / "file")
    library = opened(tmp_path)
    with pytest.raises(SubkvError, match=r"embedding: expected 6 numbers, found \[3\]"):
        library.nearest(np.ones(3, np.float32), 1)
    with pytest.raises(SubkvError, match=r"embedding: expected 6 numbers, found \[3\]"):
        library.add([1, 2], np.ones(3, np.float32), summary())
    huge = summary()
    huge.k[0][0, 0, 0] = 1e6
    with pytest.raises(SubkvError, match="expected slots that fit 16 bits"):
        library.add([1, 2], vector(1), huge)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    library = opened(tmp_path / ("x" * 300))  # longer than names may be
    assert [1, 2] not in library
    with pytest.raises(SubkvError, match="folder: cannot read"):
        library.nearest(vector(1), 1)
    with pytest.raises(SubkvError, match="folder: cannot write"):
        library.add([1, 2], vector(1), summary())


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def test_damaged_entries_are_reported_and_dropped(tmp_path: Path) -> None:
    tokens = list(range(5))
    library = opened(tmp_path)
    entry = library.add(tokens, vector(1), summary())
    path = tmp_path / entry.name
    data = path.read_bytes()
    state = len(data) - container.N_DIGEST - len(container.load(path).state)
    for at in (0, 8, 12, 16, 24, 30, state // 2, state - 1):  # detected when the folder is read
        path.write_bytes(damaged(data, at))
        assert opened(tmp_path).entries() == []
        assert not path.exists()
    for at in (state, len(data) // 2, len(data) - 1):  # and when a summary is
        path.write_bytes(damaged(data, at))
        fresh = opened(tmp_path)
        (found,) = fresh.entries()
        with pytest.raises(SubkvError, match=f"folder: skipped the damaged entry {entry.name}: "):
            fresh.load(found)
        assert fresh.entries() == [] and not path.exists()
    for n in (0, 20, state + 3, state + 30, len(data) - 5):
        path.write_bytes(data[:n])
        fresh = opened(tmp_path)
        for found in fresh.entries():
            with pytest.raises(SubkvError, match="skipped the damaged entry"):
                fresh.load(found)
        assert fresh.entries() == []
    path.write_bytes(data)
    fresh = opened(tmp_path)
    (found,) = fresh.entries()
    path.unlink()
    with pytest.raises(SubkvError, match="found it removed by another process"):
        fresh.load(found)


def test_heads_that_lie(tmp_path: Path) -> None:
    """Checksums fit, the numbers do not: nothing is allocated for them."""
    library = opened(tmp_path)
    entry = library.add([1, 2], vector(1), summary())
    whole = library.folder.read(entry.name)
    assert whole is not None
    first, second = whole.more["shapes"]
    lies: list[Any] = [None, 7, [], [first], [first, [1]], [first, [*second[:3], 2**31]], [first, [0, *second[1:]]]]
    lies += ["\ud800", first]
    lies += [[[-x for x in first], second], [[float(x) for x in first], second], [second, first, second]]
    for shapes in lies:
        library.folder.write(dataclasses.replace(whole, more={**whole.more, "shapes": shapes}))
        fresh = opened(tmp_path)
        with pytest.raises(SubkvError, match="skipped the damaged entry") as caught:
            fresh.load(fresh.entries()[0])
        assert str(caught.value).encode()  # it can be printed
    for embedding in (None, 7, "?", "AAAA", whole.more["embedding"][:-8]):
        library.folder.write(dataclasses.replace(whole, more={**whole.more, "embedding": embedding}))
        assert opened(tmp_path).entries() == []
        assert not (tmp_path / entry.name).exists()


def test_hostile_entries(tmp_path: Path) -> None:
    """Random bytes, or any heads with valid checksums: dropped, or read as a summary with numbers."""
    library = opened(tmp_path)
    entry = library.add([1, 2], vector(1), summary())
    path = tmp_path / entry.name
    data, whole = path.read_bytes(), library.folder.read(entry.name)
    assert whole is not None

    @damage.SETTINGS
    @given(damage.damaged(data) | damage.changed(whole.more).filter(lambda more: isinstance(more, dict)))
    def check(damaged: Any) -> None:
        if isinstance(damaged, bytes):
            path.write_bytes(damaged)
        else:
            library.folder.write(dataclasses.replace(whole, more=damaged))
        fresh = opened(tmp_path)
        try:
            ((found, similarity),) = fresh.nearest(vector(1), 1) or [(None, 0.0)]
            assert np.isfinite(similarity)
            assert found is None or all(np.isfinite(rows).all() for rows in fresh.load(found).k)
        except SubkvError as error:
            assert str(error).encode()
            assert fresh.entries() == [] and not path.exists()

    check()


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    size = (tmp_path / opened(tmp_path).add([0], vector(1), summary()).name).stat().st_size
    library = opened(tmp_path, capacity=4 * size)
    for i in range(1, 4):
        entry = library.add([i], vector(1, i), summary(i))
        os.utime(tmp_path / entry.name, (1e9 + i, 1e9 + i))
    (first,) = [entry for entry in library.entries() if entry.tokens[0] == 1]
    library.load(first)  # used now
    for i in range(4, 6):
        library.add([i], vector(1, i), summary(i))
    assert sorted(int(entry.tokens[0]) for entry in library.entries()) == [0, 1, 4, 5]
    assert n_bytes(library) <= 4 * size
    other = opened(tmp_path, identity="c" * 64, capacity=size)
    other.add([9], vector(1), summary())
    assert len(library.entries()) == 4  # each bounds its own


WRITER = """
import sys, numpy as np
sys.path[:0] = [{tests!r}, {tests!r} + "/../.."]
from test_library import opened, summary, vector
from pathlib import Path
library = opened(Path(sys.argv[1]), capacity={capacity})
i = 0
while True:
    library.add([7, i], vector(1, i % 50), summary(i))
    print(i, flush=True)
    i += 1
"""


def test_readers_with_a_writer_that_is_killed(tmp_path: Path) -> None:
    """Readers only find complete entries, while entries are added and removed, and after kill -9."""
    folder = tmp_path / "library"
    script = WRITER.format(tests=str(HERE), capacity=40_000)
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        readers = [opened(folder), opened(folder)]
        n_found, end = 0, time.monotonic() + 1.5
        while time.monotonic() < end:
            for reader in readers:
                for entry, _ in reader.nearest(vector(1, 3), 5):
                    try:
                        found = reader.load(entry)
                    except SubkvError as error:
                        assert "removed by another process" in str(error)
                        continue
                    np.testing.assert_array_equal(found.k[0], summary(int(entry.tokens[1])).k[0].astype(np.float16))
                    n_found += 1
        assert n_found > 0
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    library = opened(folder, capacity=40_000)
    assert library.entries()
    for entry in library.entries():
        assert len(library.load(entry).k) == 2
    library.add([1, 1], vector(1), summary())
    assert n_bytes(library) < 60_000


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SubkvError, match="folder: cannot write"):
        opened(tmp_path / "library").add([1, 2], vector(1), summary())
