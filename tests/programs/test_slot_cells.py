"""What a slot claims equals what the cache holds, and stored text is text that was evaluated as it stands.

After random requests (several slots, shared cells, reuse, shifts, a store) every slot is saved: its tokens have the
positions of its cells, and the next token's log-probabilities are those of a fresh evaluation.

SUBKV_SLOT_REQUESTS: groups of requests per server of a longer run; SUBKV_SEED: its seed (a failure names it).
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import valid_requests
from click.testing import CliRunner
from servers import Server
from slot_cells import apart, divergence, idle, next_token, slots
from test_valid_requests import status
from valid_requests import Request

from converter.cli import main as convert

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGTERM")
N_GROUPS = int(os.environ.get("SUBKV_SLOT_REQUESTS", "0"))
SEED = int(os.environ.get("SUBKV_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KINDS = ["coded", "ordinary"]
ONE = ("-np", 1, "-c", 1024, "--no-warmup")
EVALUATED = 0.02
"""Difference of log-probabilities of a text that was evaluated as it stands, by rounding and codes."""
KLD_EVALUATED = 0.001
KLD_MOVED = 0.5
"""Of a text with rows that were evaluated behind another beginning, in a cache where all else is right."""

Tokens = list[int]
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def some(seed: int, n: int) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(20, 250) for _ in range(n)]


PROMPT = some(1, 440)


def cached(answer: Any) -> int:
    return int(answer["timings"]["cache_n"])


#
# cells that slots share
#


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cells", ["--kv-unified", "--no-kv-unified"])
def test_a_part_is_removed_beside_a_sibling(serve: Serve, cells: str, kind: str) -> None:
    """n_cmpl: 2 slots share the cells of a prompt; while one still generates, a part of the other's moves.

    f16: llama.cpp moves the cells of both, which only the other slot's text shows.
    """
    edited = PROMPT[:100] + PROMPT[160:]
    options = ("-np", 3, "-c", 3 * 4096, cells, "--cache-reuse", 16, "--cache-ram", 0, "--no-warmup")
    with serve(*options, coded=kind == "coded") as server:
        server.complete(PROMPT, 1, id_slot=0)
        alone = next_token_at(server, edited, 0)  # moved by a slot that shares nothing
        assert cached(alone) > 300
        for seed in range(30):
            if beside := beside_a_sibling(server, edited, seed):
                break
        assert beside and cached(beside) > 300
        assert apart(alone, beside) < (0.2 if kind == "coded" else EVALUATED), "exact rows, or their codes"


def beside_a_sibling(server: Server, edited: Tokens, seed: int) -> Any:
    """The answer to an edited prompt of slot 1, while its sibling generates; None: both answers ended together."""
    body = {"n_cmpl": 2, "temperature": 1.5, "seed": 2 * seed, "stop": ["ed", "th"], "id_slot": 1}
    with ThreadPoolExecutor(1) as pool:
        both = pool.submit(server.complete, PROMPT, 3000, **body)
        while not both.done():
            busy = {slot["id"]: slot["is_processing"] for slot in server.request("GET", "/slots")}
            if not busy[1] and (busy[0] or busy[2]) and not both.done():
                answer = next_token_at(server, edited, 1)
                return None if both.done() else answer
    return None


def next_token_at(server: Server, prompt: Tokens, at: int) -> Any:
    return server.complete(prompt, 1, n_probs=20, id_slot=at)


#
# text that was moved, and text of others
#


def shifted(server: Server) -> Tokens:
    """A slot whose text has lost its middle; its tokens."""
    server.complete(PROMPT, 700, n_keep=64)
    assert "slot context shift" in server.log
    return PROMPT


def reused(server: Server) -> Tokens:
    server.complete(PROMPT, 4)
    assert cached(server.complete(PROMPT[:100] + PROMPT[200:], 4)) > 300
    return PROMPT[:100] + PROMPT[200:]


MOVES: dict[str, tuple[tuple[Any, ...], Callable[[Server], Tokens]]] = {
    "shift": (("--context-shift",), shifted),
    "reuse": (("--cache-reuse", 16), reused),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("memory", [0, 512])
def test_moved_text_is_not_stored(serve: Serve, tmp_path: Path, kind: str, name: str, memory: int) -> None:
    """Nor after it was in memory, from where a slot gets it back; the text after it is."""
    options, moves = MOVES[name]
    store, coded = tmp_path / "store", kind == "coded"
    saves = ("--slot-save-path", tmp_path)
    with serve(*ONE, *options, *saves, "--cache-ram", memory, coded=coded, SUBKV_STORE=store) as server:
        moves(server)
        idle(server)
        claimed = slots(server, tmp_path)[0]
        if memory:
            server.complete(some(5, 100), 1)
            assert cached(server.complete([*claimed, 7], 1)) >= len(claimed) - 32
        other = some(6, 300)
        server.complete(other, 1)
        server.stop()
    with serve(*ONE, coded=coded, SUBKV_STORE=store) as server:
        answer = server.complete([*claimed, *some(7, 40)], 1)
        assert cached(answer) < 200, "only what was evaluated before the move"
        assert cached(server.complete([*other, *some(8, 40)], 1)) >= len(other) - 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_move_is_forgotten(serve: Serve, tmp_path: Path, kind: str) -> None:
    """The text before the first moved token is evaluated text; so is all text of a slot that was emptied."""
    coded, store = kind == "coded", tmp_path / "store"
    kept = PROMPT[:90] + some(9, 200)
    with serve(*ONE, "--cache-reuse", 16, "--cache-ram", 0, coded=coded, SUBKV_STORE=store) as server:
        reused(server)
        server.complete(kept, 1, n_cache_reuse=0)
        server.stop()
    with serve(*ONE, coded=coded, SUBKV_STORE=store) as server:
        assert cached(server.complete([*kept, *some(8, 40)], 1)) >= len(kept) - 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_of_a_file_is_not_stored(serve: Serve, tmp_path: Path, kind: str) -> None:
    """Its tokens are whatever the file says."""
    coded, store = kind == "coded", tmp_path / "store"
    options = (*ONE, "--slot-save-path", tmp_path, "--cache-ram", 0)
    with serve(*options, coded=coded) as server:
        server.complete(PROMPT, 1)
        server.request("POST", "/slots/0?action=save", {"filename": "a.bin"})
    with serve(*options, coded=coded, SUBKV_STORE=store) as server:
        server.request("POST", "/slots/0?action=restore", {"filename": "a.bin"})
        assert cached(server.complete([*PROMPT, 7], 1)) > 400
        server.stop()
    with serve(*ONE, coded=coded, SUBKV_STORE=store) as server:
        assert cached(server.complete([*PROMPT, *some(8, 40)], 1)) == 0


#
# removals that are refused
#


@pytest.fixture(scope="module")
def wide(words: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the default window, which adaptive bases need."""
    path = tmp_path_factory.mktemp("wide") / "model.gguf"
    arguments = [words, "-f", text_file, "-o", path, "-c", 256, "--chunks", 16, "--codec", "int8"]
    result = CliRunner().invoke(convert, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    return path


@pytest.mark.parametrize("adapt", ["v", "kv,block=16,lookahead=32"])
@pytest.mark.parametrize("n_first", [300, 1556])
def test_adaptive_bases_evaluate_again(serve: Serve, wide: Path, n_first: int, adapt: str) -> None:
    """Any beginning of a prompt, also those that end where its bases were fitted."""
    tokens = some(3, n_first)
    with serve("-np", 1, "-c", 2048, "--cache-ram", 0, "--no-warmup", model=wide, SUBKV_ADAPT=adapt) as server:
        for n in (n_first - 1, n_first - 8, n_first - 40, n_first - 56, n_first - 150, n_first // 2):
            server.complete(tokens, 1)
            again = next_token(server, tokens[:n])
            fresh = next_token(server, tokens[:n], cache_prompt=False)
            assert apart(again, fresh) < EVALUATED


#
# random requests
#

SERVERS: dict[str, tuple[Any, ...]] = {
    "unified": ("-np", 3, "-c", 1536, "--kv-unified", "--kv-unified-per-slot", 512),
    "split": ("-np", 3, "-c", 1536, "--no-kv-unified"),
}
MOVING = ("--context-shift", "--cache-reuse", 16)


def group(rng: random.Random, texts: Sequence[Tokens], moves: bool) -> list[Request]:
    """Requests at the same time, more of which than in valid_requests have several answers."""
    requests = valid_requests.requests(rng, texts)
    for request in requests:
        if request.path.startswith("/slots"):
            continue
        for name in ("lora", *(() if moves else ("n_cache_reuse",))):
            request.body.pop(name, None)
        if rng.randrange(3) == 0:
            several = {"n_cmpl": 2, "seed": rng.randrange(99), "temperature": 1.5, "stop": ["ed", "th"]}
            beginning = rng.choice(texts)[: rng.choice([60, 200, 300])]
            request.body.update(several, prompt=beginning, n_predict=200)
        request.body["ignore_eos"] = True
    return requests


def send(server: Server, requests: Sequence[Request], pauses: Sequence[float]) -> None:
    def one(i: int) -> None:
        time.sleep(pauses[i])
        status(server, requests[i])

    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(one, range(len(requests))))


def run(serve: Serve, folder: Path, words: str, *, name: str, kind: str, moves: bool, seed: int, n: int) -> float:
    """The largest difference between a slot and a fresh evaluation of its text."""
    rng, most, coded = random.Random(seed), 0.0, kind == "coded"
    texts_of_slots: list[Tokens] = []
    store = folder / f"store-{name}-{kind}-{moves}"
    options = (*SERVERS[name], *(MOVING if moves else ()), "--no-warmup")
    with (
        serve(*options, "--slot-save-path", folder, coded=coded, SUBKV_STORE=store) as server,
        serve(*ONE, "--cache-ram", 0, coded=coded) as fresh,
    ):
        tokens = fresh.tokens(words[:6000])
        texts = [tokens[start : start + length] for start, length in valid_requests.TEXTS]
        for i in range(n):
            where = f"SUBKV_SEED={seed}, {name}, {kind}, moves {moves}, group {i}"
            requests = group(rng, texts, moves)
            send(server, requests, [0.0, *(rng.choice([0, 0.02, 0.1]) for _ in requests[1:])])
            assert server.process.poll() is None, (where, requests, server.log[-1500:])
            idle(server)
            for at, claimed in slots(server, folder, coded).items():
                texts_of_slots.append(claimed)
                if len(claimed) >= 500 or rng.randrange(3):
                    continue
                asked = [*claimed, rng.randrange(20, 250)]
                found = divergence(next_token(fresh, asked, cache_prompt=False), next_token(server, asked, id_slot=at))
                most = max(most, found)
                assert found < (KLD_MOVED if moves else KLD_EVALUATED), (where, at, len(claimed), found, requests)
        server.stop()
        check_store(serve, name, store, fresh, coded, texts_of_slots[-60:])
    return most


def check_store(serve: Serve, name: str, store: Path, fresh: Server, coded: bool, texts: Sequence[Tokens]) -> None:
    """What a server with the same cells and without options restores is of evaluated text."""
    n_restored, most = 0, 0.0
    with serve(*SERVERS[name], "--cache-ram", 0, "--no-warmup", coded=coded, SUBKV_STORE=store) as server:
        for claimed in texts:
            if len(claimed) >= 500:
                continue
            answer = next_token(server, [*claimed, 77])
            n_restored += cached(answer) > 0
            found = divergence(next_token(fresh, [*claimed, 77], cache_prompt=False), answer)
            most = max(most, found)
            assert found < KLD_EVALUATED, (name, coded, len(claimed), cached(answer), found)
    assert n_restored > 0
    print("largest KLD of stored text:", most)


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("moves", [True, False])
def test_slots_hold_what_they_claim(serve: Serve, text: str, tmp_path: Path, name: str, moves: bool) -> None:
    run(serve, tmp_path, text, name=name, kind="coded", moves=moves, seed=1, n=25)


@pytest.mark.slow
@pytest.mark.skipif(not N_GROUPS, reason="a longer run: SUBKV_SLOT_REQUESTS")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("name", SERVERS)
def test_slots_for_longer(serve: Serve, text: str, tmp_path: Path, name: str, moves: bool, kind: str) -> None:
    print("largest difference:", run(serve, tmp_path, text, name=name, kind=kind, moves=moves, seed=SEED, n=N_GROUPS))
