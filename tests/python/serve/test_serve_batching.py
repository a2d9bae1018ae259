"""Parallel slots: what a request gets is what it would get alone, and every way to end gives its slot back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.serve.batching import Engine
from runtime.serve.completion import RequestLlama
from runtime.serve.slots import Slot, choose
from runtime.serve.slots_llama import SlotsLlama
from runtime.serve.task import N_AHEAD, CancelledError

PROMPTS = ["one", "two words", "three words here", "a longer prompt " * 12, "the end", "tail " * 40, "x", "again and"]
# how the tiny model is converted, and how it is run
CACHES: dict[str, Any] = {
    "subkv": ((), {}),
    "f16": ((), {"kv_cache": "f16"}),
    "adaptive": (("--n-recent", "48", "--kv-bits", "8"), {"adapt": "kv,block=8,length=16,warm=16,gain=100"}),
}


@pytest.fixture(scope="module", params=list(CACHES))
def engine(request: pytest.FixtureRequest, coded_model: Callable[..., Path]) -> Iterator[Engine]:
    kind = {"n_batch": 64, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    arguments, cache = CACHES[request.param]
    with SlotsLlama(coded_model(*arguments), n_slots=4, n_ctx=1024, **cache, **kind) as llm:
        made = Engine(llm)
        made.start()
        yield made
        made.close()


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while engine.n_busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.n_busy == 0, "a slot was not given back"


def ask(engine: Engine, prompt: str, n: int = 24, **more: Any) -> dict[str, Any]:
    llm = RequestLlama(engine, "tiny", -1)
    answer: dict[str, Any] = llm.create_completion(prompt, max_tokens=n, temperature=0.0, logprobs=0, **more)
    return answer | {"timings": llm.timings()}


def forget(engine: Engine) -> None:
    """Empty all slots."""

    def job() -> None:
        for slot in engine.slots:
            engine.empty(slot)

    engine.call(job).result()


def same(engine: Engine, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal tokens with equal logprobs but for rounding, which differs with the height of a product of matrices.

    Bases that follow the text are made from keys rounded so, and differ more. Where two tokens are as likely as each
    other within the bound, either may come; what follows is not compared.
    """
    first, second = (
        list(zip(answer["logprobs"]["tokens"], answer["logprobs"]["token_logprobs"], strict=True))
        for answer in (one, other)
    )
    assert len(first) == len(second)
    n_same = next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a[0] != b[0]), len(first))
    assert n_same > 0
    compared = slice(0, n_same + 1)
    bound = 3e-2 if engine.llm.kv_stats().bytes_adapt else 2e-3
    np.testing.assert_allclose([lp for _, lp in first[compared]], [lp for _, lp in second[compared]], atol=bound)


def test_together_is_as_alone(engine: Engine) -> None:
    alone = []
    for prompt in PROMPTS:
        forget(engine)
        alone.append(ask(engine, prompt)["choices"][0])
    forget(engine)
    with ThreadPoolExecutor(4) as pool:
        together = [answer["choices"][0] for answer in pool.map(lambda prompt: ask(engine, prompt), PROMPTS)]
    assert engine.totals.n_busy > engine.totals.n_decode  # they did run together
    for one, other in zip(alone, together, strict=True):
        same(engine, one, other)


def test_a_prefix_is_kept(engine: Engine) -> None:
    forget(engine)
    first = ask(engine, "a conversation that begins", 8)
    text = "a conversation that begins" + first["choices"][0]["text"]
    n_common = first["timings"]["prompt_n"]
    again = ask(engine, text + " and goes on", 8)
    assert again["timings"]["cache_n"] >= n_common
    forget(engine)
    same(engine, ask(engine, text + " and goes on", 8)["choices"][0], again["choices"][0])


def test_a_long_tail_is_evaluated_again(engine: Engine) -> None:
    forget(engine)
    fresh = ask(engine, "same beginning, new end", 8)["choices"][0]
    forget(engine)
    ask(engine, "same beginning, " + "other end " * 3, 120)
    same(engine, ask(engine, "same beginning, new end", 8)["choices"][0], fresh)


def test_the_slot_that_keeps_most_is_chosen() -> None:
    slots = [Slot(0, [1, 2, 3, 4], None, 5), Slot(1, [1, 2], None, 9), Slot(2, [], None, 7), Slot(3, [7] * 90, None, 3)]
    assert choose(slots, [1, 2, 3, 4, 5], None).id == 0
    assert choose(slots, [1, 2, 9], None).id == 0  # half of it is kept
    assert choose(slots, [1, 2, 9], 1).id == 1  # the tail of two cannot be removed
    assert choose(slots, [1, 9, 9], None).id == 1
    assert choose(slots, [8], None).id == 2  # an empty one
    assert choose([slot for slot in slots if slot.tokens], [8], None).id == 3  # the one unused for longest
    assert choose(slots, [7, 8], None).id == 2  # a short prefix does not take a conversation away
    assert choose(slots, [7] * 60, None).id == 3


def test_closing_a_stream_gives_its_slot_back(engine: Engine) -> None:
    llm = RequestLlama(engine, "tiny", -1)
    stream = llm.create_completion("long", max_tokens=200, temperature=0.0, stream=True)
    next(stream)
    assert engine.n_busy == 1
    stream.close()


def test_a_caller_that_does_not_take_tokens_stops_its_slot_only(engine: Engine) -> None:
    llm = RequestLlama(engine, "tiny", -1)
    stream = llm.create_completion("slow", max_tokens=200, temperature=0.0, stream=True)
    assert len(ask(engine, "quick", 60)["choices"][0]["text"]) > 0
    (task,) = llm.tasks
    assert task.n_sampled == N_AHEAD
    assert "".join(chunk["choices"][0]["text"] for chunk in stream)
    assert llm.usage["completion_tokens"] == 200


def test_cancelling_from_another_thread(engine: Engine) -> None:
    llm = RequestLlama(engine, "tiny", -1)
    stream = llm.create_completion("gone", max_tokens=200, temperature=0.0, stream=True)
    next(stream)
    threading.Timer(0.05, llm.cancel).start()
    with pytest.raises(CancelledError):
        for _ in stream:
            time.sleep(0.01)
    late = RequestLlama(engine, "tiny", -1)
    late.cancel()
    with pytest.raises(CancelledError):
        late.create_completion("never", max_tokens=200)


def test_a_fault_of_one_request_leaves_the_others(engine: Engine) -> None:
    def broken(_ids: Any, _logits: Any) -> Any:
        raise ZeroDivisionError("processor")

    other = RequestLlama(engine, "tiny", -1).create_completion("fine", max_tokens=40, temperature=0.0, stream=True)
    with pytest.raises(ZeroDivisionError):
        ask(engine, "broken", logits_processor=[broken])
    assert sum(1 for _ in other) > 1
    nothing = RequestLlama(engine, "tiny", -1)
    with pytest.raises(Exception, match="rules out"):
        nothing.create_completion("none", logits_processor=[lambda _, row: np.full_like(row, -np.inf)])


def test_a_failed_decode_ends_its_requests_and_nothing_else(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.serve import batching
    from subkv.base.errors import CacheError

    def refuse(*_: Any) -> None:
        raise CacheError("-c", "no room")

    with monkeypatch.context() as patch:
        patch.setattr(batching, "decode_batch", refuse)
        with pytest.raises(CacheError, match="no room"):
            ask(engine, "lost")
    assert ask(engine, "found")["usage"]["completion_tokens"] == 24
