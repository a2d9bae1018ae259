"""Damaged, hostile and foreign files of the store of prompts, several processes: never a wrong answer."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import (
    BLOCK,
    IDENTITY,
    Prompt,
    Store,
    forged,
    head_name,
    opened,
    program,
    prompt,
    size,
    state,
    text,
    tokens_of,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "store") as opening:
        yield opening


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    rng = random.Random(f"{path.name}{how}")
    if how == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        data = data[: rng.randrange(len(data))]
    elif how == "longer":
        data += b"x"
    elif how == "zeros":
        data = bytearray(len(data))
    path.unlink()
    if how == "link":
        target = path.with_name("elsewhere")
        target.write_bytes(data)
        path.symlink_to(target)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "unreadable":
        path.write_bytes(data)
        path.chmod(0)
    elif how != "gone":
        path.write_bytes(data)


WAYS = ["bit", "cut", "longer", "zeros", "gone", "link", "pipe", "folder"]


@pytest.mark.parametrize("ending", [".piece", ".prefix"])
@pytest.mark.parametrize("how", WAYS)
def test_damaged_files(tmp_path: Path, how: str, ending: str) -> None:
    """Of every file of a prompt in turn: the prompt is not found, others are, and it can be stored again."""
    tokens, others = text(20, BLOCK + 40), text(21, 60)
    given = prompt(tokens, points=(50,))
    with opened(tmp_path / "whole") as store:
        store.put(prompt(others))
        known = set(store.files())
        store.put(given)
        names = [path.name for path in store.files(ending) if path not in known]
    assert names
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", folder)
        damaged(folder / name, how)
        with opened(folder) as store:
            for _ in range(2):
                assert store.get([*tokens, 1]) is None
                assert store.get([*others, 1])
            elsewhere = folder / "elsewhere"
            assert not elsewhere.exists() or elsewhere.stat().st_size > 0
            if how != "folder":
                assert store.put(given)
                found = store.get([*tokens, 1])
                assert found and found.prompt == given


NOTHING = struct.pack("<IIQ", 0, 0, 0)  # a state without regions, blocks and rest
NAME = hashlib.sha256(b"").hexdigest().encode()


TOKENS = text(30, 300)
BEGIN = IDENTITY.hex().encode() + tokens_of(TOKENS)
HOSTILE = {
    "nothing": b"",
    "identity": b"../../../../etc/passwd".ljust(64, b"/") + tokens_of(TOKENS) + 2 * NOTHING + struct.pack("<I", 0),
    "many tokens": IDENTITY.hex().encode() + struct.pack("<I", 0xFFFFFFFF),
    "more tokens than bytes": IDENTITY.hex().encode() + struct.pack("<I", 1 << 20),
    "many regions": BEGIN + struct.pack("<I", 0xFFFFFFFF),
    "many blocks": BEGIN + struct.pack("<IQII", 1, 0, 8, 0xFFFFFFFF),
    "huge rest": BEGIN + struct.pack("<IIQ", 0, 0, 1 << 63) + NAME,
    "rest of terabytes": BEGIN + struct.pack("<IIQ", 0, 0, 1 << 43) + NAME + NOTHING + struct.pack("<I", 0),
    "path for a piece": BEGIN + struct.pack("<IIQ", 0, 0, 10) + b"../" * 21 + b"x" + NOTHING + struct.pack("<I", 0),
    "rows behind the end": BEGIN
    + struct.pack("<IQIQII", 2, 0, 8, 1 << 43, 8, 1)
    + NAME
    + struct.pack("<Q", 10)
    + NAME
    + NOTHING
    + struct.pack("<I", 0),
    "rows that overlap": BEGIN
    + struct.pack("<IQIQII", 2, 0, 8, 100, 8, 1)
    + NAME
    + struct.pack("<Q", 10)
    + NAME
    + NOTHING
    + struct.pack("<I", 0),
    "rows of nothing": BEGIN + struct.pack("<IQII", 1, 0, 0, 1) + NAME + struct.pack("<Q", 0) + NOTHING + bytes(4),
    "blocks without rows": BEGIN + struct.pack("<II", 0, 1) + NAME + struct.pack("<Q", 0) + NOTHING + bytes(4),
    "many checkpoints": BEGIN + 2 * NOTHING + struct.pack("<I", 0xFFFFFFFF),
    "checkpoint behind the end": BEGIN + 2 * NOTHING + struct.pack("<Iqii", 1, 301, 0, 0) + bytes(24),
    "checkpoint before the start": BEGIN + 2 * NOTHING + struct.pack("<Iqii", 1, -1, 0, 0) + bytes(24),
    "more behind the end": BEGIN + 2 * NOTHING + struct.pack("<I", 0) + b"x",
    "another text's": IDENTITY.hex().encode() + tokens_of(TOKENS[1:]) + 2 * NOTHING + struct.pack("<I", 0),
}


def ordered(*runs: tuple[int, int], n_runs: int | None = None, n_regions: int = 1) -> bytes:
    """A head of version 2, sound but for the order of rows."""
    regions = struct.pack("<Q", 50) + struct.pack("<I", 8)
    order = struct.pack("<I", len(runs) if n_runs is None else n_runs) + b"".join(struct.pack("<II", *r) for r in runs)
    blocks = struct.pack("<I", n_regions) + n_regions * NAME + struct.pack("<Q", 1000) + NAME
    nothing = struct.pack("<IIIQ", 0, 0, 0, 0)
    return BEGIN + struct.pack("<I", n_regions) + n_regions * regions + order + blocks + nothing + struct.pack("<I", 0)


HOSTILE_ORDERS = {
    "many runs": ordered(n_runs=0xFFFFFFFF),
    "more runs than tokens": ordered(*[(i, 1) for i in range(301)]),
    "a run behind the end": ordered((0, 150), (151, 150)),
    "a run of almost all numbers": ordered((0xFFFFFFFF, 300)),
    "runs that overlap": ordered((0, 150), (149, 150)),
    "the same run twice": ordered((0, 150), (0, 150)),
    "a run of nothing": ordered((0, 300), (0, 0)),
    "too few rows": ordered((0, 299)),
    "an order of no rows": ordered((0, 300), n_regions=0),
    "an order in version 1": ordered((150, 150), (0, 150)),
}


@pytest.mark.parametrize("name", [*HOSTILE, *HOSTILE_ORDERS])
def test_hostile_heads(store: Store, name: str) -> None:
    """With valid checksums: refused before any allocation, and removed; other prompts are found."""
    others = text(31, 60)
    store.put(prompt(others))
    path = store.folder / head_name(IDENTITY, TOKENS)
    version = b"1" if name in HOSTILE or name.endswith("version 1") else b"2"
    path.write_bytes(forged({**HOSTILE, **HOSTILE_ORDERS}[name], version))
    found = store.get([*TOKENS, 1])
    assert found is None
    assert store.get([*others, 1])
    assert not path.exists() or name == "rest of terabytes"  # it is larger than everything may be, and is passed over


def test_random_heads(store: Store) -> None:
    """Bytes of a sound head changed at random, with a checksum that fits."""
    others, tokens = text(32, 60), text(33, 300)
    store.put(prompt(others))
    given = prompt(tokens, points=(50, 100))
    moved = [*range(100, 300), *range(100)]
    store.put(Prompt(tokens, (state(tokens, order=moved), given.states[1]), given.points))
    path = store.folder / head_name(IDENTITY, tokens)
    sound = path.read_bytes()
    assert sound.startswith(b"subkvPX2")
    rng = random.Random(34)
    for _ in range(300):
        body = bytearray(sound[72:])
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        path.write_bytes(forged(bytes(body), b"2"))
        with opened(store.folder) as other:
            found = other.get([*tokens, 1])
            assert found is None or found.prompt.tokens == tokens
            assert other.get([*others, 1])


def test_a_file_with_holes(store: Store) -> None:
    """A sparse piece of terabytes is not read."""
    body = BEGIN + struct.pack("<IIQ", 0, 0, 1 << 40) + NAME + NOTHING + struct.pack("<I", 0)
    store.put(prompt(text(35, 60)))
    path = store.folder / head_name(IDENTITY, TOKENS)
    path.write_bytes(forged(body))
    with open(store.folder / f"{NAME.decode()}.piece", "wb") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("no files with holes of a terabyte")
    assert store.get([*TOKENS, 1]) is None


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Files with foreign names are never removed, even if the folder is full."""
    folder = tmp_path / "store"
    folder.mkdir()
    names = ["letter.txt", "a.prefix", f"{'0' * 64}.rows", f"{'g' * 64}.piece", ".x.1.0123456789abcdef.tmp"]
    for name in names:
        (folder / name).write_bytes(b"x" * 10_000)
        os.utime(folder / name, (1, 1))
    (folder / "folder.prefix").mkdir()
    with opened(folder, 200_000) as store:
        for i in range(8):
            store.put(prompt(text(40 + i, 300)))
        assert 0 < len(store.files(".prefix")) < 12
    assert all((folder / name).exists() for name in [*names, "folder.prefix"])


#
# several processes, kills, disks
#

WRITER = """
import sys
from pathlib import Path
from stores import opened, prompt, text
folder, first, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
begin = text(80, 600)
with opened(folder, 400_000) as store:
    for i in range(first, first + n):
        tokens = begin + text(1000 + i, 40)
        store.put(prompt(tokens))
        found = store.get([*tokens, 1])
        assert found is None or found.prompt == prompt(found.prompt.tokens)
        assert store.stats.failures == 0
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    """They write, read and remove prompts in one folder; every prompt found is complete."""
    folder = tmp_path / "store"
    writers = [program(WRITER, folder, 20 * i, 25) for i in range(2)]
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors[-3000:]
    with opened(folder, 400_000) as store:
        begin = text(80, 600)
        found = [store.get([*begin, *text(1000 + i, 40), 1]) for i in range(45)]
        assert sum(one is not None for one in found) >= 2
        assert all(one.prompt == prompt(one.prompt.tokens) for one in found if one)
        assert size(store) <= 500_000


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="whoever is root may write anywhere")
def test_a_folder_that_is_read_only(store: Store) -> None:
    tokens = text(95, 100)
    store.put(prompt(tokens))
    store.folder.chmod(0o500)
    try:
        with opened(store.folder) as other:
            assert other.get([*tokens, 1])
            other.put(prompt(text(96, 100)))
            assert other.stats.failures == 1
            assert other.get([*tokens, 1])
    finally:
        store.folder.chmod(0o700)


def test_a_folder_that_is_removed(store: Store) -> None:
    """By another program: nothing is found, and the folder is created again."""
    tokens = text(97, 100)
    store.put(prompt(tokens))
    shutil.rmtree(store.folder)
    assert store.get([*tokens, 1]) is None
    assert store.put(prompt(tokens))
    assert store.get([*tokens, 1])
    assert store.stats.failures == 0


def test_prompts_of_another_process_are_found(store: Store) -> None:
    """Immediately, without a waiting time, and heads are read once."""
    with opened(store.folder) as other:
        for i in range(20):
            tokens = text(200 + i, 50)
            other.put(prompt(tokens))
            assert store.get([*tokens, 1])
