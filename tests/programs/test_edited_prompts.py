"""Edited prompts: llama-server answers like a fresh one, and evaluates few tokens again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pictures
import pytest
import stand_ins
import tiny
from servers import serving

Serve = Callable[..., Any]

AGAIN = 32  # tokens evaluated again before an edit (SUBKV_RESUME)
SERVERS = {
    "one": ["-np", 1, "-c", 2560],
    "four": ["-np", 4, "-c", 10240, "--no-kv-unified"],
    "unified": ["-np", 4, "-c", 10240, "--kv-unified"],
}


class Reference:
    """One sequence of a coded cache that is edited as llama-server edits its slot."""

    def __init__(self, s: engine.Session) -> None:
        self.s = s
        self.tokens: list[int] = []
        self.n_evaluated = 0

    def complete(self, prompt: list[int], n: int = 16, n_reuse: int = 0) -> list[int]:
        """Greedy tokens; n_evaluated: of the prompt."""
        n_past = common(self.tokens, prompt)
        if n_reuse:
            n_past = self.reuse(prompt, n_past, n_reuse)
        n_past = engine.SUBKV.subkv_resume(self.s.ctx, 0, n_past) if n_past else 0
        n_past = min(n_past, len(prompt) - 1)
        self.n_evaluated = len(prompt) - n_past
        assert self.s.rm(0, n_past)
        answer = [int(self.s.decode(prompt[n_past:], n_past)[-1].argmax())]
        while len(answer) < n:
            answer.append(int(self.s.decode(answer[-1:], len(prompt) + len(answer) - 1)[-1].argmax()))
        self.tokens = prompt + answer[:-1]
        return answer

    def reuse(self, prompt: list[int], n_past: int, n_reuse: int) -> int:
        """Moves runs of tokens behind removed ones up, as the server does."""
        cached = n_past
        while cached < len(self.tokens) and n_past < len(prompt):
            n = common(self.tokens[cached:], prompt[n_past:])
            if n < n_reuse:
                cached += 1
                continue
            assert self.s.rm(0, n_past, cached) or n_past == cached
            engine.C.llama_memory_seq_add(self.s.memory, 0, cached, cached + n, n_past - cached)
            assert not engine.last_error()
            self.tokens[n_past : n_past + n] = self.tokens[cached : cached + n]
            cached, n_past = cached + n, n_past + n
        return n_past


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def reference(model: Path) -> Iterator[Reference]:
    opened = engine.Model(model)
    layout = engine.SUBKV.subkv_layout_load(str(model).encode())
    with engine.session(opened, layout, n_ctx=4096, threads=1, n_ubatch=512) as s:
        yield Reference(s)
    engine.SUBKV.subkv_layout_free(layout)
    opened.free()


def edits(rng: random.Random, tokens: list[int], n: int) -> Iterator[list[int]]:
    """Prompts of which each is an edit of an earlier one: replaced, removed and inserted parts, cuts, returns."""
    earlier = [tokens[:600]]
    for _ in range(n):
        prompt = rng.choice(earlier[-4:])
        at = rng.randrange(1, len(prompt) - 40)
        other = tokens[rng.randrange(600, 1000) :][: rng.randrange(1, 60)]
        kind = rng.choice(("replaced", "removed", "inserted", "cut", "longer", "same"))
        changed = {
            "replaced": prompt[:at] + other + prompt[at + len(other) :],
            "removed": prompt[:at] + prompt[at + 30 :],
            "inserted": prompt[:at] + other + prompt[at:],
            "cut": prompt[: at + 40],
            "longer": prompt + other,
            "same": prompt,
        }[kind]
        earlier.append(changed[:1500])
        yield earlier[-1]


@pytest.mark.parametrize("n_reuse", [0, 24])
def test_random_edits(serve: Serve, text: str, reference: Reference, n_reuse: int) -> None:
    """The text of a cache that is edited in the same way, and few tokens evaluated again."""
    with serve("-np", 1, "-c", 4096, "--cache-ram", 0, "--cache-reuse", n_reuse) as server:
        tokens = server.tokens(text[:9000])
        for i, prompt in enumerate(edits(random.Random(n_reuse), tokens, 50)):
            bound = len(prompt) - common(reference.tokens, prompt) + AGAIN
            expected = reference.complete(prompt, n_reuse=n_reuse)
            answer = server.complete(prompt)
            assert answer["tokens"] == expected, i
            assert answer["timings"]["prompt_n"] == reference.n_evaluated <= max(bound, 1), i


@pytest.mark.parametrize("arguments", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("store", [False, True])
def test_edits_evaluate_few_tokens(serve: Serve, text: str, arguments: list[Any], store: bool, tmp_path: Path) -> None:
    """Beside f16 with the same slots, and after a restart with stored prompts."""
    evaluated: dict[bool, list[int]] = {}
    for coded in (True, False):
        variables = {"SUBKV_STORE": tmp_path / f"store-{coded}"} if store else {}
        counts: list[int] = []
        rng = random.Random(7)
        for _ in range(1 + store):
            with serve(*arguments, coded=coded, **variables) as server:
                tokens = server.tokens(text[:9000])
                for prompt in edits(rng, tokens, 20):
                    counts.append(server.complete(prompt, 8)["timings"]["prompt_n"])
        evaluated[coded] = counts
    again = [a - b for a, b in zip(evaluated[True], evaluated[False], strict=True)]
    print("evaluated beyond f16:", again)
    assert max(again) <= AGAIN, again


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
def test_edited_conversations(serve: Serve, text: str, arguments: list[Any]) -> None:
    evaluated: dict[bool, list[int]] = {}
    for coded in (True, False):
        evaluated[coded] = []
        with serve(*arguments, coded=coded) as server:
            for messages in turns(text):
                body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
                answer = server.request("POST", "/v1/chat/completions", body)
                evaluated[coded].append(answer["timings"]["prompt_n"])
            slots = server.request("GET", "/slots")
            assert "context checkpoint 1 of" not in server.log and slots
    again = [a - b for a, b in zip(evaluated[True], evaluated[False], strict=True)]
    assert max(again) <= AGAIN, again


@pytest.mark.parametrize("keep", [0, 1, 40, -1])
@pytest.mark.parametrize("discard", [0, 1, 100, 1000])
def test_context_shifts_of_any_size(serve: Serve, text: str, keep: int, discard: int) -> None:
    """Also ones that leave fewer tokens than the window has."""
    answers = []
    for coded in (True, False):
        with serve("-np", 2, "-c", 512, "--no-kv-unified", "--context-shift", coded=coded) as server:
            bodies = [
                {"prompt": text[i * 500 : i * 500 + 300], "n": 400, "n_keep": keep, "n_discard": discard}
                for i in range(2)
            ]
            answers.append([(a["tokens_predicted"], a["truncated"], a["stop_type"]) for a in server.together(bodies)])
    assert answers[0] == answers[1]


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
