"""A store that replicas share: any of them goes on where another stopped; faults of it cost time only."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import running
from test_serve_prefixes import MOST, SYSTEM, keep, keeping, prefix, same

from runtime.serve.deadline import Deadline
from runtime.serve.prefixes import Prefixes
from runtime.serve.settings import Remembering
from runtime.serve.shared_store import GRAIN, Store, asked, marked
from subkv.base.errors import SubkvError

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")

IDENTITY = {"model": "tiny", "versions": ["1", "2"]}
URLS = (f"memory://prefixes{i}" for i in itertools.count())


class FaultyFileSystem(memory.MemoryFileSystem):  # type: ignore[misc]
    """Memory that fails, hangs, loses or changes what it is asked for, as `fault` says."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False
    fault: Callable[[str, str], None] | None = None
    calls: list[str] = []

    def _meet(self, what: str, path: str) -> None:
        FaultyFileSystem.calls.append(what)
        if FaultyFileSystem.fault is not None:
            FaultyFileSystem.fault(what, path)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._meet("read", path)
        return super().cat_file(path, *args, **kwargs)  # type: ignore[no-any-return]

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> None:
        self._meet("write", path)
        super().pipe_file(path, *args, **kwargs)


class StrictFileSystem(memory.MemoryFileSystem):  # type: ignore[misc]
    """Memory that refuses ranges behind a file's end, as S3 does."""

    protocol = "strict"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if start is not None and start >= self.info(path)["size"]:
            raise OSError(22, "The requested range is not satisfiable")
        return super().cat_file(path, start, end, **kwargs)  # type: ignore[no-any-return]


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
fsspec.register_implementation("strict", StrictFileSystem, clobber=True)


@pytest.fixture(params=["memory", "file", "strict"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    StrictFileSystem.store.clear()
    return {"memory": next(URLS), "file": f"file://{tmp_path}/store", "strict": "strict://prefixes"}[request.param]


@pytest.fixture
def faulty() -> Iterator[str]:
    FaultyFileSystem.store.clear()
    FaultyFileSystem.calls.clear()
    FaultyFileSystem.fault = None
    yield "faulty://prefixes"
    FaultyFileSystem.fault = None


@contextlib.contextmanager
def replica(
    url: str, ram: int = 0, capacity: int = 0, identity: dict[str, Any] = IDENTITY, n_removable: int | None = None
) -> Iterator[Prefixes]:
    with keeping(Prefixes(identity, n_removable, MOST, ram, url, capacity)) as made:
        yield made


def store_of(made: Prefixes) -> Store:
    assert isinstance(made.disk, Store)
    return made.disk


def names(made: Prefixes) -> list[str]:
    return sorted(name for name, _ in store_of(made)._look())


def test_marks_are_few_and_found() -> None:
    """Whoever asks for a prompt finds the mark at the end of what was written of its beginning."""
    for n in (0, 31, 32, 33, 700, 5000, 131_072):
        assert len(marked(n)) <= 64 and all(0 < at <= n for at in marked(n))
        assert len(asked(n)) <= 192 and asked(n) == sorted(set(asked(n)), reverse=True)
    for before in range(100, 9000, 371):
        for more in (1, 40, 4000):
            assert max(set(marked(before)) & set(asked(before + more))) > before - GRAIN


def test_another_replica_goes_on(url: str) -> None:
    text = prefix(SYSTEM, (500,))
    with replica(url) as a, replica(url) as b:
        keep(a, text)
        found = b.find([*SYSTEM, 1, 2], "", 0)
        assert found is not None and found.n_reached == len(SYSTEM) and same(found.prefix, text)
        longer = prefix([*SYSTEM, *SYSTEM[:300]], (500, 1000))
        keep(b, longer)
        again = a.find([*SYSTEM, *SYSTEM[:300], 9], "", 0)
        assert again is not None and again.n_reached == len(SYSTEM) + 300 and same(again.prefix, longer)
        assert a.find([*SYSTEM, 1], "another key", 0) is None


def test_what_conversations_share_is_written_once(url: str) -> None:
    texts = [prefix(SYSTEM + [i] * 40) for i in range(5)]
    with replica(url) as a, replica(url) as b:
        for i, text in enumerate(texts):
            keep(a if i % 2 else b, text)
        assert sum(name.endswith(".rows") for name in names(a)) == len(SYSTEM) // 256 + 5 * ((1040 // 256) - 3)
        for i, text in enumerate(texts):
            found = a.find([*SYSTEM, *[i] * 40, 200], "", 0)
            assert found is not None and found.n_reached == 1040 and same(found.prefix, text)


@pytest.mark.parametrize("other", [{"versions": ["1", "3"]}, {"model": "another"}, {"bases": "other"}])
def test_another_version_finds_nothing(url: str, other: dict[str, Any]) -> None:
    with replica(url) as a, replica(url, identity=IDENTITY | other) as b:
        keep(a, prefix(SYSTEM))
        assert b.find([*SYSTEM, 1], "", 0) is None
        keep(b, prefix(SYSTEM))
        assert a.find([*SYSTEM, 1], "", 0) is not None and b.find([*SYSTEM, 1], "", 0) is not None


def test_two_write_one_entry(url: str) -> None:
    """Of the same tokens, and by another batch of other rounding: whoever is read is read whole."""
    one, other = prefix(SYSTEM, (500,)), prefix(SYSTEM, (256, 500), window=5001)
    with replica(url) as a, replica(url) as b:
        threads = [threading.Thread(target=keep, args=(made, text)) for made, text in ((a, one), (b, other)) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with replica(url) as c:
        found = c.find([*SYSTEM, 1], "", 0)
        assert found is not None and (same(found.prefix, one) or same(found.prefix, other))


@pytest.mark.parametrize("harm", ["cut", "flip", "zero", "gone", "swapped"])
@pytest.mark.parametrize("kind", [".prompt", ".rows", ".mark"])
def test_what_was_harmed_costs_time_only(url: str, harm: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = prefix(SYSTEM, (500,))
    with replica(url) as a:
        keep(a, text, prefix([3, *SYSTEM[:400]]))
        files = store_of(a)._fs
        of_kind = [store_of(a)._path(name) for name in names(a) if name.endswith(kind)]
        contents = [files.cat_file(path) for path in of_kind]
        for path, data, other in zip(of_kind, contents, contents[1:] + contents[:1], strict=True):
            if harm == "gone":
                files.rm_file(path)
                continue
            half = len(data) // 2
            flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
            files.pipe_file(path, {"cut": data[:-1], "flip": flipped, "zero": b"", "swapped": other}[harm])
    with replica(url) as b:
        found = b.find([*SYSTEM, 1], "", 0)
        assert found is None or (kind == ".mark" and same(found.prefix, text))
        keep(b, text)  # and is made good
    with replica(url) as c:
        found = c.find([*SYSTEM, 1], "", 0)
        assert (found is not None and same(found.prefix, text)) or kind == ".rows"


@pytest.mark.parametrize("kind", [".prompt", ".rows", ".mark", ""])
def test_what_another_gave_up_is_written_again(url: str, kind: str) -> None:
    """Although who has written it a moment ago knows it by heart."""
    text = prefix(SYSTEM, (500,))
    with replica(url) as a, replica(url) as b:
        keep(a, text)
        for name in names(b):
            if name.endswith(kind):
                store_of(b).remove(name)
        keep(a, text)
        found = b.find([*SYSTEM, 1], "", 0)
        assert found is not None and same(found.prefix, text)


def test_what_is_gone_is_not_marked_as_used(url: str) -> None:
    with replica(url) as made:
        keep(made, prefix(SYSTEM, (500,)))
        (entry,) = (name for name in names(made) if name.endswith(".prompt"))
        assert store_of(made).touch(entry)
        for name in names(made):
            store_of(made)._fs.rm_file(store_of(made)._path(name))
        assert not store_of(made).touch(entry) and not names(made)


def test_what_is_used_stays_as_a_whole(tmp_path: Path) -> None:
    """With its blocks and its marks: an entry without them is of no use to anybody."""
    text, other = prefix(SYSTEM, (500,)), prefix([9, *SYSTEM])
    with replica(f"file://{tmp_path}") as made:
        keep(made, text)
        own = set(names(made))
        keep(made, other)
        for path in tmp_path.iterdir():
            os.utime(path, (1e9, 1e9))
        assert made.find([*SYSTEM, 1], "", 0) is not None
        assert {path.name for path in tmp_path.iterdir() if path.stat().st_mtime > 1e9} == own
        for path in tmp_path.iterdir():
            os.utime(path, (1e9, 1e9))
        keep(made, other)  # it is there: that is a use, too
        assert {path.name for path in tmp_path.iterdir() if path.stat().st_mtime > 1e9} == set(names(made)) - own


def test_marks_that_lead_nowhere_cost_one_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prefix(SYSTEM[:300])
    with replica(url) as a, replica(url) as b:
        keep(a, text)
        store, identity, asked_for = store_of(a), a.identity(""), [*SYSTEM, 1]
        gone = {store._mark(identity, np.array(SYSTEM[:n], np.int32)): n for n in range(320, 1000, GRAIN)}
        begin = next(name for name in names(a) if name.endswith(".prompt")).partition("-")[0]
        store._pipe({name: f"{begin}-{n:032x}.prompt".encode() for name, n in gone.items()})
        calls, call = [], store_of(b).deadline.call
        monkeypatch.setattr(store_of(b).deadline, "call", lambda work: calls.append(work) or call(work))
        found = b.find(asked_for, "", 0)
        assert found is not None and found.n_reached == 300 and same(found.prefix, text)
        assert len(calls) <= 6  # marks, an entry that is gone, which others are, an entry, its blocks, their use
        (other,) = (name for name in names(a) if name.endswith(".prompt"))
        led = next(iter(gone))
        store._pipe({led: other.encode()})  # meanwhile it leads somewhere
        assert gone.keys() < set(names(a))
        keep(b, prefix([9, *SYSTEM[:300]]))
        assert gone.keys() & set(names(a)) == {led}
        assert b.find(asked_for, "", 0) is not None


def test_a_look_that_fails_is_made_up_for(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    one = prefix(SYSTEM[:300]).n_bytes + 4000
    capacity = 5 * one
    with replica(url, capacity=capacity) as made:
        store = store_of(made)
        listed = store._listed

        def refused() -> Any:
            raise OSError("no list today")

        for i in range(12):
            store._listed = refused if i % 2 else listed  # type: ignore[method-assign]
            keep(made, prefix([i, *SYSTEM[:300]]))
        store._listed = listed  # type: ignore[method-assign]
        keep(made, prefix([12, *SYSTEM[:300]]))
        assert sum(size for _, (size, _) in store._look()) <= capacity
        assert "no list today" in capfd.readouterr().err


def test_folders_in_a_store_are_others(url: str) -> None:
    one = prefix(SYSTEM[:300]).n_bytes + 4000
    with replica(f"{url}/inner") as inner, replica(url, capacity=5 * one) as made:
        keep(inner, *(prefix([i, *SYSTEM[:300]]) for i in range(8)))
        before = names(inner)
        for i in range(12):
            keep(made, prefix([i, *SYSTEM[:300]]))
            assert made.find([i, *SYSTEM[:300], 7], "", 0) is not None
        assert names(inner) == before


def test_a_store_that_is_down(faulty: str, capfd: pytest.CaptureFixture[str]) -> None:
    class PluginError(Exception):
        pass

    def down(what: str, path: str) -> None:
        raise PluginError("no route to the store")

    with replica(faulty, ram=MOST) as made:
        FaultyFileSystem.fault = down
        keep(made, prefix(SYSTEM), prefix([1, *SYSTEM]))
        assert made.find([*SYSTEM, 1], "", 0) is not None  # from memory
        assert made.find([5, *SYSTEM], "", 0) is None
        assert made.counts.n_failures == 3
        assert capfd.readouterr().err.count("no route to the store") == 2  # told once for reads, once for writes
        FaultyFileSystem.fault = None
        keep(made, prefix([2, *SYSTEM]))
    with replica(faulty) as other:
        assert other.find([2, *SYSTEM, 1], "", 0) is not None


@pytest.mark.parametrize("at", [".rows", ".prompt", ".mark"])
def test_a_store_that_is_full(faulty: str, at: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Wherever writing stops: nothing is found that is not whole."""

    def full(what: str, path: str) -> None:
        if what == "write" and path.endswith(at):
            raise OSError(28, "No space left on device")

    text = prefix(SYSTEM, (500,))
    FaultyFileSystem.fault = full
    with replica(faulty) as a:
        keep(a, text)
        assert a.counts.n_failures == 1 and "No space left" in capfd.readouterr().err
    FaultyFileSystem.fault = None
    with replica(faulty) as b:
        assert b.find([*SYSTEM, 1], "", 0) is None
        keep(b, text)
        found = b.find([*SYSTEM, 1], "", 0)
        assert found is not None and same(found.prefix, text)


def test_a_store_whose_listing_takes_long(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any other call may: it is waited for, and nothing is closed to those who read."""

    def slow(self: FaultyFileSystem, path: str, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return memory.MemoryFileSystem.ls(self, path, **kwargs)

    text = prefix(SYSTEM, (500,))
    with replica(faulty, capacity=MOST) as made:
        store_of(made).deadline.seconds = 0.1
        monkeypatch.setattr(FaultyFileSystem, "ls", slow)
        keep(made, text)
        found = made.find([*SYSTEM, 1], "", 0)
        assert found is not None and same(found.prefix, text)


def test_a_store_that_hangs(faulty: str, capfd: pytest.CaptureFixture[str]) -> None:
    answer = threading.Event()

    def hang(what: str, path: str) -> None:
        answer.wait(30)

    with replica(faulty) as made:
        keep(made, prefix(SYSTEM))
        store = store_of(made)
        store.deadline = Deadline(0.05, pause=60.0)
        FaultyFileSystem.fault = hang
        assert made.find([*SYSTEM, 1], "", 0) is None
        n = len(FaultyFileSystem.calls)
        for i in range(20):  # nobody waits for it any more, nor asks
            assert made.find([i, *SYSTEM, 1], "", 0) is None
            keep(made, prefix([i, *SYSTEM[:300]]))
        assert len(FaultyFileSystem.calls) == n
        answer.set()
        FaultyFileSystem.fault = None
        store.deadline = Deadline(10.0)
        assert made.find([*SYSTEM, 1], "", 0) is not None
    assert "within 0.05 s" in capfd.readouterr().err


def test_a_store_slower_than_evaluating(faulty: str) -> None:
    """A request waits for it no longer than evaluating takes."""
    answer = threading.Event()
    with replica(faulty) as made:
        keep(made, prefix(SYSTEM))
        FaultyFileSystem.fault = lambda what, path: answer.wait(30) and None
        made.evaluating.seconds, made.setting.seconds = 1e-4, 1e-12
        assert made.find([*SYSTEM, 1], "", 0) is None and made.counts.n_failures == 1
        answer.set()


def test_calls_that_hang_hold_few_threads() -> None:
    answer, deadline = threading.Event(), Deadline(0.01, pause=0.0)
    for _ in range(10):
        with pytest.raises(OSError):
            deadline.call(lambda: answer.wait(30))
    assert sum(thread.name == "store" for thread in threading.enumerate()) <= 4
    answer.set()
    end = time.monotonic() + 10
    while deadline._hanging and time.monotonic() < end:
        time.sleep(0.01)
    assert deadline.call(lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        deadline.call(Path("/nonexistent/file").read_bytes)
    with pytest.raises(OSError, match="KeyError"):
        deadline.call(lambda: {}["x"])  # type: ignore[misc]


def test_the_bound_holds(url: str) -> None:
    one = prefix(SYSTEM[:300]).n_bytes + 4000
    capacity = 5 * one
    with replica(url, capacity=capacity) as made:
        for i in range(12):
            keep(made, prefix([i, *SYSTEM[:300]]))
        assert sum(size for _, (size, _) in store_of(made)._look()) <= capacity
        assert made.find([11, *SYSTEM[:300], 7], "", 0) is not None
        assert made.find([0, *SYSTEM[:300], 7], "", 0) is None
        keep(made, prefix([1, *SYSTEM * 8]))
        assert made.counts.n_dropped == 1


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_clocks_that_differ(tmp_path: Path, skew: float) -> None:
    """The store's own clock tells what is old: what is written now stays."""
    one = prefix(SYSTEM[:300]).n_bytes + 4000
    with replica(f"file://{tmp_path}", capacity=5 * one) as made:
        keep(made, prefix([1, *SYSTEM[:300]]))
        for path in tmp_path.iterdir():
            os.utime(path, (time.time() + skew,) * 2)
        for i in range(2, 12):
            keep(made, prefix([i, *SYSTEM[:300]]))
        assert sum(size for _, (size, _) in store_of(made)._look()) <= 5 * one
        assert skew > 0 or made.find([11, *SYSTEM[:300], 7], "", 0) is not None


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(bytes(1_000_000))
    with replica(f"file://{tmp_path}", capacity=100_000) as made:
        for i in range(3):
            keep(made, prefix([i, *SYSTEM[:100]]))
    assert (tmp_path / "notes.txt").stat().st_size == 1_000_000


def test_urls_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match="cache_store: expected a URL of fsspec, found 'nosuch://x'"):
        Store("nosuch://x", 0, MOST)
    with pytest.raises(SubkvError, match="expected no --cache-disk beside it"):
        Remembering(cache_disk=tmp_path, cache_store="memory://x").check()


def test_what_a_token_costs_is_measured_at_the_start(coded_model: Callable[..., Path]) -> None:
    """And nothing is restored before that is known."""
    with running(coded_model(), n_slots=1, n_ctx=512, remembering=Remembering(16)) as served:
        prefixes = served.service.engine.recall.prefixes
        assert prefixes.measured.wait(20)
        assert prefixes.evaluating.seconds > 0 and prefixes.setting.seconds > 0
        assert served.client.get("/slots").json()[0]["n_tokens"] == 0  # it leaves nothing behind


def test_two_servers_answer_as_one(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    """A conversation that changes its server is not evaluated again, and gets the answer that it would have got."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    ask: dict[str, Any] = {"prompt": text, "max_tokens": 12, "temperature": 0, "min_tokens": 12}
    shared = Remembering(cache_ram=0, cache_store=f"file://{tmp_path}/store")

    def turn(served: Any, prompt: str) -> tuple[str, int]:
        served.service.engine.recall.prefixes.evaluating.seconds = 1.0  # tiny models are faster than any store
        answer = served.client.post("/v1/completions", json=ask | {"prompt": prompt}).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(coded_model(), remembering=shared) as a:
        first, n = turn(a, text)
        assert n == 0
        assert a.idle()
        settle(a)
        alone, _ = turn(a, text + first + " And then?")
    with running(coded_model(), remembering=shared) as b:
        moved, n = turn(b, text + first + " And then?")
        assert n > 100 and moved == alone


def settle(served: Any) -> None:
    """Wait until what the slots hold is in the store."""
    engine = served.service.engine
    end = time.monotonic() + 10
    while any(slot.unsaved for slot in engine.slots if slot.tokens) and time.monotonic() < end:
        time.sleep(0.02)
    assert engine.recall.prefixes.settle()
