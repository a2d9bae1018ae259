"""Every step of the store of prompts fails: files, memory, the process. Nothing sound is removed."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

import pytest
from compiled import preloaded
from stores import opened, program, prompt, size, text

FAILING = """
import ctypes, os, shutil, sys
from pathlib import Path
from stores import opened, prompt, text
lib = ctypes.CDLL(None)
fail_file, fail_read, fail_memory, limit_calls = lib.fail_file, lib.fail_read, lib.fail_memory, lib.limit_calls
for function in (fail_file, fail_read, fail_memory):
    function.argtypes, function.restype = [ctypes.c_long, ctypes.c_int], ctypes.c_long
limit_calls.argtypes, limit_calls.restype = [ctypes.c_size_t], None
error = int(sys.argv[2])

def each_step(work, step=1):
    # in a process of its own: work(folder, n) breaks at the n-th step and returns whether there was none
    for n in range(1, 2000, step):
        process = os.fork()
        if not process:
            try:
                os._exit(3 if work(Path(sys.argv[1]) / str(n), n) else 0)
            except BaseException as reason:
                print(repr(reason), file=sys.stderr, flush=True)
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        print(code, flush=True)
        if code == 3:
            break
"""

PUTTING = """
def work(folder, n):
    tokens = text(90, 300)
    with opened(folder) as store:
        store.put(prompt(text(91, 60)))
        fail_file(n, error)
        store.put(prompt(tokens, points=(50,)))
        left = fail_file(0, 0)
        assert store.get([*text(91, 60), 1])
        if left == 0:  # it failed: nothing more is written, what is there is read
            assert store.stats.failures == 1
            assert store.room(1) == -1
            assert not store.put(prompt(text(92, 60)))
            assert store.get([*tokens, 1]) is None
            assert not store.files(".tmp")
        return left

each_step(work)
"""

MAKING_ROOM = """
def work(folder, n):
    with opened(folder, int(sys.argv[3])) as store:
        for i in range(3):
            assert store.put(prompt(text(100 + i, 300)))
        fail_file(n, error)
        for i in range(3, 5):
            store.put(prompt(text(100 + i, 300)))
        return fail_file(0, 0)

each_step(work)
"""

READING = """
whole, given, other = Path(sys.argv[1]) / "whole", prompt(text(90, 300), points=(50,)), prompt(text(91, 60))
with opened(whole) as store:
    store.put(given)
    store.put(other)
names = {path.name for path in whole.iterdir()}

def work(folder, n):
    shutil.copytree(whole, folder)
    os.utime(folder, (1_000_000_000, 1_000_000_000))
    with opened(folder) as store:
        fail_read(n, error)
        found = store.get([*given.tokens, 1])
        left = fail_read(0, 0)
        assert found is None or found.prompt == given
        beside = store.get([*other.tokens, 1])
        assert beside and beside.prompt == other
        if found is None:
            if error == 0:  # pieces that end early are given up
                store.put(given)
            found = store.get([*given.tokens, 1])
            assert found and found.prompt == given
        assert {path.name for path in folder.iterdir()} == names
        assert store.stats.damaged == 0 or error == 0
        return left

each_step(work)
"""

NO_MEMORY = """
whole, given, other = Path(sys.argv[1]) / "whole", prompt(text(90, 300), points=(50,)), prompt(text(91, 60))
lasts = int(sys.argv[3])
with opened(whole) as store:
    store.put(given)
    store.put(other)
names = {path.name for path in whole.iterdir()}
more = prompt(text(92, 70))

def work(folder, n):
    shutil.copytree(whole, folder)
    os.utime(folder, (1_000_000_000, 1_000_000_000))
    with opened(folder) as store:
        fail_memory(n, lasts)
        found = store.get([*given.tokens, 1])
        taken = store.put(more)
        left = fail_memory(0, 0)
        assert found is None or found.prompt == given
        assert names <= {path.name for path in folder.iterdir()}
        assert store.stats.damaged == 0 and store.room(1) == 1
        for one in (given, other):
            found = store.get([*one.tokens, 1])
            assert found and found.prompt == one
        assert store.put(more)
        found = store.get([*more.tokens, 1])
        assert found and found.prompt == more
        return left > 0

each_step(work, 7)
"""

UNREADABLE = """
folder, error, n_prompts, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
before = {path.name for path in folder.iterdir()}
with opened(folder, limit) as store:
    fail_read(-1, error)
    assert store.get([*text(100, 300), 1]) is None
    taken = store.put(prompt(text(99, 300)))
    fail_read(0, 0)
    assert before <= {path.name for path in folder.iterdir()}
    for i in range(n_prompts):
        found = store.get([*text(100 + i, 300), 1])
        assert found and found.prompt == prompt(text(100 + i, 300))
"""

IN_BITS = """
given = prompt(text(90, 300), points=(50,))
for name, most in (("whole", 1 << 30), ("bits", 7)):
    limit_calls(most)
    with opened(Path(sys.argv[1]) / name) as store:
        assert store.put(given)
        found = store.get([*given.tokens, 1])
        assert found and found.prompt == given
"""


HELD = """
import time
from stores import IDENTITY, Prompt, forged, head_name, size, tokens_of
folder, limit = Path(sys.argv[1]), int(sys.argv[3])
hold, waits = lib.hold_removals, lib.removal_waits
hold.argtypes, hold.restype, waits.restype = [ctypes.c_long], None, ctypes.c_bool
last, new = (prompt(text(120 + i, 300)) for i in range(2))
with opened(folder) as store:
    store.put(last)
    store.put(Prompt(text(1, 40), (b"s", b"")))
    body = (folder / head_name(IDENTITY, text(1, 40))).read_bytes()[72:]
    for i in range(1300):
        tokens = [*text(1, 39), i + 2000]
        path = folder / head_name(IDENTITY, tokens)
        path.write_bytes(forged(body[:64] + tokens_of(tokens) + body[64 + 4 + 160 :]))
        os.utime(path, (1000 + i, 1000 + i))

def wait(condition):
    while not condition():
        time.sleep(0.01)

with opened(folder, limit) as store:
    assert store.get([*last.tokens, 1])
    hold(0)
    store.queue(new)
    wait(waits)
    before = len(store.files())
    for _ in range(2):
        assert store.get([*last.tokens, 1]).prompt == last
        assert store.common(last.tokens) == 300
        assert store.stats.entries > 1 and store.room(1) == 1
    assert len(store.files()) == before
    hold(1050)
    assert store.flush()  # of the write, not of all that has to be removed
    wait(waits)
    for one in (last, new):
        assert store.get([*one.tokens, 1]).prompt == one
    assert size(store) > limit
    hold(-1)
    wait(lambda: store.stats.bytes <= limit)
    assert size(store) <= limit
    for one in (last, new):
        assert store.get([*one.tokens, 1]).prompt == one
"""


LISTED = """
folder, n_files = Path(sys.argv[1]), int(sys.argv[3])
given = prompt(text(130, 300))
with opened(folder) as store:
    store.put(given)
for i in range(n_files):
    (folder / f"{i:064x}.piece").touch()
with opened(folder) as store:
    counts = []
    for name in "abcd":
        (folder / f"{name * 64}.piece").touch()
        lib.files_listed()
        assert store.get([*given.tokens, 1])
        counts.append(lib.files_listed())
print(*counts)
"""


def failing(program_text: str, folder: Path, shim: str, error: int = 0, *more: object) -> list[int]:
    """The exit status at each step: -9 killed, 0 continued; 3 if there was no such step."""
    process = program(FAILING + program_text, folder, error, *more, preload=shim)
    printed, errors = process.communicate()
    codes = list(map(int, printed.split()))
    assert process.returncode == 0 and {*codes} <= {0, 3, -9}, errors[-3000:]
    return codes


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs LD_PRELOAD")
    return preloaded(Path(__file__).with_name("failing_files.cpp"), tmp_path_factory.mktemp("shim"))


BROKEN = {"killed": 0, "broken": errno.EIO, "full": errno.ENOSPC, "read-only": errno.EROFS}


@pytest.mark.parametrize("how", BROKEN)
def test_every_step_of_writing(shim: str, tmp_path: Path, how: str) -> None:
    """It fails, or the process ends there: the prompt before is found, this one is not, until it is put again."""
    given = prompt(text(90, 300), points=(50,))
    codes = failing(PUTTING, tmp_path, shim, BROKEN[how])
    assert codes[-1] == 3 and len(codes) > 20
    for n, code in enumerate(codes[:-1], 1):
        assert code == (-9 if how == "killed" else 0)
        with opened(tmp_path / str(n)) as store:
            assert store.get([*text(91, 60), 1])
            assert store.get([*given.tokens, 1]) is None
            assert store.put(given)
            found = store.get([*given.tokens, 1])
            assert found and found.prompt == given


@pytest.mark.parametrize("how", ["killed", "broken"])
def test_every_step_of_making_room(shim: str, tmp_path: Path, how: str) -> None:
    """Three prompts fit; removing the first ones is interrupted: prompts found are complete, and limits hold."""
    given = [prompt(text(100 + i, 300)) for i in range(5)]
    with opened(tmp_path / "three") as store:
        for one in given[:3]:
            store.put(one)
        most = size(store) + 1000
    codes = failing(MAKING_ROOM, tmp_path, shim, BROKEN[how], most)
    assert codes[-1] == 3 and len(codes) > 40
    for n, code in enumerate(codes[:-1], 1):
        assert code == (-9 if how == "killed" else 0)
        with opened(tmp_path / str(n), most) as store:
            found = [store.get([*one.tokens, 1]) for one in given]
            assert sum(one is not None for one in found) >= 1
            assert all(one is None or one.prompt == expected for one, expected in zip(found, given, strict=True))
            for one in given:
                assert store.put(one)
            last = store.get([*given[-1].tokens, 1])
            assert last and last.prompt == given[-1]
            assert size(store) <= most


def test_no_request_waits_for_eviction(shim: str, tmp_path: Path) -> None:
    """While a file is removed, prompts are found and stored; the rest of a long eviction follows the write."""
    with opened(tmp_path / "one") as store:
        store.put(prompt(text(120, 300)))
        most = 5 * size(store) // 2
    process = program(FAILING + HELD, tmp_path / "store", 0, most, preload=shim)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]


def test_a_query_asks_for_new_files_only(shim: str, tmp_path: Path) -> None:
    """In a folder of many files, which another process changes all the time: for those and for the heads."""
    counts = []
    for n in (10, 3000):
        process = program(FAILING + LISTED, tmp_path / str(n), 0, n, preload=shim)
        printed, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        first, *others = map(int, printed.split())
        assert first > n
        counts.append(others)
    assert counts[0] == counts[1] == [2, 2, 2]


CANNOT = {"broken": errno.EIO, "files": errno.EMFILE, "access": errno.EACCES, "memory": errno.ENOMEM}


@pytest.mark.parametrize("error", [*CANNOT.values(), 0], ids=[*CANNOT, "end"])
def test_every_step_of_reading(shim: str, tmp_path: Path, error: int) -> None:
    """A step fails or reaches the end of the file: the prompt is missing or complete; other files stay."""
    codes = failing(READING, tmp_path, shim, error)
    assert codes[-1] == 3 and len(codes) > 8  # one per file


def test_short_writes_and_reads(shim: str, tmp_path: Path) -> None:
    """Disks may write and read fewer bytes than requested."""
    assert failing(IN_BITS, tmp_path, shim) == []
    whole, bits = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "bits"))
    assert whole == bits


@pytest.mark.parametrize("lasts", [0, 1], ids=["once", "lasting"])
def test_every_allocation(shim: str, tmp_path: Path, lasts: int) -> None:
    """Of a query and of a write: both may be given up, nothing is removed, and later everything is found."""
    codes = failing(NO_MEMORY, tmp_path, shim, 0, lasts)
    assert codes[-1] == 3 and len(codes) > 60


@pytest.mark.parametrize("room", [True, False], ids=["room", "full"])
@pytest.mark.parametrize("how", CANNOT)
def test_old_prompts_that_cannot_be_read_now(shim: str, tmp_path: Path, how: str, room: bool) -> None:
    """They are not leftovers of killed processes, and do not make room for a new one."""
    folder = tmp_path / "store"
    with opened(folder) as store:
        for i in range(3):
            store.put(prompt(text(100 + i, 300)))
        limit = 2 * size(store) if room else size(store) + 1000
    for path in folder.iterdir():
        os.utime(path, (time.time() - 7200,) * 2)
    process = program(FAILING + UNREADABLE, folder, CANNOT[how], 3, limit, preload=shim)
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]


def test_old_prompts_of_another_version(tmp_path: Path) -> None:
    """Their pieces are unknown and stay while there is room."""
    with opened(tmp_path / "store") as store:
        store.put(prompt(text(110, 300)))
        head = store.files(".prefix")[0]
        head.write_bytes(b"subkvPX9" + head.read_bytes()[8:])
        names = {path.name for path in store.files()}
        for path in store.files():
            os.utime(path, (time.time() - 7200,) * 2)
    with opened(tmp_path / "store") as store:
        assert store.put(prompt(text(111, 300)))
        assert names <= {path.name for path in store.files()}


def test_a_rejected_prompt_keeps_its_files(tmp_path: Path) -> None:
    """The cache may have lacked memory: the next process asks again."""
    tokens = text(112, 100)
    with opened(tmp_path / "store") as store:
        store.put(prompt(tokens))
        files = store.files()
        assert store.get([*tokens, 1], refused=True)
        assert store.get([*tokens, 1]) is None
        assert store.files() == files
    with opened(tmp_path / "store") as store:
        assert store.get([*tokens, 1])
