"""Speculation: drafts of any length and from anywhere change how fast an answer comes, never which."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from opening import N_CTX, opened, prompt

from subkv.base.errors import CacheError, SubkvError
from subkv.engine.llama import Llama
from subkv.format.window import N_ROLLBACK
from subkv.native.binding import llama_cpp

# isort: split
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

Models = Callable[..., Path]
PROMPT = prompt(20) * 5


class Replay(LlamaDraftModel):
    """Drafts the known answer with every `wrong`-th token replaced."""

    def __init__(self, text: list[int], num_pred_tokens: int, wrong: int) -> None:
        self.text, self.num_pred_tokens, self.wrong = text, num_pred_tokens, wrong

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        n = len(input_ids)
        draft = np.array(self.text[n : n + self.num_pred_tokens], np.intc)
        where = np.arange(n, n + len(draft)) % self.wrong == 0
        return np.where(where, (draft + 1) % 200, draft)


def answer(llm: Llama, tokens: list[int], n: int = 60, **how: Any) -> list[int]:
    return list(itertools.islice(llm.generate(tokens, **{"temp": 0.0} | how), n))


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.intc)


@each("cache", ["subkv", "f16"])
@each("n_draft", [1, 10, 48, 100])
def test_drafts_of_any_length(coded_model: Models, cache: str, n_draft: int) -> None:
    path = coded_model()
    with opened(path, kv_cache=cache) as llm:
        plain = answer(llm, PROMPT)
    for draft in (
        Replay(PROMPT + plain, n_draft, wrong=7),
        LlamaPromptLookupDecoding(num_pred_tokens=n_draft),
    ):
        with opened(path, kv_cache=cache, draft_model=draft) as llm:
            assert llm.kv_stats().n_rollback == (max(n_draft, N_ROLLBACK) if cache == "subkv" else 0)
            assert answer(llm, PROMPT) == plain, type(draft).__name__
            stats = llm.draft_stats()
            assert 0 <= stats.n_accepted <= stats.n_drafted
            assert stats.n_drafted <= n_draft * stats.n_drafts
            if isinstance(draft, Replay):
                assert stats.n_accepted > 0
                assert stats.n_accepted < stats.n_drafted or n_draft == 1


def test_processors_see_no_drafts(coded_model: Models) -> None:
    """llama_cpp shows them the whole batch."""

    def tokens_of(**options: Any) -> tuple[list[list[int]], list[int]]:
        prompts: list[list[int]] = []

        def note(input_ids: Any, scores: Any) -> Any:
            prompts.append(input_ids.tolist())
            return scores

        with opened(coded_model(), **options) as llm:
            found = answer(llm, PROMPT, 30, logits_processor=llama_cpp.LogitsProcessorList([note]))
        return prompts, found

    plain = tokens_of()
    assert tokens_of(draft_model=Replay(PROMPT + plain[1], 10, wrong=4)) == plain


def test_sampling_is_that_without(coded_model: Models) -> None:
    """Every position is sampled by the one chain, in order, so the same random numbers give the same answer."""
    with opened(coded_model()) as llm:
        llm.set_seed(5)
        plain = answer(llm, PROMPT, 40, temp=1.5)
    with opened(coded_model(), draft_model=Replay(PROMPT + plain, 12, wrong=5)) as llm:
        llm.set_seed(5)
        assert answer(llm, PROMPT, 40, temp=1.5) == plain
        assert llm.draft_stats().n_accepted > 5


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_recurrent_state_is_restored(tiny_model: Models, arch: str) -> None:
    """Restored from the checkpoint before the draft: at most the draft is evaluated again."""
    path, options = tiny_model(arch), {"kv_cache": "subkv" if arch == "lfm2" else "f16"}
    with opened(path, **options) as llm:
        plain = answer(llm, PROMPT, 40)
    draft = Replay(PROMPT + plain, 10, wrong=4)
    with opened(path, draft_model=draft, **options) as llm:
        decoded: list[int] = []
        decode = llm._ctx.decode
        llm._ctx.decode = lambda batch: (decoded.append(batch.n_tokens()), decode(batch))
        assert answer(llm, PROMPT, 40) == plain
        assert llm.draft_stats().n_drafted > 20
        generated = decoded[next(i for i in range(len(decoded)) if sum(decoded[:i]) >= len(PROMPT)) :]
        assert max(generated) <= 2 * (1 + draft.num_pred_tokens)


def test_refusals(coded_model: Models, tiny_model: Models) -> None:
    for given in (3, "small.gguf"):
        with pytest.raises(SubkvError, match="draft_model: expected a LlamaDraftModel, found (int|str)"):
            Llama(coded_model(), n_ctx=N_CTX, draft_model=given, verbose=False)
    with pytest.raises(CacheError, match="draft_model: expected a context that can go back, found recurrent state"):
        Llama(tiny_model("lfm2"), n_ctx=N_CTX, kv_cache="subkv", adapt="v", draft_model=Endless(), verbose=False)


def test_invalid_drafts_are_ignored(coded_model: Models) -> None:
    """Drafts that are too long, or have invalid tokens or types, do not reach llama.cpp."""

    class Nonsense(LlamaDraftModel):
        num_pred_tokens = 4

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            n = len(input_ids) % 4
            return [np.array([-1] * 3), np.array([5, 10**6]), np.arange(50, dtype=np.int64), np.array([], float)][n]

    with opened(coded_model()) as llm:
        plain = answer(llm, PROMPT, 30)
    with opened(coded_model(), draft_model=Nonsense()) as llm:
        assert answer(llm, PROMPT, 30) == plain
        assert 0 < llm.draft_stats().n_drafted <= 4 * 30


class Endless(LlamaDraftModel):
    """Drafts more tokens than any batch holds, and does not report the length of its drafts."""

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        return np.resize(input_ids, 5000)


def test_a_draft_is_cut_to_a_batch(coded_model: Models) -> None:
    path = coded_model()
    with opened(path, n_batch=64) as llm:
        plain = answer(llm, PROMPT)
        llm.draft_model = Endless()
        assert answer(llm, PROMPT) == plain
        assert 0 < llm.draft_stats().n_drafted <= 63 * llm.draft_stats().n_drafts


def test_a_refused_draft_model_keeps_the_earlier_one(coded_model: Models) -> None:
    path = coded_model()
    with opened(path, n_batch=64, draft_model=LlamaPromptLookupDecoding(2, 4)) as llm:
        before = llm.draft_model
        wrong: list[tuple[Any, str]] = [
            (5, "found int"),
            (LlamaPromptLookupDecoding(2, 64), "expected drafts shorter than n_batch, 64 tokens, found 64"),
        ]
        for given, why in wrong:
            with pytest.raises(SubkvError, match=why):
                llm.draft_model = given
            assert llm.draft_model is before
        assert answer(llm, PROMPT, 8)
        with pytest.warns(UserWarning, match="n_rollback: expected at least the 50 tokens"):
            llm.draft_model = LlamaPromptLookupDecoding(2, 50)


def test_a_llama_stays_open_while_it_drafts(coded_model: Models) -> None:
    path = coded_model()
    with opened(path) as llm, ThreadPoolExecutor(1) as pool:
        plain = answer(llm, PROMPT, 8)
        errors = []

        class Intruder(LlamaDraftModel):
            def __call__(self, input_ids: Any, /, **_: Any) -> Any:
                errors.append(pool.submit(llm.close).exception())
                return ids()

        llm.draft_model = Intruder()
        assert answer(llm, PROMPT, 8) == plain
        assert errors and all(isinstance(error, CacheError) for error in errors)
