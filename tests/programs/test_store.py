"""Prompts that outlive llama-server (SUBKV_STORE): a restart, several servers, broken folders."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import stand_ins
from gguf import GGUFReader
from servers import Refused, Server, wait_until

from subkv.engine.llama import Llama
from subkv.native.bases import model_content

pytestmark = pytest.mark.skipif(os.name == "nt", reason="SIGTERM")
N = 700  # tokens of a prompt
KINDS = ["coded", "ordinary"]
LONG = ["-np", 1, "-c", 32768]  # an answer that fills it takes seconds

Tokens = list[int]
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture
def serve(serve: Serve) -> Serve:
    """serve() with small batches and one slot by default. kind: one of KINDS."""

    def start(*arguments: Any, kind: str = "coded", **options: Any) -> contextlib.AbstractContextManager[Server]:
        given = arguments or ("-np", 1)
        return serve("-c", 2048, "-b", 256, "-ub", 256, "--no-warmup", *given, coded=kind == "coded", **options)

    return start


def ask(server: Server, prompt: Sequence[int], n: int = 8, **options: Any) -> tuple[Tokens, int, int]:
    """The answer to a prompt, and its numbers of restored and of evaluated tokens."""
    reply = server.complete(list(prompt), n, **options)
    return reply["tokens"], reply["timings"]["cache_n"], reply["timings"]["prompt_n"]


def stored(store: Path, n: int = 1) -> None:
    """Wait for n stored prompts. The name of a prompt appears when it is complete."""
    wait_until(f"{n} prompts in the folder", lambda: len(list(store.glob("*.prefix"))) >= n)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def text(seed: int, n: int = N) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(20, 250) for _ in range(n)]


@contextlib.contextmanager
def at_work(server: Server, prompt: Sequence[int]) -> Iterator[None]:
    """Runs the block while the server (started with LONG) answers a prompt; the answer may fail."""

    def answer() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, Refused):
            ask(server, prompt, 30000)

    thread = threading.Thread(target=answer)
    thread.start()
    server.wait("work", "/slots", lambda slots: slots[0]["is_processing"])
    yield
    thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_gets_a_prompt_back(serve: Serve, store: Path, kind: str) -> None:
    """Few tokens are evaluated, and the answer is the one without the restart."""
    prompt = text(1)
    with serve(kind=kind) as server:
        answer, _, _ = ask(server, prompt)
        more = [*prompt, *answer, *text(2, 20)]
        expected, n_held, _ = ask(server, more)
    assert n_held >= N
    with serve(kind=kind, SUBKV_STORE=store) as server:
        assert ask(server, prompt)[0] == answer
        assert "prompts are stored in" in server.log
    with serve(kind=kind, SUBKV_STORE=store) as server:
        again, n_restored, n_evaluated = ask(server, more)
    assert again == expected
    assert n_restored >= N
    assert n_restored + n_evaluated == len(more)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_prompt_after_a_restart(serve: Serve, store: Path, kind: str) -> None:
    """Checkpoints are stored: a coded cache returns to one, an ordinary cache to the end of the common prefix."""
    prompt = text(3)
    edited = [*prompt[: N - 40], *text(4, 60)]
    with serve(kind=kind) as server:
        expected, _, _ = ask(server, edited)
    with serve(kind=kind, SUBKV_STORE=store) as server:
        ask(server, prompt)
    with serve(kind=kind, SUBKV_STORE=store) as server:
        answer, n_restored, _ = ask(server, edited)
    assert answer == expected
    assert N - 40 - 256 - 4 <= n_restored <= N - 40


def test_servers_share_a_folder(serve: Serve, store: Path) -> None:
    """At the same time: one server finds a prompt that the other has stored."""
    prompt = text(5)
    with serve(SUBKV_STORE=store) as one, serve(SUBKV_STORE=store) as other:
        expected, _, _ = ask(one, prompt)
        ask(one, text(6))
        stored(store)
        answer, n_restored, _ = ask(other, prompt)
        assert n_restored >= N - 256
        assert answer == expected


@pytest.mark.parametrize("kind", KINDS)
def test_python_shares_the_folder(serve: Serve, store: Path, model: Path, kind: str) -> None:
    """subkv.Llama finds the server's prompts, and the server finds Llama's."""
    first, second = text(7), text(8)
    options = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 256, "verbose": False, "prompt_cache": store}
    with serve(kind=kind, SUBKV_STORE=store) as server:
        answer, _, _ = ask(server, first)
    with Llama(model, kv_cache="subkv" if kind == "coded" else "f16", **options) as llm:
        assert llm.cache[first].input_ids.tolist()[:N] == first
        assert list(itertools.islice(llm.generate(first, temp=0.0), 8)) == answer
        llm.reset()
        llm.eval(second)
        llm.cache.store()
        llm.cache.flush()
    with serve(kind=kind, SUBKV_STORE=store) as server:
        assert ask(server, second)[1] >= N - 33


def test_conversations_with_a_common_prefix(serve: Serve, store: Path) -> None:
    """They evict each other from one slot; the store restores all of them."""
    begin = text(90, 1000)
    prompts = [begin + text(91 + i, 200) for i in range(4)]
    with serve(SUBKV_STORE=store) as server:
        answers = [ask(server, prompt)[0] for prompt in prompts]
    with serve(SUBKV_STORE=store) as server:
        for prompt, answer in zip(prompts, answers, strict=True):
            again, n_restored, _ = ask(server, prompt)
            assert n_restored > 1100
            assert again == answer
    assert len(list(store.glob("*.prefix"))) == len(prompts)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])
def test_several_slots(serve: Serve, store: Path, unified: bool) -> None:
    """All slots are stored at the end; any slot restores them, and if cells are shared, any number of slots."""
    cells = ["--kv-unified"] if unified else ["--no-kv-unified"]
    prompts = [text(10 + i) for i in range(4)]
    with serve("-np", 4, "-c", 8192, *cells, SUBKV_STORE=store) as server:
        answers = [ask(server, prompt, id_slot=i)[0] for i, prompt in enumerate(prompts)]
    with serve("-np", 3 if unified else 4, "-c", 8192, *cells, SUBKV_STORE=store) as server:
        for prompt, answer in zip(reversed(prompts), reversed(answers), strict=True):
            again, n_restored, _ = ask(server, prompt)
            assert n_restored >= N - 256
            assert again == answer


def test_a_model_that_is_replaced(serve: Serve, store: Path, model: Path, tmp_path: Path) -> None:
    """While a server runs, its file gets the bytes of another model that has the same samples: after a restart, that
    model has no prompts, and the old one has them.
    """
    old, new = (Path(shutil.copy(model, tmp_path / f"{name}.gguf")) for name in ("old", "new"))
    tensor = max(GGUFReader(new).tensors, key=lambda t: int(t.n_bytes))
    with open(new, "r+b") as file:  # a value that model_content does not read
        file.seek(int(tensor.data_offset) + 4096 + 64)
        file.write(bytes(32))
    assert model_content(new) == model_content(old) and new.read_bytes() != old.read_bytes()
    path = Path(shutil.copy(old, tmp_path / "served.gguf"))
    prompt = text(60)
    with serve(kind="ordinary", model=path, SUBKV_STORE=store) as server:
        new.replace(path)
        ask(server, prompt)
    for file, is_found in ((path, False), (old, True)):
        with serve(kind="ordinary", model=file, SUBKV_STORE=store) as server:
            assert (ask(server, prompt)[1] > 0) == is_found


def test_another_cache_restores_nothing(serve: Serve, store: Path) -> None:
    """A different window, an ordinary cache, or different metadata."""
    prompt = text(20)
    with serve(SUBKV_STORE=store) as server:
        expected, _, _ = ask(server, prompt)
    for options in (
        {"SUBKV_RECENT": 32},
        {"SUBKV_SINK": 8},
        {"kind": "ordinary"},
        {"arguments": ("-np", 2, "--no-kv-unified")},
        {"arguments": ("-np", 1, "--rope-freq-base", 5000)},
        {"arguments": ("-np", 1, "--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.001")},
    ):
        arguments: Any = options.pop("arguments", ())
        with serve(*arguments, SUBKV_STORE=store, **options) as server:
            assert ask(server, prompt)[1] == 0
    with serve(SUBKV_STORE=store) as server:
        again, n_restored, _ = ask(server, prompt)
        assert (again, n_restored > N - 256) == (expected, True)


@pytest.mark.parametrize("how", ["cut", "bit", "empty"])
def test_a_damaged_folder(serve: Serve, store: Path, how: str) -> None:
    """Prompts are evaluated again, and stored again at the end."""
    prompt = text(30)
    with serve(SUBKV_STORE=store) as server:
        expected, _, _ = ask(server, prompt)
    files = list(store.iterdir())
    assert len(files) > 3
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes({"cut": data[: len(data) // 2], "bit": data, "empty": b""}[how])
    with serve(SUBKV_STORE=store) as server:
        answer, n_restored, _ = ask(server, prompt)
        assert (answer, n_restored) == (expected, 0)
    with serve(SUBKV_STORE=store) as server:
        answer, n_restored, _ = ask(server, prompt)
        assert (answer, n_restored > N - 256) == (expected, True)


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"SUBKV_STORE": __file__}, "expected a folder, found something else"),
        ({"SUBKV_STORE_MIB": "many"}, "SUBKV_STORE_MIB: expected a number from 1 to 1073741824, found 'many'"),
        ({"SUBKV_STORE_MIB": "0"}, "found '0'"),
        ({"SUBKV_STORE_MIB": "-1"}, "found '-1'"),
    ],
)
def test_a_store_that_cannot_be_used(serve: Serve, store: Path, variables: dict[str, str], sentence: str) -> None:
    """One line at the start; the server answers."""
    with serve(**{"SUBKV_STORE": store, **variables}) as server:
        assert len(ask(server, text(40, 50))[0]) == 8
        assert server.log.count(sentence) == 1
        assert server.log.count("prompts are not stored") == 1


def test_a_store_that_is_full(serve: Serve, store: Path) -> None:
    """Files stay below the limit; prompts beyond it are evaluated."""
    with serve(SUBKV_STORE=store, SUBKV_STORE_MIB=1) as server:
        for seed in range(50, 56):
            assert len(ask(server, text(seed))[0]) == 8
    assert sum(path.stat().st_size for path in store.iterdir()) <= 1 << 20


def test_sigterm_stores_the_current_turn(serve: Serve, store: Path) -> None:
    """SIGTERM during an answer: the tokens evaluated so far are stored."""
    prompt = text(60)
    with serve(kind="ordinary") as server:
        answer = ask(server, prompt, 300)[0]
    with serve(*LONG, kind="ordinary", SUBKV_STORE=store) as server, at_work(server, prompt):
        server.wait("300 tokens", "/slots", lambda slots: slots[0]["next_token"][0]["n_decoded"] > 300)
        server.stop()
    with serve(*LONG, kind="ordinary", SUBKV_STORE=store) as server:
        assert ask(server, [*prompt, *answer])[1] == N + 300 - 1


def test_a_server_that_sleeps(serve: Serve, store: Path) -> None:
    """Its context is freed; the store restores its slots."""
    prompt = text(65)
    with serve("-np", 1, "--sleep-idle-seconds", 1, SUBKV_STORE=store) as server:
        expected, _, _ = ask(server, prompt)
        wait_until("sleep", lambda: "entering sleeping state" in server.log)
        answer, n_restored, _ = ask(server, prompt)
        assert (answer, n_restored >= N - 256) == (expected, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_without_a_store(serve: Serve, store: Path) -> None:
    """Nothing is written or logged; without a coded cache libsubkv is not loaded."""
    with serve(kind="ordinary") as server:
        ask(server, text(70))
        assert "libsubkv.so" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "subkv:" not in server.log
    with serve(kind="ordinary") as server:
        assert ask(server, text(70))[1] == 0
    assert not store.exists()


def test_no_prompt_of_an_adapter(serve: Serve, store: Path, words: Path, tmp_path: Path) -> None:
    """Keys and values under a LoRA adapter are another model's: nothing is stored, nothing restored."""
    adapter = stand_ins.adapter(tmp_path / "adapter.gguf", words)
    prompt = text(80)
    with serve(SUBKV_STORE=store) as server:
        ask(server, prompt)
    files = set(store.iterdir())
    with serve("-np", 1, "--lora", adapter, SUBKV_STORE=store) as server:
        assert ask(server, prompt)[1] == 0
        ask(server, text(81))
    assert set(store.iterdir()) == files


#
# idle servers
#


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_server_loses_only_the_current_turn(serve: Serve, store: Path, kind: str) -> None:
    """A slot is stored after its answer, so kill -9 in the next turn loses only that turn."""
    prompt, more = text(100), text(101, 40)
    with serve(kind=kind) as server:
        answer = ask(server, prompt)[0]
        expected = ask(server, [*prompt, *answer, *more])[0]
    with serve(*LONG, kind=kind, SUBKV_STORE=store) as server:
        assert ask(server, prompt)[0] == answer
        stored(store)
        with at_work(server, [*prompt, *answer, *more]):
            server.kill()
    with serve(kind=kind, SUBKV_STORE=store) as server:
        again, n_restored, n_evaluated = ask(server, [*prompt, *answer, *more])
    assert again == expected
    assert n_restored >= N
    assert n_restored + n_evaluated == N + len(answer) + len(more)


@pytest.mark.parametrize("slots", [2, 3])
def test_every_idle_slot_is_stored(serve: Serve, store: Path, slots: int) -> None:
    """One after the other, even if all of them answered at the same time."""
    prompts = [text(110 + i) for i in range(slots)]
    with serve("-np", slots, "-c", 1024 * slots, SUBKV_STORE=store) as server:
        answers = server.together([{"prompt": p, "n": 8, "id_slot": i} for i, p in enumerate(prompts)])
        stored(store, slots)
        server.kill()
    with serve("-np", slots, "-c", 1024 * slots, SUBKV_STORE=store) as server:
        for prompt, answer in zip(prompts, answers, strict=True):
            again, n_restored, _ = ask(server, prompt)
            assert n_restored >= N - 256
            assert again == answer["tokens"]


def test_nothing_is_stored_twice(serve: Serve, store: Path) -> None:
    """A repeated prompt, an idle server, fewer than 32 new tokens, and the end of the server store nothing."""
    prompt, short = text(120), text(121, 20)
    with serve("-np", 2, "-c", 4096, SUBKV_STORE=store) as server:
        expected = ask(server, prompt, id_slot=0)[0]
        stored(store)
        ask(server, short, id_slot=1)
        files = {path.name: path.stat().st_ino for path in store.iterdir()}
        for _ in range(3):
            assert ask(server, prompt, id_slot=0)[0] == expected
            server.request("GET", "/slots")
        server.stop()
    assert {path.name: path.stat().st_ino for path in store.iterdir()} == files
    assert len(list(store.glob("*.prefix"))) == 1


def test_a_large_prompt_is_stored_after_an_idle_time(serve: Serve, store: Path) -> None:
    """A turn of a few tokens after thousands is stored only after an idle time, without a request."""
    prompt = text(130, 4000)
    with serve("-np", 1, "-c", 8192, SUBKV_STORE=store) as server:
        answer = ask(server, prompt, 1)[0]
        stored(store)
        before = set(store.glob("*.prefix"))
        more = [*prompt, *answer, 40, 41]
        expected = ask(server, more, 1)[0]
        wait_until("the second turn", lambda: bool(set(store.glob("*.prefix")) - before))
        server.kill()
    with serve("-np", 1, "-c", 8192, SUBKV_STORE=store) as server:
        again, n_restored, _ = ask(server, more, 1)
    assert (again, n_restored) == (expected, len(more) - 1)


def test_embeddings_are_not_stored(serve: Serve, store: Path) -> None:
    """Tokens evaluated for an embedding are not stored."""
    with serve("-np", 1, "--embeddings", "--pooling", "last", SUBKV_STORE=store) as server:
        for seed in (140, 141):
            server.request("POST", "/v1/embeddings", {"input": text(seed, 100)})
            server.request("GET", "/slots")
        server.kill()
    assert not list(store.glob("*.prefix"))
