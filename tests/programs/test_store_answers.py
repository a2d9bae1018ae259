"""llama-server with a store of prompts: its answers equal those of a server that evaluates everything."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import tiny
from servers import CODED, ORDINARY, Server, assert_same, serving

from subkv.engine.cache import choose_cache
from subkv.engine.request import CacheRequest

SYSTEM = "You are a clerk who answers in few words and never lies about what was said before. " * 4
# models and caches that can remove different tails
KINDS = [
    ("llama", "f16"),
    ("llama", "q8_0"),
    ("llama", "subkv"),
    ("gemma2", "f16"),
    ("gemma2", "subkv"),
    ("lfm2", "f16"),
    ("lfm2", "subkv"),
]


@pytest.fixture(scope="module")
def words_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model whose texts do not end."""
    folder = tmp_path_factory.mktemp("kinds")
    models: dict[str, Path] = {}

    def make(arch: str) -> Path:
        if arch not in models:
            models[arch] = stand_ins.with_words(folder / f"{arch}.gguf", tiny.build(folder / f"{arch}-tiny.gguf", arch))
        return models[arch]

    return make


def ask(server: Server, prompt: str, **more: Any) -> Any:
    return server.complete(prompt, 8, n_probs=2, **more)


@pytest.mark.parametrize(("arch", "cache"), KINDS, ids=["-".join(kind) for kind in KINDS])
def test_conversations_in_any_order(arch: str, cache: str, words_of: Callable[[str], Path], tmp_path: Path) -> None:
    """On one slot: new, continued, repeated, edited and evicted conversations, and restarts."""
    rng = random.Random(3)
    topics = [f"{SYSTEM}Tell me of number {i}, at length. " + f"It is {i}. " * 20 for i in range(3)]
    prompts = [*topics, *(f"{topic}And then? {SYSTEM[:90]}" for topic in topics), f"{SYSTEM}Another."]
    order = [*prompts, *rng.sample(prompts, len(prompts)), *rng.sample(prompts, len(prompts))]
    model, coded = words_of(arch), cache == "subkv"
    assert not coded or choose_cache(model, CacheRequest(cache)).coded  # bases are derived, where the library looks
    types = ("-ctk", cache, "-ctv", cache) if cache == "q8_0" else ()
    arguments = ("-np", 1, "-c", 1024, "-b", 128, "-ub", 128, *types)
    kind = {"subkv": "auto" if coded else "off", "folder": tmp_path}
    with serving(model, *arguments, **kind) as server:
        assert (CODED in server.log) == coded and ORDINARY not in server.log
        expected = {prompt: ask(server, prompt, cache_prompt=False) for prompt in prompts}
    n_restored = []
    for begin in range(0, len(order), 5):
        with serving(model, *arguments, **kind, SUBKV_STORE=str(tmp_path / "store")) as server:
            for i, prompt in enumerate(order[begin : begin + 5]):
                answer = ask(server, prompt)
                # 32 tokens before an edit are evaluated again, earlier ones are read through their codes
                assert_same(expected[prompt], answer, tie=0.15 if coded else 0.02)
                if i == 0:
                    n_restored.append(answer["timings"]["cache_n"])
    assert n_restored[0] == 0 and sum(n > 100 for n in n_restored[1:]) > 1
