"""Text behind another beginning is moved, not evaluated (SUBKV_STORE_MOVED): from a slot, from memory, from a store."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
from moved import append, run_of
from servers import Server, wait_until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGTERM")
N_BEGINS, N_AGAIN = 16, 32  # tokens of a run that are evaluated again: its first and its last ones
N_RECENT = 16  # of the model, which has no more exact rows to restore
ONE = ("-np", 1, "-c", 4096, "--no-warmup")
CELLS = {"unified": "--kv-unified", "apart": "--no-kv-unified"}

Tokens = list[int]
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def some(seed: int, n: int) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(20, 250) for _ in range(n)]


DOCUMENT, QUESTION = some(1, 1500), some(2, 20)
OLD = [*some(3, 50), *DOCUMENT, *some(4, 30)]
BEGINNINGS = {  # of a prompt, and where the text behind it begins in OLD
    "longer": (some(5, 90), 50),
    "shorter": (some(6, 17), 50),
    "as long": (some(7, 50), 50),
    "one token more": ([*OLD[:20], 99], 20),
    "none": ([], 50),
}


def count(answer: Any) -> int:
    """Evaluated tokens."""
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    return int(timings["prompt_n"])


def bound(begin: Tokens, question: Tokens = QUESTION) -> int:
    return len(begin) + N_BEGINS + N_AGAIN + len(question)


@pytest.fixture(scope="module")
def sessions(model: Path) -> Iterator[Callable[[], Any]]:
    opened = engine.Model(model)
    layout = engine.SUBKV.subkv_layout_load(str(model).encode())
    yield lambda: engine.session(opened, layout, n_ctx=4096, threads=1, n_ubatch=512)
    engine.SUBKV.subkv_layout_free(layout)
    opened.free()


def greedy(s: engine.Session, tokens: Tokens, pos: int, n: int = 16) -> Tokens:
    answer = [int(s.decode(tokens, pos)[-1].argmax())]
    while len(answer) < n:
        answer.append(int(s.decode(answer[-1:], pos + len(tokens) + len(answer) - 1)[-1].argmax()))
    return answer


def moved(s: engine.Session, old: Tokens, first: int, begin: Tokens, document: Tokens, question: Tokens) -> Tokens:
    """The greedy text of a cache that is treated as the server's. first: position of the document in `old`."""
    s.decode(old)
    with run_of(s, first + N_BEGINS, len(document) - N_BEGINS) as run:
        same = len(os.path.commonprefix([old, begin]))
        kept = engine.SUBKV.subkv_resume(s.ctx, 0, same) if same else 0
        assert s.rm(0, kept)
        s.decode([*begin, *document[:N_BEGINS]][kept:], kept)
        assert append(s, len(begin) + N_BEGINS, run)
    end = engine.SUBKV.subkv_resume(s.ctx, 0, len(begin) + len(document))
    assert end == len(begin) + len(document) - (N_RECENT - 1)
    assert s.rm(0, end)
    return greedy(s, [*document[end - len(begin) :], *question], end)


@pytest.mark.parametrize("name", BEGINNINGS)
def test_another_beginning(serve: Serve, sessions: Callable[[], Any], name: str) -> None:
    """The text of a cache whose rows were moved by hand; without the option all is evaluated, as before."""
    begin, first = BEGINNINGS[name]
    document = OLD[first : 50 + len(DOCUMENT)]
    prompt = [*begin, *document, *QUESTION]
    with sessions() as s:
        expected = moved(s, OLD, first, begin, document, QUESTION)
    with sessions() as s:  # as the server does it
        s.decode(OLD)
        same = len(os.path.commonprefix([OLD, prompt]))
        kept = engine.SUBKV.subkv_resume(s.ctx, 0, same) if same else 0
        assert s.rm(0, kept)
        evaluated = greedy(s, prompt[kept:], kept)
    for option in ({"SUBKV_STORE_MOVED": 1}, {"SUBKV_STORE_MOVED": 0}, {}):
        moves = option.get("SUBKV_STORE_MOVED") == 1
        with serve(*ONE, "--cache-ram", 0, **option) as server:
            server.complete(OLD, 1)
            answer = server.complete(prompt)
            assert answer["tokens"] == (expected if moves else evaluated)
            assert count(answer) <= bound(begin) if moves else count(answer) == len(prompt) - kept
            assert ("moved to" in server.log) == moves


def from_slot(serve: Serve, store: Path, cells: str) -> Iterator[Server]:
    with serve("-np", 2, "-c", 8192, cells, "--cache-ram", 0, SUBKV_STORE_MOVED=1) as server:
        server.complete(OLD, 1, id_slot=0)
        server.complete(some(8, 100), 1, id_slot=1)
        yield server


def from_memory(serve: Serve, store: Path, cells: str) -> Iterator[Server]:
    with serve("-np", 2, "-c", 8192, cells, SUBKV_STORE_MOVED=1) as server:
        for slot in (1, 0):
            server.complete(OLD if slot else some(8, 100), 1, id_slot=1)
        yield server


def from_store(serve: Serve, store: Path, cells: str) -> Iterator[Server]:
    with serve("-np", 2, "-c", 8192, cells, SUBKV_STORE=store, SUBKV_STORE_MOVED=1) as server:
        server.complete(OLD, 1)
        server.stop()
    with serve("-np", 2, "-c", 8192, cells, SUBKV_STORE=store, SUBKV_STORE_MOVED=1) as server:
        yield server


@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("source", [from_slot, from_memory, from_store])
def test_another_source(serve: Serve, sessions: Callable[[], Any], tmp_path: Path, source: Any, cells: str) -> None:
    """Another slot's prompt, one in memory, one of a store after a restart; again from the moved rows."""
    begin, other = BEGINNINGS["longer"][0], BEGINNINGS["shorter"][0]
    with sessions() as s:
        expected = moved(s, OLD, 50, begin, DOCUMENT, QUESTION)
    with contextlib.contextmanager(source)(serve, tmp_path / "store", CELLS[cells]) as server:
        answer = server.complete([*begin, *DOCUMENT, *QUESTION], id_slot=1)
        assert answer["tokens"] == expected
        assert count(answer) <= bound(begin)
        again = server.complete([*begin, *DOCUMENT, *QUESTION, *QUESTION], id_slot=1)
        assert count(again) <= len(QUESTION) + N_AGAIN
        assert count(server.complete([*other, *DOCUMENT, *QUESTION], id_slot=1)) <= bound(other)


def test_servers_without_the_option_read_no_moved_rows(serve: Serve, tmp_path: Path) -> None:
    """But one with it reads what they stored."""
    begin = BEGINNINGS["longer"][0]
    prompt = [*begin, *DOCUMENT, *QUESTION]
    for moved, n in ((0, len(OLD)), (1, bound(begin)), (0, len(prompt)), (1, 1 + N_AGAIN)):
        with serve(*ONE, SUBKV_STORE=tmp_path / "store", SUBKV_STORE_MOVED=moved) as server:
            evaluated = count(server.complete(OLD if n == len(OLD) else prompt, 1))
            assert evaluated <= n and (moved or evaluated == n)


def test_several_runs_keep_their_order(serve: Serve) -> None:
    one, two, three = some(11, 400), some(12, 400), some(13, 300)
    with serve(*ONE, SUBKV_STORE_MOVED=1) as server:
        assert count(server.complete([*some(14, 30), *one, *some(15, 10), *two, *three], 1)) == 1140
        edited = [*some(16, 60), *one, *two, *some(17, 5), *three, *QUESTION]
        assert count(server.complete(edited, 1)) <= 65 + 3 * (N_BEGINS + N_AGAIN) + len(QUESTION)
        # behind `three`, which moves, nothing does that was before it
        swapped = [*some(18, 10), *three, *one, *QUESTION]
        assert count(server.complete(swapped, 1)) >= 10 + len(three) + len(QUESTION) + N_BEGINS


def test_short_runs_are_evaluated(serve: Serve) -> None:
    with serve(*ONE, SUBKV_STORE_MOVED=1) as server:
        server.complete([*some(21, 30), *DOCUMENT[:255], *some(22, 30)], 1)
        assert count(server.complete([*some(23, 10), *DOCUMENT[:255], *QUESTION], 1)) == 285
        assert count(server.complete([*some(24, 30), *DOCUMENT[:256], *some(22, 30)], 1)) == 316
        assert count(server.complete([*some(25, 10), *DOCUMENT[:256], *QUESTION], 1)) <= bound([0] * 10)


def test_requests_that_end_early(serve: Serve) -> None:
    """Its rows are not given to the next request of the slot."""
    with serve(*ONE, "-b", 64, "-ub", 64, "--cache-ram", 0, SUBKV_STORE_MOVED=1) as server:
        server.complete(OLD, 1)
        begin = some(31, 2000)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        with contextlib.closing(connection):
            body = {"prompt": [*begin, *DOCUMENT, *QUESTION], "stream": True}
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse()  # its prompt is being evaluated
        wait_until("idle", lambda: not server.request("GET", "/slots")[0]["is_processing"])
        answer = server.complete([*begin[:1990], *QUESTION, *DOCUMENT])
        fresh = server.complete([*begin[:1990], *QUESTION, *DOCUMENT], cache_prompt=False)
        assert answer["tokens"] == fresh["tokens"]


def test_no_room(serve: Serve) -> None:
    """Idle slots give up their cells for a request whose rows move."""
    with serve("-np", 2, "-c", 2048, "--kv-unified", "--no-warmup", SUBKV_STORE_MOVED=1) as server:
        server.complete([*some(41, 30), *DOCUMENT[:900]], 1, id_slot=0)
        server.complete(some(42, 900), 1, id_slot=1)
        begin = some(43, 60)
        assert count(server.complete([*begin, *DOCUMENT[:900], *QUESTION], 1, id_slot=1)) <= bound(begin)


@pytest.mark.parametrize("kind", ["ordinary", "draft"])
def test_where_nothing_moves(serve: Serve, words: Path, kind: str) -> None:
    """One line says so."""
    options = ["-md", words, "--spec-type", "draft-simple"] if kind == "draft" else []
    with serve(*ONE, *options, coded=kind != "ordinary", SUBKV_STORE_MOVED=1) as server:
        server.complete(OLD, 1)
        assert count(server.complete([*some(51, 17), *DOCUMENT], 1)) == 1517
        assert server.log.count("SUBKV_STORE_MOVED: nothing is moved") == 1


def test_an_invalid_variable(serve: Serve) -> None:
    why = "SUBKV_STORE_MOVED: expected a number from 0 to 1, found 'yes'"
    with pytest.raises(AssertionError, match=why), serve(*ONE, SUBKV_STORE_MOVED="yes"):
        pass
