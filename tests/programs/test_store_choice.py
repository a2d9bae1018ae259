"""Which prompt llama-server continues from: a slot's, one in memory or one of the store (SUBKV_STORE).

A request evaluates at most 32 tokens more than the best of them leaves, for any choice of the slot.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from servers import Server, wait_until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGTERM")
N = 400  # tokens of a prompt
LEAST = 32  # tokens that a prompt must save before it replaces a slot's
AGAIN = 32  # tokens before an edit that a coded cache evaluates again
KINDS = ["coded", "ordinary"]
CELLS = {"unified": "--kv-unified", "apart": "--no-kv-unified"}

Tokens = list[int]
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture
def serve(serve: Serve) -> Serve:
    """serve() with two slots of 1,024 tokens by default. kind: one of KINDS."""

    def start(*arguments: Any, kind: str = "coded", **options: Any) -> contextlib.AbstractContextManager[Server]:
        default = ("-np", 2, "-c", 2048, "-b", 256, "-ub", 256, "--no-warmup")
        return serve(*default, *arguments, coded=kind == "coded", **options)

    return start


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def text(seed: int, n: int = N) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(20, 250) for _ in range(n)]


def evaluated(server: Server, prompt: Sequence[int], **options: Any) -> int:
    timings = server.complete(list(prompt), 4, **options)["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == len(prompt)
    return int(timings["prompt_n"])


def left(prompt: Sequence[int], holders: Iterable[Tokens], others: Iterable[Tokens]) -> int:
    """The tokens of a prompt that the best holder leaves.

    Beginnings of `others` do not count, because the store may drop them for these.
    """
    most = 0
    for held in holders:
        n = len(os.path.commonprefix([held, list(prompt)]))
        begins = any(len(other) > len(held) and other[: len(held)] == held for other in others)
        most = max(most, 0 if begins else n)
    return len(prompt) - most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cells", CELLS)
def test_any_order_of_requests(serve: Serve, store: Path, kind: str, cells: str) -> None:
    """Beginnings, continuations and branches of stored prompts, in slots that the request or the server chooses."""
    rng = random.Random(f"{kind}{cells}")
    begin = text(1, 120)
    roots = [begin + text(2 + i, N) for i in range(3)]
    known: list[Tokens] = []
    others: list[Tokens] = []
    for start in range(3):
        with serve(CELLS[cells], kind=kind, SUBKV_STORE=store) as server:
            held: dict[int, Tokens] = {}
            for turn in range(8):
                before = rng.choice([*roots, *known])
                cut = rng.choice([len(before), len(before), rng.randrange(40, len(before))])
                prompt = [*before[:cut], *text(100 * start + turn, rng.choice([1, 20, 60]))][:800]
                slot = rng.choice([-1, 0, 1])
                beside = held.values() if slot < 0 else [held.get(slot, [])]
                expected = left(prompt, [*known, *beside], others)
                answer = server.complete(prompt, 4, id_slot=slot)
                case = (start, turn, slot, len(prompt), expected, answer["timings"])
                again = AGAIN if kind == "coded" else 0
                assert answer["timings"]["prompt_n"] <= expected + LEAST + again, case
                held[answer["id_slot"]] = [*prompt, *answer["tokens"][:-1]]
                others.append(held[answer["id_slot"]])
        known += held.values()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ["", "-sps 0", "--cache-ram 0", "--cache-ram 1"])
def test_a_slot_that_the_request_names(serve: Serve, store: Path, kind: str, options: str) -> None:
    """Empty, or with another prompt."""
    prompt = text(10)
    with serve(*options.split(), kind=kind, SUBKV_STORE=store) as server:
        assert evaluated(server, prompt, id_slot=0) == N
        server.stop()
    with serve(*options.split(), kind=kind, SUBKV_STORE=store) as server:
        assert evaluated(server, prompt, id_slot=0) <= LEAST
        assert evaluated(server, text(11), id_slot=1) == N
        assert evaluated(server, prompt, id_slot=1) <= LEAST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", [-1, 0])
@pytest.mark.parametrize("sleeps", [False, True], ids=["restart", "sleep"])
def test_a_slot_with_the_beginning_of_a_prompt(serve: Serve, store: Path, kind: str, slot: int, sleeps: bool) -> None:
    """It does not hide the stored prompt, after a restart and after sleep."""
    chat = text(20)
    with serve("-np", 1, *(["--sleep-idle-seconds", 1] if sleeps else []), kind=kind, SUBKV_STORE=store) as server:
        evaluated(server, chat)
        if sleeps:
            wait_until("sleep", lambda: "entering sleeping state" in server.log)
            later = contextlib.nullcontext(server)
        else:
            server.stop()
            later = serve("-np", 1, kind=kind, SUBKV_STORE=store)
        with later as second:
            evaluated(second, [*chat[:100], *text(21, 10)], id_slot=slot)
            assert evaluated(second, [*chat, *text(22, 10)], id_slot=slot) <= 10 + LEAST + AGAIN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot", [-1, 0, 1])
def test_memory_without_a_store(serve: Serve, kind: str, slot: int) -> None:
    """The same of prompts in memory: an empty slot, and a slot with the beginning of the prompt."""
    chat = text(30)
    with serve(kind=kind) as server:
        evaluated(server, chat, id_slot=0)
        evaluated(server, text(31), id_slot=0)  # the chat is in memory now
        evaluated(server, [*chat[:100], *text(32, 10)], id_slot=max(slot, 0))
        assert evaluated(server, [*chat, *text(33, 10)], id_slot=slot) <= 10 + LEAST + AGAIN
        assert evaluated(server, [*text(31), *text(34, 10)], id_slot=slot) <= 10 + LEAST + AGAIN


def test_memory_keeps_what_a_slot_removes(serve: Serve) -> None:
    """A branch of a prompt in memory does not take the prompt away."""
    chat = text(40)
    with serve("-np", 1, kind="ordinary") as server:
        evaluated(server, chat)
        evaluated(server, text(41))
        assert evaluated(server, [*chat[:200], *text(42)]) == N
        assert evaluated(server, [*chat, 50]) <= LEAST


@pytest.mark.parametrize("options", ["--no-cache-idle-slots", "--cache-ram 0"])
def test_idle_slots_make_room(serve: Serve, store: Path, options: str) -> None:
    """Slots that share their cells: a stored prompt replaces the oldest idle slots, which are stored."""
    prompts = [text(50 + i, 600) for i in range(4)]
    arguments = ("-np", 3, "-c", 1500, "--kv-unified", *options.split())
    for prompt in prompts:
        with serve(*arguments, SUBKV_STORE=store) as server:
            evaluated(server, prompt)
    with serve(*arguments, SUBKV_STORE=store) as server:
        for i, prompt in enumerate([*prompts, *prompts]):
            assert evaluated(server, prompt, id_slot=i % 3) <= LEAST


def test_a_busy_slot_keeps_its_prompt(serve: Serve) -> None:
    """A request that waits for the slot does not replace the prompt of the running one."""
    running, waiting = text(60), text(61)
    with serve(kind="ordinary") as server:
        expected = server.complete(running, 400, id_slot=1)["tokens"]
        evaluated(server, waiting, id_slot=0)
        evaluated(server, text(62), id_slot=0)  # `waiting` is in memory now
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(server.complete(running, 400, id_slot=0)))
        thread.start()
        server.wait("work", "/slots", lambda slots: slots[0]["is_processing"])
        assert evaluated(server, waiting, id_slot=0) <= LEAST
        thread.join()
    assert answers[0]["tokens"] == expected
