"""Slots that guess: every answer is the one without, and what was guessed in vain leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import running

from runtime.serve.batching import Engine
from runtime.serve.completion import RequestLlama
from runtime.serve.slots_llama import SlotsLlama
from subkv import DraftModel, PromptLookup
from subkv.base.errors import SubkvError
from subkv.format.window import N_ROLLBACK
from subkv.native.binding import llama_cpp

Models = Callable[..., Path]
PROMPT = "the cat and the dog and the cat and the dog and " * 6
RULES = 'root ::= ("the " | "cat " | "and ")*'


@contextlib.contextmanager
def engine_of(path: Path, shift: bool = False, **options: Any) -> Iterator[Engine]:
    kind = {"n_slots": 3, "n_ctx": 1536, "n_batch": 256, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1}
    with SlotsLlama(path, **{"verbose": False, **kind, **options}) as llm:
        engine = Engine(llm, context_shift=shift)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()


def ask(engine: Engine, prompt: str = PROMPT, n: int = 40, **how: Any) -> tuple[str, dict[str, float]]:
    llm = RequestLlama(engine, "tiny", -1)
    answer = llm.create_completion(prompt, max_tokens=n, **{"temperature": 0.0, "logprobs": 0} | how)
    return "|".join(answer["choices"][0]["logprobs"]["tokens"]), llm.timings()


def answers(engine: Engine) -> list[str]:
    """What is asked one after the other: greedy, sampled, under a grammar, and once more from the cells."""
    rules = llama_cpp.LlamaGrammar.from_string(RULES, verbose=False)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 1.3, "seed": 7},
        {"grammar": rules},
        {"prompt": PROMPT + "hello", "n": 9},
        {},
        {"prompt": "x" * 60, "n": 30},
    ]
    return [ask(engine, **how)[0] for how in asked]


@pytest.mark.parametrize("kind", ["subkv", "f16", "lfm2"])
def test_answers_are_those_without(coded_model: Models, tiny_model: Models, kind: str) -> None:
    path = tiny_model("lfm2") if kind == "lfm2" else coded_model()
    cache = {"kv_cache": "subkv" if kind == "lfm2" else kind}
    with engine_of(path, **cache) as engine:
        plain = answers(engine)
        assert "draft_n" not in ask(engine)[1]
    for draft in (PromptLookup(1, 40), DraftModel(path, 3)):
        with engine_of(path, draft_model=draft, **cache) as engine:
            assert answers(engine) == plain, type(draft).__name__
            _, timings = ask(engine)
            assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
            n_removable = engine.llm.kv_stats().n_rollback
            assert kind == "f16" or n_removable == max(draft.num_pred_tokens, N_ROLLBACK)


def test_slots_draft_side_by_side(coded_model: Models) -> None:
    """A small model follows the text of every slot; cells of one have nothing to do with another's."""
    path = coded_model()
    prompts = [PROMPT, "one two three " * 12, "again and again and " * 9, "the end"]

    def asked(engine: Engine) -> list[str]:
        with ThreadPoolExecutor(4) as pool:
            return [text for text, _ in pool.map(lambda prompt: ask(engine, prompt, 24), prompts)]

    with engine_of(path) as engine:
        plain = asked(engine)
    for draft in (PromptLookup(2, 8), DraftModel(path, 4)):
        with engine_of(path, draft_model=draft) as engine:
            assert asked(engine) == plain
            engine.call(lambda: None).result()  # between two steps
            held = [len(slot.tokens) for slot in engine.slots]
            ends = [llama_cpp.llama_memory_seq_pos_max(engine._memory, slot.id) for slot in engine.slots]
            assert any(held) and [end + 1 for end in ends] == held


def test_a_full_slot_shifts_and_goes_on_drafting(coded_model: Models) -> None:
    with engine_of(coded_model(), n_ctx=600, shift=True, draft_model=PromptLookup(1, 20)) as engine:
        text, timings = ask(engine, n=500, logit_bias={str(69): 40.0})
        assert timings["predicted_n"] == 500 == len(text.split("|"))
        assert timings["draft_n_accepted"] > 300  # one letter again and again


def test_a_request_over_http(coded_model: Models) -> None:
    with running(coded_model(), draft_model=PromptLookup(1, 8)) as served:
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        timings = served.client.post("/v1/completions", json=body).json()["timings"]
        assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
        assert all(slot["speculative"] for slot in served.client.get("/slots").json())


def test_a_batch_needs_room_for_drafts(coded_model: Models) -> None:
    made = engine_of(coded_model(), n_batch=5, draft_model=PromptLookup(2, 4))
    with pytest.raises(SubkvError, match="n_batch: expected room for drafts, 2 tokens .* of 3 slots, found 5"), made:
        pass
