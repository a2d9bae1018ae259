"""What is remembered, without a model: blocks, the two tiers, and whatever befalls the folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.serve import blocks, prefixes, slots
from runtime.serve.blocks import ROWS, Prefix, pack, unpack
from runtime.serve.prefixes import MIB, Prefixes
from runtime.serve.tiers import Disk, Ram
from subkv.base.container import ContainerError
from subkv.engine.checkpoints import Checkpoint

MOST, ROW = 64 * MIB, 96
SYSTEM = [7 * i % 251 for i in range(1000)]
IDENTITY = {"model": "tiny"}


def prefix(tokens: list[int], points: tuple[int, ...] = (), window: int = 5000) -> Prefix:
    """A state as llama.cpp writes it of one layer's keys and values; rows depend on all tokens before them."""
    n = len(tokens)
    sums = np.cumsum(np.array(tokens, np.uint64) * np.arange(1, n + 1, dtype=np.uint64))
    rows = [
        np.stack([(sums * (side + 3) >> shift) & 255 for shift in range(ROW)], 1).astype(np.uint8) for side in (0, 1)
    ]
    cells = np.stack([np.arange(n), np.ones(n), np.zeros(n)], 1).astype("<i4").tobytes()
    tensors = b"".join(struct.pack("<iQ", 1, ROW) + side.tobytes() for side in rows)
    state = b"head" + struct.pack("<I", n) + cells + struct.pack("<II", 0, 1) + tensors + bytes([n % 256]) * window
    held = tuple(Checkpoint(p, (ctypes.c_uint8 * 64)(*[p % 256] * 64)) for p in points)
    return Prefix(np.array(tokens, np.int32), memoryview(bytearray(state)), held)


def same(a: Prefix, b: Prefix) -> bool:
    points = [[(point.n_tokens, bytes(point.state)) for point in made.points] for made in (a, b)]
    return bool(np.array_equal(a.tokens, b.tokens)) and bytes(a.state) == bytes(b.state) and points[0] == points[1]


@contextlib.contextmanager
def keeping(made: Prefixes) -> Iterator[Prefixes]:
    """For which restoring is always faster than a second a token."""
    made.evaluating.took(1.0, 1)
    made.measured.set()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def remembering(
    folder: Path | None = None, ram: int = MOST, disk: int = MOST, n_removable: int | None = None
) -> Iterator[Prefixes]:
    with keeping(Prefixes(IDENTITY, n_removable, MOST, ram, folder, disk)) as made:
        yield made


def keep(made: Prefixes, *given: Prefix, space: str = "") -> None:
    for one in given:
        assert made.keep(one, space)
        assert made.settle()


@pytest.mark.parametrize("n", [5, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS, 1000])
def test_pieces_make_the_same_state(n: int) -> None:
    made = prefix(SYSTEM[:n], (3, n // 2))
    entry, blobs = pack(b"x" * 32, made)
    assert len(entry.more["blocks"]) == n // ROWS
    assert same(unpack(entry, blobs.__getitem__, MOST), made)
    with pytest.raises(ContainerError):
        unpack(entry, blobs.__getitem__, 100)


def test_a_state_without_rows_is_all_rest() -> None:
    made = Prefix(np.arange(2 * ROWS, dtype=np.int32), memoryview(bytearray(os.urandom(4000))))
    entry, blobs = pack(b"x" * 32, made)
    assert not blobs and same(unpack(entry, blobs.__getitem__, MOST), made)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layout": [[-1, 4]]},
        {"layout": [[1 << 40, 96], [0, 96]]},
        {"layout": "x"},
        {"blocks": ["../../etc/passwd"]},
        {"blocks": [3]},
        {"points": [[1]]},
        {"points": [[True, "00" * 32]]},
        {"bytes": "many"},
    ],
)
def test_heads_of_strangers(more: dict[str, Any]) -> None:
    entry, blobs = pack(b"x" * 32, prefix(SYSTEM))
    changed = {**entry.more, **more} if more else {}
    with pytest.raises(ContainerError):
        unpack(type(entry)(entry.identity, entry.tokens, entry.state, changed), blobs.__getitem__, MOST)


def test_ten_conversations_share_their_beginning(tmp_path: Path) -> None:
    texts = [prefix(SYSTEM + [i] * 40) for i in range(10)]
    with remembering(tmp_path) as made:
        keep(made, *texts)
        whole = sum(text.n_bytes for text in texts)
        shared = 9 * (len(SYSTEM) // ROWS) * ROWS * 2 * ROW
        assert made.ram.n_bytes == whole - shared
        on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert on_disk == made.disk.n_bytes < whole - shared + 10 * 8000
        found = made.find([*SYSTEM, *[4] * 60], "", 0)
        assert found is not None and found.n_reached == len(SYSTEM) + 40 and same(found.prefix, texts[4])


def test_the_longest_wins_and_only_where_it_is_faster() -> None:
    with remembering() as made:
        keep(made, prefix(SYSTEM[:100]), prefix([*SYSTEM[:300], 1, 2, 3] * 1), prefix(SYSTEM[:200] + [9] * 400))
        found = made.find(SYSTEM, "", 0)
        assert found is not None and found.n_reached == 300
        assert made.find(SYSTEM, "", 290) is None  # nothing to speak of beyond what a slot holds
        made.evaluating.seconds, made.setting.seconds = 1e-9, 1.0
        assert made.find(SYSTEM, "", 0) is None


def test_tails_that_cannot_be_removed_need_a_checkpoint() -> None:
    with remembering(n_removable=8) as made:
        keep(made, prefix(SYSTEM[:600], (256, 512)))
        for end, n in ((600, 600), (595, 595), (590, 512), (300, 256), (255, 0)):
            found = made.find(SYSTEM[:end] + [250] * 300, "", 0)
            assert (found.n_reached if found else 0) == n


def test_owners_find_their_own_only(tmp_path: Path) -> None:
    with remembering(tmp_path) as made:
        keep(made, prefix(SYSTEM), space="a")
        assert made.find(SYSTEM, "b", 0) is None and made.find(SYSTEM, "", 0) is None
        assert made.find(SYSTEM, "a", 0) is not None
        before = made.ram.n_bytes
        keep(made, prefix(SYSTEM), space="b")
        assert made.ram.n_bytes == 2 * before  # whether another has it tells nothing


def test_a_longer_one_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    with remembering(tmp_path) as made:
        keep(made, prefix(SYSTEM[:400]), prefix(SYSTEM[:800]), prefix(SYSTEM[:300]))
        assert made.ram.n_entries == 1
        assert len(list(tmp_path.glob("*.prompt"))) == 1


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_bounds_hold(tmp_path: Path, where: str) -> None:
    """What saves little for its bytes and was not used for long goes first; what is larger than all is not taken."""
    one = prefix(SYSTEM[:300]).n_bytes
    bound = int(3.6 * one)
    with remembering(tmp_path if where == "disk" else None, 0 if where == "disk" else bound, bound) as made:
        tier = made.disk or made.ram
        for i in range(12):
            keep(made, prefix([i, *SYSTEM[:300]]))
            assert made.find([0, *SYSTEM], "", 0) is not None  # stays, as it is in use
            assert tier.n_bytes <= bound
            assert where == "ram" or sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound
        assert made.find([11, *SYSTEM], "", 0) is not None and made.find([3, *SYSTEM], "", 0) is None
        keep(made, prefix([1, *SYSTEM, *SYSTEM, *SYSTEM, *SYSTEM]))
        assert made.counts.n_dropped == (where == "disk") and made.find([11, *SYSTEM], "", 0) is not None


def test_a_restart_and_another_model(tmp_path: Path) -> None:
    text = prefix(SYSTEM, (500,))
    with remembering(tmp_path) as made:
        keep(made, text)
    with remembering(tmp_path) as made:
        found = made.find([*SYSTEM, 1], "", 0)
        assert found is not None and found.where == "disk" and same(found.prefix, text)
        again = made.find([*SYSTEM, 1], "", 0)
        assert again is not None and again.where == "ram"
    other = Prefixes(IDENTITY | {"model": "another"}, None, MOST, MOST, tmp_path, text.n_bytes + 20000)
    other.evaluating.took(1.0, 1)
    other.measured.set()
    assert other.find([*SYSTEM, 1], "", 0) is None
    keep(other, text)
    assert other.find([*SYSTEM, 1], "", 0) is not None
    other.close()
    with remembering(tmp_path) as made:  # its entry had to go
        assert made.find([*SYSTEM, 1], "", 0) is None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap_for_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def swap_for_link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def swap_for_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def zero(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, flip, swap_for_pipe, swap_for_link, swap_for_folder, zero, Path.unlink])
@pytest.mark.parametrize("kind", ["*.prompt", "*.rows"])
def test_what_was_harmed_costs_time_only(
    tmp_path: Path, harm: Callable[[Path], None], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = prefix(SYSTEM, (500,))
    with remembering(tmp_path, ram=0) as made:
        keep(made, text)
    harm(sorted(tmp_path.glob(kind))[0])
    with remembering(tmp_path, ram=0) as made:
        assert made.find(SYSTEM, "", 0) is None
        keep(made, text)  # and is made good, unless something is in the way
        found = made.find(SYSTEM, "", 0)
        assert found is None or same(found.prefix, text)
        in_the_way = harm in (swap_for_pipe, swap_for_link, swap_for_folder)
        assert found is not None or in_the_way
    if harm is swap_for_link:
        assert (tmp_path / "elsewhere").stat().st_mtime <= time.time()


def test_files_of_others_stay(tmp_path: Path) -> None:
    names = ["notes.txt", "a.prompt", "0.rows", ".x.1.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100_000))
    os.mkfifo(tmp_path / ("0" * 64 + ".rows"))
    one = prefix(SYSTEM[:300])
    with remembering(tmp_path, disk=2 * one.n_bytes) as made:
        for i in range(4):
            keep(made, prefix([i, *SYSTEM[:300]]))
        assert made.find([3, *SYSTEM], "", 0) is not None
    assert all((tmp_path / name).exists() for name in names)


def test_an_entry_without_its_blocks_is_written_again(tmp_path: Path) -> None:
    """Another server has removed them, whose models it was not."""
    text = prefix(SYSTEM, (500,))
    with remembering(tmp_path, ram=0) as made:
        keep(made, text)
        for path in tmp_path.glob("*.rows"):
            path.unlink()
        keep(made, text)
        found = made.find([*SYSTEM, 1], "", 0)
        assert found is not None and same(found.prefix, text)


def test_a_folder_that_is_gone_or_full(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    folder = tmp_path / "kept"
    with remembering(folder, ram=0) as made:
        keep(made, prefix(SYSTEM))
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        assert made.find(SYSTEM, "", 0) is None
        keep(made, prefix(SYSTEM))
        assert made.find(SYSTEM, "", 0) is not None

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("runtime.serve.tiers.replacing", full)
        keep(made, prefix([1, *SYSTEM]), prefix([2, *SYSTEM]))
        assert made.counts.n_failures == 2
        assert capfd.readouterr().err.count("No space left") == 1
        assert made.find(SYSTEM, "", 0) is not None


def test_a_folder_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    with remembering(tmp_path) as made:
        keep(made, prefix(SYSTEM))

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for name in ("unlink", "utime", "mkdir"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr("runtime.serve.tiers.replacing", refused)
    with remembering(tmp_path, disk=1000) as made:  # nor can anything be removed
        found = made.find(SYSTEM, "", 0)
        assert found is not None and found.where == "disk"
        keep(made, prefix([1, *SYSTEM]))
        assert made.find([1, *SYSTEM], "", 0) is not None  # from memory


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: Any) -> None:
    with remembering(tmp_path) as made:
        keep(made, prefix(SYSTEM))
    answer, load = threading.Event(), Disk.load
    monkeypatch.setattr(Disk, "load", lambda *args: answer.wait(20) and load(*args))
    with remembering(tmp_path) as made:
        made.evaluating.seconds = 1e-4  # as long as it waits for
        made.setting.seconds = made.reading["disk"].seconds = 1e-12
        assert made.find(SYSTEM, "", 0) is None
        assert made.find(SYSTEM, "", 0) is None  # at once
        assert made.counts.n_failures == 1
        answer.set()
        made._late.join()
        made.evaluating.seconds = 1.0
        assert made.find(SYSTEM, "", 0) is not None


def test_giving_never_waits(tmp_path: Path, monkeypatch: Any) -> None:
    answer = threading.Event()
    monkeypatch.setattr(Disk, "store", lambda *_: answer.wait(20))
    with remembering(tmp_path) as made:
        for i in range(8):
            made.keep(prefix([i, *SYSTEM[:300]]), "")
            made._taker.drained(time.monotonic() + 10)
        assert made.counts.n_dropped == 8 - 1 - prefixes.N_QUEUED  # one is at work
        assert made.find([7, *SYSTEM], "", 0) is not None  # from memory
        answer.set()


def test_a_turn_more_keeps_the_blocks_it_shares(tmp_path: Path) -> None:
    first, second = prefix(SYSTEM), prefix([*SYSTEM, *SYSTEM[:100]], (900,))
    with remembering(tmp_path, ram=0, disk=second.n_bytes + 20_000, n_removable=0) as made:
        keep(made, first, second)
        found = made.find([*SYSTEM, *SYSTEM], "", 0)
        assert found is not None and same(found.prefix, second)


def test_two_servers_in_one_folder(tmp_path: Path) -> None:
    one = prefix(SYSTEM[:300])
    with remembering(tmp_path, ram=0) as a, remembering(tmp_path, ram=0, disk=3 * one.n_bytes) as b:
        keep(a, prefix([1, *SYSTEM[:300]]))
        found = b.find([1, *SYSTEM], "", 0)
        assert found is not None and found.n_reached == 301
        for i in range(2, 8):
            keep(b, prefix([i, *SYSTEM[:300]]))
        assert a.find([1, *SYSTEM], "", 0) is None  # the other's bound is smaller
        assert a.find([7, *SYSTEM], "", 0) is not None


def test_two_servers_write_the_same(tmp_path: Path) -> None:
    """At once, while a third reads and a fourth clears up: what is found is whole, and nothing is left half-written."""
    texts = [prefix([i, *SYSTEM], (500,)) for i in range(2)]
    with contextlib.ExitStack() as stack:
        a, b, reader = (stack.enter_context(remembering(tmp_path, ram=0)) for _ in range(3))

        def write(made: Prefixes) -> None:
            for text in texts * 8:
                made._with_disk("write", lambda disk, text=text: disk.store(*pack(made.identity(""), text)), "")

        def clear() -> None:
            for _ in range(40):
                for path in [path for path in files(tmp_path) if path.suffix != ".tmp"][::3]:
                    path.unlink(missing_ok=True)
                time.sleep(0.002)

        threads = [
            threading.Thread(target=work, args=args) for work, args in ((write, (a,)), (write, (b,)), (clear, ()))
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for i, text in enumerate(texts):
                found = reader.find([i, *SYSTEM, 1], "", 0)
                assert found is None or same(found.prefix, text)
        for thread in threads:
            thread.join()
        assert a.counts.n_failures == b.counts.n_failures == reader.counts.n_damaged == 0
        write(a)
        for i, text in enumerate(texts):
            found = reader.find([i, *SYSTEM, 1], "", 0)
            assert found is not None and same(found.prefix, text)
        assert not list(tmp_path.glob(".*.tmp"))


def test_servers_of_other_versions_share_a_folder_and_nothing_in_it(tmp_path: Path) -> None:
    with remembering(tmp_path, ram=0) as old:
        keep(old, prefix(SYSTEM))
        for key in ("libsubkv", "fingerprint", "n_seq_max"):
            other = Prefixes(IDENTITY | {key: 2}, None, MOST, 0, tmp_path, MOST)
            other.evaluating.took(1.0, 1)
            other.measured.set()
            assert other.find([*SYSTEM, 1], "", 0) is None
            keep(other, prefix(SYSTEM))
            assert other.find([*SYSTEM, 1], "", 0) is not None
            other.close()
        assert old.find([*SYSTEM, 1], "", 0) is not None and old.counts.n_damaged == 0


def test_checkpoints_that_are_worth_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 128 tokens apart, none where the tail can be removed anyway, six of a long text."""

    def left(n: int, points: tuple[int, ...], n_removable: int | None = 32) -> list[int]:
        made = Prefix(np.zeros(n, np.int32), memoryview(b""), prefix(SYSTEM[:5], points).points)
        return [point.n_tokens for point in slots.thinned(made, n_removable).points]

    assert left(1200, (512, 1000, 1024, 1199)) == [512, 1000]
    assert left(1400, (512, 1000, 1024, 1199)) == [512, 1000, 1199]
    assert left(100, (60,)) == [] and left(400, (200, 300)) == [200]
    assert left(1200, (512, 1199), 0) == [512, 1199] and left(1200, (512,), None) == []
    long = left(9000, (*range(512, 8500, 512), 8600, 8750))
    assert len(long) == slots.N_POINTS and long[-2:] == [8600, 8750]


def test_a_turn_more_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Although it has no checkpoint where that ended; another text that begins alike stays."""
    with remembering(tmp_path, n_removable=0) as made:
        keep(made, prefix(SYSTEM[:600]), prefix([*SYSTEM[:300], 1, 2, 3]), prefix(SYSTEM, (256,)))
        assert made.ram.n_entries == 2 and len(list(tmp_path.glob("*.prompt"))) == 2
        found = made.find([*SYSTEM[:600], 9, 9], "", 0)
        assert found is not None and found.n_reached == 256
        far = prefix([*SYSTEM, *SYSTEM], (256,))
        keep(made, far)
        assert made.ram.n_entries == 3  # as much would have to be evaluated again as is worth an entry


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_clocks_that_differ(tmp_path: Path, skew: float) -> None:
    one = prefix(SYSTEM[:300])
    with remembering(tmp_path, ram=0, disk=int(2.5 * one.n_bytes)) as made:
        keep(made, prefix([1, *SYSTEM[:300]]))
        for path in files(tmp_path):
            os.utime(path, (time.time() + skew,) * 2)
        keep(made, prefix([2, *SYSTEM[:300]]), prefix([3, *SYSTEM[:300]]))
        assert made.find([3, *SYSTEM], "", 0) is not None
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 2.5 * one.n_bytes


def test_killed_while_writing(tmp_path: Path) -> None:
    """Blocks without an entry, and a file half-written, are nobody's: they go when they are old."""
    with remembering(tmp_path, ram=0) as made:
        keep(made, prefix(SYSTEM))
        entry = next(tmp_path.glob("*.prompt"))
        half = tmp_path / f".{entry.name}.123.0123abcd.tmp"
        half.write_bytes(entry.read_bytes()[:50])
        os.utime(half, (1, 1))
        entry.unlink()
    with remembering(tmp_path, ram=0, disk=2 * prefix(SYSTEM).n_bytes) as made:
        assert not half.exists() and made.find(SYSTEM, "", 0) is None
        keep(made, prefix([5, *SYSTEM]), prefix([6, *SYSTEM]))
        assert made.find([6, *SYSTEM], "", 0) is not None
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * prefix(SYSTEM).n_bytes


def test_what_a_block_is_called() -> None:
    data = b"rows"
    assert blocks.address(b"a", data) != blocks.address(b"b", data)
    assert Ram(0).store(*pack(b"x" * 32, prefix(SYSTEM))) is False
