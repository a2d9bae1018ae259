"""Requests that begin alike share what is evaluated, at once and as choices of one request."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import KINDS, SYSTEM, Served, ask, dearly, model_of, running, waited

from runtime.serve.prefixes import LEAST
from runtime.serve.settings import Remembering

pytestmark = pytest.mark.usefixtures("dear")


def forget(served: Served) -> None:
    engine = served.service.engine
    engine.call(lambda: [engine.empty(slot) for slot in engine.slots]).result()


def tokens(served: Served, text: str) -> list[int]:
    found: list[int] = served.client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    return found


def common(*prompts: list[int]) -> int:
    alike = [len(set(found)) == 1 for found in zip(*prompts, strict=False)]
    return alike.index(False) if False in alike else len(alike)


def together(served: Served, prompts: list[str], keys: list[str | None]) -> list[tuple[str, int]]:
    """Answers to requests that the engine finds all at once, in this order."""
    engine, gate = served.service.engine, threading.Event()
    engine.call(lambda: gate.wait(20))
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = []
        for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            answers.append(pool.submit(ask, served, prompt, 4, key))
            assert waited(lambda n=i + 1: len(engine._waiting) == n)  # type: ignore[misc]
        gate.set()
        return [answer.result() for answer in answers]


@pytest.mark.parametrize(("arch", "cache"), KINDS, ids=["-".join(kind) for kind in KINDS])
def test_what_is_being_read_is_not_read_twice(
    arch: str, cache: str, coded_model: Callable[..., Path], tiny_model: Callable[..., Path]
) -> None:
    """Nothing is remembered beside the slots here: who comes second waits for the first one's prefix."""
    model = model_of(arch, cache, coded_model, tiny_model)
    with running(model, n_slots=4, n_ctx=4096, kv_cache=cache, remembering=Remembering(0)) as served:
        dearly(served)
        prompts = [
            f"{SYSTEM}A {word}" for word in ("is", "long " * 20 + "word", "long " * 20 + "way", "is it so? " * 4)
        ]
        expected = []
        for prompt in prompts:
            forget(served)
            expected.append(ask(served, prompt, 4)[0])
        forget(served)
        totals = served.service.engine.totals
        before = totals.n_prompt
        found = together(served, prompts, [None] * 4)
        assert [text for text, _ in found] == expected
        first, second, third, fourth = (tokens(served, prompt) for prompt in prompts)
        n_cached = [n for _, n in found]
        assert n_cached == [0, common(first, second), common(second, third), common(first, fourth)]
        assert n_cached[2] > n_cached[1] + 32 and n_cached[3] > n_cached[1]
        assert totals.n_prompt - before == sum(map(len, (first, second, third, fourth))) - sum(n_cached)


@pytest.mark.parametrize("shared", [False, True])
def test_keys_do_not_wait_for_each_other(coded_model: Callable[..., Path], shared: bool) -> None:
    kind: dict[str, Any] = {"remembering": Remembering(0, shared_cache=shared), "keys": ("one", "two")}
    with running(coded_model(), n_slots=2, n_ctx=2048, **kind) as served:
        dearly(served)
        (_, none), (_, n) = together(served, [SYSTEM, SYSTEM], ["one", "two"])
        assert none == 0 and n == (len(tokens(served, SYSTEM)) - 1 if shared else 0)


def test_who_waits_goes_on_when_the_other_is_gone(coded_model: Callable[..., Path]) -> None:
    """Cancelled while it reads, as when its client leaves: the rest is evaluated by who has waited for it."""
    with running(coded_model(), n_slots=2, n_ctx=4096, n_batch=32, n_ubatch=32, remembering=Remembering(0)) as served:
        dearly(served)
        engine, gate = served.service.engine, threading.Event()
        expected = ask(served, SYSTEM + "and", 4)[0]
        forget(served)
        evaluate, left = engine._evaluate, []

        def evaluate_and_leave(pieces: Any) -> None:
            evaluate(pieces)
            if not left:
                left.append(pieces[0].task)
                assert left[0].reading and engine._waiting[0].awaited.task is left[0]
                left[0].cancel()

        engine._evaluate = evaluate_and_leave
        engine.call(lambda: gate.wait(20))
        with ThreadPoolExecutor(2) as pool:
            body = {"prompt": SYSTEM, "max_tokens": 500}
            pool.submit(served.client.post, "/v1/completions", json=body)
            assert waited(lambda: len(engine._waiting) == 1)
            second = pool.submit(ask, served, SYSTEM + "and", 4)
            assert waited(lambda: len(engine._waiting) == 2)
            gate.set()
            found, n = second.result()
        assert found == expected and n < len(tokens(served, SYSTEM)) - 1 and left[0].n_sampled == 0
        assert served.idle()


@pytest.fixture
def client(coded_model: Callable[..., Path]) -> Iterator[tuple[Served, Any]]:
    with (
        running(coded_model(), n_slots=3, n_ctx=3072, remembering=Remembering(0)) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield dearly(served), made


def test_several_choices(client: Any) -> None:
    """Each is the answer of a seed of its own; the prompt is evaluated once, and counted once."""
    served, api = client
    how: dict[str, Any] = {"model": "any", "prompt": SYSTEM, "max_tokens": 6, "temperature": 1.5}
    alone = [api.completions.create(**how, seed=5 + i).choices[0].text for i in range(3)]
    assert len(set(alone)) == 3
    forget(served)
    totals = served.service.engine.totals
    before = totals.n_prompt
    answer = api.completions.create(**how, seed=5, n=3)
    evaluated, n_prompt = totals.n_prompt - before, answer.usage.prompt_tokens
    assert n_prompt + 2 <= evaluated < n_prompt + 2 * LEAST  # and of each other what is not worth waiting for
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage.completion_tokens == 18 and answer.usage.total_tokens == answer.usage.prompt_tokens + 18
    assert {choice.finish_reason for choice in answer.choices} == {"length"}

    texts: dict[int, str] = defaultdict(str)
    ends, ids, usage = {}, set(), None
    for chunk in api.completions.create(**how, seed=5, n=3, stream=True, stream_options={"include_usage": True}):
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert [texts[i] for i in range(3)] == alone and ends == dict.fromkeys(range(3), "length")
    assert len(ids) == 1 and usage is not None and usage.completion_tokens == 18


def test_several_choices_of_a_chat(client: Any) -> None:
    _, api = client
    how: dict[str, Any] = {"model": "any", "max_tokens": 6, "seed": 1, "n": 2, "temperature": 1.5}
    how["messages"] = [{"role": "user", "content": "Say something."}]
    whole = api.chat.completions.create(**how)
    texts: dict[int, str] = defaultdict(str)
    for chunk in api.chat.completions.create(**how, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert {choice.index: choice.message.content for choice in whole.choices} == texts
    assert texts[0] != texts[1] and whole.usage.completion_tokens == 12


def test_more_choices_than_slots(client: Any) -> None:
    served, api = client
    with pytest.raises(openai.BadRequestError, match=r"n: expected at most 3, the slots \(-np\), found 4"):
        api.completions.create(model="any", prompt="x", n=4)
    answer = served.client.post("/completion", json={"prompt": "x", "n": 2})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("n: ")
    bad = api.completions.create  # a refusal of one is a refusal of all
    with pytest.raises(openai.BadRequestError, match="grammar"):
        bad(model="any", prompt="x", n=3, extra_body={"grammar": "root ::= ["})
    assert served.idle() and served.service.places.n_working == served.service.places.n_waiting == 0


def test_who_leaves_frees_all_slots(client: Any) -> None:
    served, api = client
    how: dict[str, Any] = {"max_tokens": 900, "temperature": 0, "extra_body": {"min_tokens": 900}}
    stream = api.completions.create(model="any", prompt="x", n=3, stream=True, **how)
    seen = set()
    for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == 3:
            break
    assert served.service.engine.n_busy > 1
    stream.close()
    assert served.idle()
    assert min(slot["n_tokens"] for slot in served.client.get("/slots").json()) < 900
    assert waited(lambda: served.service.places.n_working == 0)
