"""Checkpoints of recurrent state: the cost of an edited, repeated or shared text, and answers as in a new context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opening import last_logits, opened, prompt

from runtime.chat.conversation import Conversation, Sampling, Turn
from subkv.base.errors import CacheError, SubkvError
from subkv.engine import checkpoints
from subkv.engine.checkpoints import N_LEAST, Checkpoints
from subkv.engine.llama import Llama

Models = Callable[..., Path]
KINDS = [("lfm2", "subkv"), ("lfm2", "f16"), ("qwen35", "subkv"), ("mamba", "f16")]


@contextlib.contextmanager
def counting(llm: Llama) -> Iterator[list[int]]:
    """Lengths of the batches that are decoded."""
    lengths: list[int] = []
    decode = llm._ctx.decode
    llm._ctx.decode = lambda batch: (lengths.append(batch.n_tokens()), decode(batch))
    try:
        yield lengths
    finally:
        del llm._ctx.decode


@pytest.fixture(params=KINDS, ids=["-".join(kind) for kind in KINDS])
def llm(request: pytest.FixtureRequest, tiny_model: Models) -> Iterator[Llama]:
    arch, cache = request.param
    with opened(tiny_model(arch), kv_cache=cache, n_ctx=1024) as made:
        yield made


def answer(llm: Llama, tokens: list[int], n: int = 4) -> tuple[list[int], int]:
    """A greedy answer, and how many tokens were evaluated for it."""
    with counting(llm) as lengths:
        stream = llm.generate(tokens, temp=0.0)
        out = [next(stream) for _ in range(n)]
        stream.close()
    return out, sum(lengths)


def test_texts_that_go_on_otherwise(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, a turn more, that turn changed, another text with the same beginning, once more."""
    monkeypatch.setattr(checkpoints, "SPACING", 128)
    text, n = prompt(300), 4
    first, evaluated = answer(llm, text)
    assert evaluated == 300 + n - 1
    turn = [*text, *first]
    programs = [
        (text, 1),
        ([*turn, 9, 8, 7], 4),
        ([*turn, 5, 4], 3),
        ([*text[:200], 1, 2, 3], 200 - 128 + 3),
        ([*text[:200], 4, 5, 6], 3),
    ]
    found = []
    for tokens, most in programs:
        out, evaluated = answer(llm, tokens)
        assert evaluated <= most + n - 1, tokens[-3:]
        found.append(out)
    for (tokens, _), out in zip(programs, found, strict=True):
        llm.reset()
        llm._ctx.kv_cache_clear()
        again, evaluated = answer(llm, tokens)
        assert evaluated == len(tokens) + n - 1
        assert again == out


def test_logits_after_going_back_are_those_of_the_text(llm: Llama) -> None:
    text = prompt(200)
    llm.eval(text[:100])
    llm.eval(prompt(90, seed=1))
    assert llm.keep(100) == 100
    found = last_logits(llm, text[100:])
    llm.reset()
    llm._ctx.kv_cache_clear()
    expected = last_logits(llm, text)
    assert np.abs(found - expected).max() < 1e-2 * expected.std()


def test_ten_turns_of_chat(llm: Llama) -> None:
    """Every answer is generated twice; only the new message and answers are evaluated."""
    talk = Conversation(llm, "Be brief.", Sampling(temp=0.0, seed=1))
    n_held = 0
    for i in range(10):
        with counting(llm) as lengths:
            "".join(talk.ask(f"Question {i}", 4, lambda: False, Turn()))
        assert sum(lengths) <= len(talk.tokens) - n_held + 2
        with counting(llm) as lengths:
            "".join(talk.regenerate(4, lambda: False, Turn()))
        assert sum(lengths) <= 4 + 3
        n_held = len(talk.tokens)


@pytest.mark.parametrize(("kept", "again"), [(True, 250), (False, 5330)])
def test_evaluated_tokens_of_ten_turns(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch, kept: bool, again: int
) -> None:
    """Messages of about 70 tokens, answers of 24, each generated twice."""
    if not kept:
        monkeypatch.setattr(Checkpoints, "take", lambda self, n: None)
    evaluated = []
    with opened(tiny_model("lfm2"), kv_cache="subkv", n_ctx=1024) as made:
        talk = Conversation(made, "Be brief.", Sampling(temp=0.0, seed=1))
        for i in range(10):
            question = f"Question {i}: " + "what happens then? " * 3
            for pieces in (talk.ask(question, 24, lambda: False, Turn()), talk.regenerate(24, lambda: False, Turn())):
                with counting(made) as lengths:
                    "".join(pieces)
                evaluated.append(sum(lengths))
        assert len(talk.tokens) == 957
    assert (sum(evaluated[::2]), sum(evaluated[1::2])) == (956, again)


def test_a_state_of_another_text_leaves_no_checkpoint(llm: Llama) -> None:
    llm.eval(prompt(60))
    state = llm.save_state()
    llm.eval(prompt(60, seed=1))
    assert llm.restorable(200) > 0
    llm.load_state(state)
    assert llm.restorable(200) == 0
    assert llm.keep(30) == 0


def test_recurrent_state_forgets_no_middle(llm: Llama) -> None:
    llm.eval(prompt(60))
    with pytest.raises(SubkvError, match="context_shift: expected a model and a cache whose positions can move"):
        llm.require_shift("context_shift")
    with pytest.raises(CacheError, match="n_discard: expected a context that can remove tokens"):
        llm.discard(4, 20)
    assert llm.n_tokens == 60
    with counting(llm) as lengths:
        llm.eval([5])
    assert lengths == [1]


def test_an_interrupted_restore_is_repaired(llm: Llama) -> None:
    """A state was restored, but the cells after it were not removed yet."""
    llm.eval(prompt(60))
    llm.eval(prompt(40, seed=1))
    points = llm._ctx.checkpoints
    assert points is not None
    assert points.restorable(80) == 60
    points._inconsistent = True
    assert points.rewind(100) in (0, 60, 99)
    assert not points._inconsistent


def test_bytes_are_bounded(llm: Llama) -> None:
    """Checkpoints that save the least evaluation near the end are dropped first."""
    llm.eval(prompt(2))
    points = Checkpoints(llm.ctx)
    points.take(2)
    size = len(points.points[0].state)
    points = Checkpoints(llm.ctx, n_bytes=5 * size + 1)
    for n in range(100, 3201, 100):
        points.take(n)
        assert sum(len(point.state) for point in points.points) <= 5 * size
        for point in points.points:  # the farther behind, the more may be evaluated again
            assert points._saved(point) <= max(100, 4 * (n - point.n_tokens))
    assert len(points.points) == 5 and points.points[-1].n_tokens == 3200
    few = Checkpoints(llm.ctx, n_bytes=size)
    for n in range(100, 1001, 100):
        few.take(n)
    assert len(few.points) == N_LEAST and few.restorable(990) == 900
    none = Checkpoints(llm.ctx, n_bytes=size - 1)
    none.take(100)
    assert none.restorable(100) == 0


def test_drafts_leave_one_checkpoint_and_those_that_are_due(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SPACING", 50)
    with opened(tiny_model("lfm2"), kv_cache="f16", n_ctx=512) as llm:
        llm.eval(prompt(20))
        points = Checkpoints(llm.ctx)
        for n in (10, 20, 20, *range(30, 131, 10)):
            points.take_for_draft(n)
            assert points.restorable(n) == n
        assert [point.n_tokens for point in points.points] == [50, 100, 130]
        points.take(135)  # for good: a prompt ends there
        points.take_for_draft(135)
        points.take_for_draft(140)
        assert [point.n_tokens for point in points.points] == [50, 100, 135, 140]


def test_adaptive_bases_save_no_checkpoints(tiny_model: Models) -> None:
    with opened(tiny_model("lfm2"), kv_cache="subkv", adapt="v", n_ctx=512) as llm:
        llm.eval(prompt(60))
        llm.eval(prompt(40, seed=1))
        assert llm.restorable(100) == 0
        first, _ = answer(llm, prompt(60))
        again, evaluated = answer(llm, prompt(60))
        assert (again, evaluated) == (first, 63)


def test_models_without_recurrent_state_have_none(tiny_model: Models) -> None:
    with opened(tiny_model("llama"), kv_cache="f16") as llm:
        llm.eval(prompt(60))
        assert llm._ctx.checkpoints is None
        assert llm.restorable(60) == 0


def test_drafts_of_a_hybrid(tiny_model: Models) -> None:
    """Rejected drafts are a tail; the answer is that without."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    text = prompt(40) * 2

    def replies(**options: Any) -> Any:
        with opened(tiny_model("lfm2"), kv_cache="subkv", **options) as llm:
            return llm.create_completion(text, max_tokens=12, temperature=0.0)["choices"][0]["text"]

    assert replies(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4)) == replies()
