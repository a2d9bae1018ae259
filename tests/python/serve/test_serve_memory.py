"""The server remembers: an answer after a restored prefix is the answer of a server that evaluated everything."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import KINDS, SYSTEM, Served, ask, dearly, model_of, running

from runtime.serve.settings import Remembering

pytestmark = pytest.mark.usefixtures("dear")


def settle(served: Served) -> None:
    """Everything finished is kept."""
    engine = served.service.engine
    assert served.idle()
    for _ in range(400):
        if not any(slot.unsaved for slot in engine.slots):
            break
        threading.Event().wait(0.01)
    assert engine.recall.prefixes.settle()


def metric(served: Served, name: str) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"subkv:prefix_{name}"))


def clear(served: Served, prompt: str) -> bool:
    """Whether the likeliest of the first tokens of an answer is so by far more than rounding."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    found = served.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]  # None: no tokens
    return found is None or all(max(top.values()) - min(top.values()) > 0.02 for top in found["top_logprobs"])


@pytest.mark.parametrize(("arch", "cache"), KINDS, ids=["-".join(kind) for kind in KINDS])
def test_answers_do_not_depend_on_it(
    arch: str, cache: str, coded_model: Callable[..., Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Conversations in any order, on one slot: continued, regenerated, edited, evicted, after a restart."""
    model, rng = model_of(arch, cache, coded_model, tiny_model), random.Random(3)
    kind: dict[str, Any] = {"n_slots": 1, "n_ctx": 1024, "kv_cache": cache}
    topics = [f"{SYSTEM}Tell me of number {i}, at length. " + f"It is {i}. " * 20 for i in range(3)]
    prompts = [*topics, *(topic + "And then? " + SYSTEM[:90] for topic in topics), *topics, SYSTEM + "Another."]
    order = [*prompts, *rng.sample(prompts, len(prompts))]
    with running(model, **kind) as served:

        def cold(prompt: str) -> str:
            served.client.post("/slots/0?action=erase")
            return ask(served, prompt)[0]

        # an answer may turn at a tie, which llama.cpp's own sliding halves decide by how a prompt is split
        expected = {prompt: cold(prompt) for prompt in prompts if clear(served, prompt)}
        order = [prompt for prompt in order if prompt in expected]
    n_restored = 0
    for begin in range(0, len(order), 7):
        with running(model, remembering=Remembering(1, tmp_path), **kind) as served:
            dearly(served)
            for prompt in order[begin : begin + 7]:
                assert ask(served, prompt)[0] == expected[prompt], prompt
                settle(served)
            assert metric(served, "damaged") == metric(served, "disk_failures") == 0
            n_restored += served.service.engine.recall.prefixes.counts.n_restored
    assert n_restored > 1000


def test_bases_that_follow_the_text(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    """Their states are whole or not at all: the same answers."""
    texts = [f"{i} " + SYSTEM * 2 for i in range(2)]
    adapt = {"n_recent": 64, "n_rollback": 8, "adapt": "v,warm=32,length=64,gain=100"}
    kind: dict[str, Any] = {"n_slots": 1, "n_ctx": 2048, **adapt}
    with running(coded_model(), **kind) as served:
        expected = []
        for text in texts:
            served.client.post("/slots/0?action=erase")
            expected.append([ask(served, text)[0], ask(served, text + " and?")[0]])
    with running(coded_model(), remembering=Remembering(64, tmp_path), **kind) as served:
        dearly(served)
        for text, answers in [*zip(texts, expected, strict=True)] * 2:
            assert [ask(served, text)[0]] == answers[:1]
            settle(served)


def test_restored_after_eviction_and_restart(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    kind: dict[str, Any] = {"n_slots": 1, "n_ctx": 1024, "remembering": Remembering(16, tmp_path)}
    with running(coded_model(), **kind) as served:
        dearly(served)
        first, none = ask(served, SYSTEM)
        assert none == 0
        ask(served, "something else entirely, " * 8)
        again, cached = ask(served, SYSTEM + first + " go on")
        assert cached > 100 and metric(served, "hits") == 1 and metric(served, "tokens_restored") >= cached - 8
        assert metric(served, "bytes") > 0 and metric(served, "kept") >= 2
    with running(coded_model(), **kind) as served:  # what was idle at the end is kept as well
        dearly(served)
        said, n = ask(served, SYSTEM + first + " go on")
        assert said == again and n >= cached
        assert served.service.engine.recall.prefixes.counts.hits["disk"] == 1


def test_conversations_share_a_system_prompt(coded_model: Callable[..., Path]) -> None:
    with running(coded_model(), n_slots=2, n_ctx=2048, remembering=Remembering(64)) as served:
        dearly(served)
        cached = [ask(served, f"{SYSTEM}{i} is the number of this conversation.")[1] for i in range(6)]
        assert min(cached[2:]) > 100  # the second parts from the first, where a checkpoint is taken for the others
        settle(served)
        ram = served.service.engine.recall.prefixes.ram
        blobs = sum(len(data) for data in ram._blobs.values())
        apart = sum(len(ram._blobs[name]) for entry in ram._entries.values() for name in entry.more["blocks"])
        shared = {name for entry in ram._entries.values() for name in entry.more["blocks"]}
        assert apart > 3 * sum(len(ram._blobs[name]) for name in shared) and blobs < ram.n_bytes


def test_a_busy_slot_shares(coded_model: Callable[..., Path]) -> None:
    with running(coded_model(), n_slots=2, n_ctx=2048, remembering=Remembering(64)) as served:
        dearly(served)
        expected = ask(served, SYSTEM + "and now?")[0]
        served.service.engine.call(
            lambda: [served.service.engine.empty(s) for s in served.service.engine.slots]
        ).result()
        body = {"prompt": SYSTEM + "and now?" + expected, "stream": True, "max_tokens": 600, "temperature": 0}
        ram = served.service.engine.recall.prefixes.ram
        settle(served)
        for name in list(ram._entries):
            ram.remove(name)
        with served.client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            found = ask(served, SYSTEM + "and now?")
        assert found[0] == expected and found[1] > 100


@pytest.mark.parametrize("shared", [False, True])
def test_keys_do_not_see_each_other(coded_model: Callable[..., Path], tmp_path: Path, shared: bool) -> None:
    remembering = Remembering(16, tmp_path, shared_cache=shared)
    kind: dict[str, Any] = {"n_slots": 2, "n_ctx": 2048, "remembering": remembering, "keys": ("one", "two")}
    with running(coded_model(), folder=tmp_path, **kind) as served:
        dearly(served)
        text = ask(served, SYSTEM, key="one")[0]
        settle(served)
        other, cached = ask(served, SYSTEM, key="two")
        assert other == text and (cached > 100) == shared
        assert ask(served, SYSTEM, key="one")[1] > 100
        ask(served, "another text to make room for " * 4, key="one")
        ask(served, "another text to make room for " * 4, key="two")
        assert ask(served, SYSTEM, key="one")[1] > 100
