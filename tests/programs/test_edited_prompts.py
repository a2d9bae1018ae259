"""Edited prompts: llama-server answers like a fresh one, and evaluates few tokens again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import pictures
import pytest
import stand_ins
import tiny
from servers import serving

Serve = Callable[..., Any]

BOUND = 512  # tokens evaluated that f16 does not evaluate
SERVERS = {
    "one": ["-np", 1, "-c", 2560],
    "four": ["-np", 4, "-c", 10240, "--no-kv-unified"],
    "unified": ["-np", 4, "-c", 10240, "--kv-unified"],
    "reuse": ["-np", 1, "-c", 2560, "--cache-reuse", 256],
}


def story(tokens: list[int], edit: list[int]) -> dict[str, list[int]]:
    """Prompts in the order of the requests."""
    return {
        "first": tokens[:1546],
        "edited in the middle": tokens[:1041] + edit,
        "back": tokens[:1546],
        "regenerated": tokens[:1546],
        "a branch": tokens[:1300] + edit[:100],
        "continued": tokens[:1700],
        "cut": tokens[:1250],
        "back again": tokens[:1546],
    }


def turns(text: str) -> list[list[dict[str, str]]]:
    """A growing conversation, a regenerated answer, an edited turn, then the end again."""
    messages: list[dict[str, str]] = []
    requests = []
    for turn in range(5):
        messages.append({"role": "user", "content": text[1000 * turn : 1000 * turn + 250]})
        requests.append(list(messages))
        messages.append({"role": "assistant", "content": text[1000 * turn + 300 : 1000 * turn + 400]})
    regenerated = requests[-1]
    edited = [*requests[2][:-1], {"role": "user", "content": text[9000:9250]}]
    return [*requests, regenerated, edited, requests[-1]]


@pytest.mark.parametrize("arguments", SERVERS.values(), ids=SERVERS)
def test_edited_prompts(serve: Serve, text: str, arguments: list[Any]) -> None:
    evaluated: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for coded in (True, False):
        with serve(*arguments, coded=coded) as server:
            prompts = story(server.tokens(text[:9000]), server.tokens(text[20000:22000])[:400])
            answers = {name: server.complete(prompt) for name, prompt in prompts.items()}
            evaluated[coded] = {name: answer["timings"]["prompt_n"] for name, answer in answers.items()}
        if coded:
            with serve("-np", 1, "-c", 2560) as server:
                for name, prompt in prompts.items():
                    assert answers[name]["tokens"] == server.complete(prompt, cache_prompt=False)["tokens"], name
    again = {name: count - evaluated[False][name] for name, count in evaluated[True].items()}
    print("evaluated beyond f16:", again)
    assert max(again.values()) <= BOUND, again


@pytest.mark.parametrize("arguments", SERVERS.values(), ids=SERVERS)
def test_edited_conversations(serve: Serve, text: str, arguments: list[Any]) -> None:
    evaluated: dict[bool, list[int]] = {}
    for coded in (True, False):
        replies = []
        evaluated[coded] = []
        with serve(*arguments, coded=coded) as server:
            for messages in turns(text):
                answer = server.request("POST", "/v1/chat/completions", chat(messages))
                replies.append(answer["choices"][0]["message"]["content"])
                evaluated[coded].append(answer["timings"]["prompt_n"])
        if coded:
            with serve("-np", 1, "-c", 2560) as server:
                for i, messages in enumerate(turns(text)):
                    fresh = server.request("POST", "/v1/chat/completions", {**chat(messages), "cache_prompt": False})
                    assert replies[i] == fresh["choices"][0]["message"]["content"], i
    again = [a - b for a, b in zip(evaluated[True], evaluated[False], strict=True)]
    print("evaluated:", evaluated[True], "beyond f16:", again)
    assert max(again) <= BOUND, again


def chat(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("cut", [3500, 3000, 2100, 1041, 100])
def test_a_long_prompt_edited_early(serve: Serve, text: str, cut: int) -> None:
    evaluated = {}
    for coded in (True, False):
        with serve("-np", 1, "-c", 4096, coded=coded) as server:
            tokens, edit = server.tokens(text[:9000])[:3900], server.tokens(text[20000:20200])[:50]
            server.complete(tokens)
            answer = server.complete(tokens[:cut] + edit)
            evaluated[coded] = answer["timings"]["prompt_n"]
            if coded:
                fresh = server.complete(tokens[:cut] + edit, cache_prompt=False)
                assert answer["tokens"] == fresh["tokens"]
    again = evaluated[True] - evaluated[False]
    print(f"edited at {cut} of 3900: evaluated beyond f16: {again}")
    assert again <= max(
        BOUND, len(tokens) - cut
    )  # the distance between checkpoints grows with the distance from the end


@pytest.mark.parametrize("n_swa", [16, 512])
def test_edited_prompts_of_sliding_windows(tmp_path: Path, n_swa: int) -> None:
    """A checkpoint holds exactly the window at its position: prompts end at a checkpoint, or one token before or after.

    n_swa: shorter than the prompts, or longer.
    """
    model = stand_ins.with_words(tmp_path / "model.gguf", tiny.build(tmp_path / "tiny.gguf", "gemma2", n_swa=n_swa))
    opened = engine.Model(model)
    engine.SUBKV.subkv_layout_free(pictures.exact_bases(opened, tmp_path / "bases.gguf"))
    opened.free()
    rng = random.Random(1)
    tokens = [rng.randrange(20, 250) for _ in range(400)]
    ends = [150, 146, 151, 300, 147, 146, 145, 280, 150, 149, 277, 276]
    prompts = [tokens[:end] + tokens[: (end * 7) % 5] for end in ends]
    arguments = ["-np", 1, "-c", 2048, "--no-warmup"]
    with serving(model, *arguments, subkv=str(tmp_path / "bases.gguf"), folder=tmp_path) as server:
        answers = [server.complete(prompt, 4) for prompt in prompts]
        fresh = [server.complete(prompt, 4, cache_prompt=False) for prompt in prompts]
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in fresh]
    assert sum(answer["timings"]["prompt_n"] for answer in answers) < sum(map(len, prompts)) / 2
