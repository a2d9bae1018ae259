"""Speculation: drafts of any length and from anywhere change how fast an answer comes, never which."""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from opening import N_CTX, last_logits, opened, prompt

from subkv import DraftModel, PromptLookup
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.drafts import EMPTY
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


def test_a_lookup_drafts_the_earlier_continuation() -> None:
    lookup = PromptLookup(ngram=2, num_pred_tokens=3)
    assert lookup(ids(1, 2, 7, 1, 2, 8, 9, 5, 1, 2)).tolist() == [8, 9, 5]
    assert lookup(ids(1, 2, 3, 1, 2, 3, 1, 2)).tolist() == [3, 1, 2]  # and continues to its present state
    assert lookup(ids(4, 4, 4)).tolist() == [4, 4, 4]
    assert PromptLookup(ngram=1, num_pred_tokens=5)(ids(1, 2, 1, 2)).tolist() == [1, 2, 1, 2, 1]
    for text in ((), (1,), (1, 2), (1, 2, 3, 9, 2), (2, 1, 3, 1)):
        assert lookup(ids(*text)).size == 0


@each("cache", ["subkv", "f16"])
@each("n_draft", [1, 10, 48, 100])
def test_drafts_of_any_length(coded_model: Models, cache: str, n_draft: int) -> None:
    path = coded_model()
    with opened(path, kv_cache=cache) as llm:
        plain = answer(llm, PROMPT)
    for draft in (
        Replay(PROMPT + plain, n_draft, wrong=7),
        PromptLookup(2, n_draft),
        LlamaPromptLookupDecoding(num_pred_tokens=n_draft),
        DraftModel(path, n_draft),
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


def test_a_model_that_drafts_for_itself_is_always_right(coded_model: Models) -> None:
    path = coded_model()
    with opened(path, kv_cache="f16", draft_model=DraftModel(path, 4)) as llm:
        first = answer(llm, PROMPT, 21)
        stats = llm.draft_stats()
        assert (stats.n_drafts, stats.n_accepted) == (4, stats.n_drafted)
        assert answer(llm, PROMPT[:30] + first) != []  # another text: its cells follow
    with opened(path, kv_cache="f16", draft_model=DraftModel(path, 4, p_min=1.0)) as llm:
        assert answer(llm, PROMPT, 21) == first
        assert llm.draft_stats().n_drafted == 0


def test_a_path_is_a_draft_model(coded_model: Models, tiny_model: Models) -> None:
    path = tiny_model("llama")
    with opened(coded_model(), draft_model=str(path)) as llm:
        model = llm.draft_model.model
        assert isinstance(model, DraftModel)
        copy = pickle.loads(pickle.dumps(llm))
        assert answer(copy, PROMPT, 10) == answer(llm, PROMPT, 10)
        copy.close()
        with pytest.raises(SubkvError, match="draft_model: another Llama is using"):
            opened(coded_model(), draft_model=model).__enter__()
    with pytest.raises(SubkvError, match="draft_model: expected a draft model that a Llama has opened"):
        model(ids(1, 2))
    with opened(coded_model(), draft_model=model) as llm:  # free again
        assert answer(llm, PROMPT, 5)


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
    for draft in (Replay(PROMPT + plain, 10, wrong=4), DraftModel(path, 3)):
        with opened(path, draft_model=draft, **options) as llm:
            decoded: list[int] = []
            decode = llm._ctx.decode
            llm._ctx.decode = lambda batch: (decoded.append(batch.n_tokens()), decode(batch))  # noqa: B023
            assert answer(llm, PROMPT, 40) == plain
            assert llm.draft_stats().n_drafted > 20
            generated = decoded[next(i for i in range(len(decoded)) if sum(decoded[:i]) >= len(PROMPT)) :]
            assert max(generated) <= 2 * (1 + draft.num_pred_tokens)


def test_refusals(coded_model: Models, tiny_model: Models, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_model("llama").read_bytes().replace(b"<|pad|>", b"<|pid|>"))
    with pytest.raises(SubkvError, match=r"draft_model: .* whose token \d+ is b'<\|pad\|>', found b'<\|pid\|>' in .*"):
        Llama(coded_model(), n_ctx=N_CTX, draft_model=other, verbose=False)
    with pytest.raises(SubkvError, match="ngram: expected 1 or more tokens, found 0"):
        PromptLookup(0)
    with pytest.raises(SubkvError, match="num_pred_tokens: expected 1 or more tokens, found 0"):
        DraftModel("m.gguf", 0)
    with pytest.raises(SubkvError, match="p_min: expected a probability, found 2"):
        DraftModel("m.gguf", p_min=2)
    with pytest.raises(SubkvError, match="draft_model: .*missing.gguf"):
        Llama(coded_model(), n_ctx=N_CTX, draft_model=tmp_path / "missing.gguf", verbose=False)
    with pytest.raises(SubkvError, match="draft_model: expected a path or a LlamaDraftModel, found int"):
        Llama(coded_model(), n_ctx=N_CTX, draft_model=3, verbose=False)
    with pytest.raises(CacheError, match="draft_model: expected a context that can go back, found recurrent state"):
        Llama(tiny_model("lfm2"), n_ctx=N_CTX, kv_cache="subkv", adapt="v", draft_model=PromptLookup(), verbose=False)


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


@pytest.mark.parametrize("cache", ["subkv", "f16"])
def test_the_demo_model_copies_code(demo_model: Path, cache: str) -> None:
    """Most drafts are accepted, and every token is the most probable one within rounding."""
    text = inspect.getsource(itertools_recipe) * 2
    with opened(demo_model, kv_cache=cache, n_ctx=512, draft_model=PromptLookup(3, 40)) as llm:
        tokens = llm.tokenize(text.encode())
        drafted = answer(llm, tokens, 32)
        assert llm.draft_stats().n_accepted > 16
        llm.reset()
        logits = last_logits(llm, tokens)
        for token in drafted:
            assert logits[token] >= logits.max() - 0.02 * np.abs(logits).max()
            logits = last_logits(llm, [token])


def itertools_recipe(values: list[int], size: int) -> list[list[int]]:
    """Batches of `size` values, the last one shorter."""
    batches: list[list[int]] = []
    for start in range(0, len(values), size):
        batches.append(values[start : start + size])
    if any(len(batch) > size for batch in batches):
        raise ValueError("expected batches that are not longer than their size")
    return batches


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


def test_a_refused_draft_model_keeps_the_earlier_one(coded_model: Models, tiny_model: Models) -> None:
    path = coded_model()
    with opened(path, n_batch=64, draft_model=DraftModel(path, 4)) as llm:
        before = llm.draft_model
        wrong: list[tuple[Any, str]] = [
            (5, "found int"),
            (PromptLookup(2, 64), "expected drafts shorter than n_batch, 64 tokens, found 64"),
            (path.with_name("none.gguf"), "draft_model"),
        ]
        for given, why in wrong:
            with pytest.raises(SubkvError, match=why):
                llm.draft_model = given
            assert llm.draft_model is before
        assert answer(llm, PROMPT, 8)
        with pytest.warns(UserWarning, match="n_rollback: expected at least the 50 tokens"):
            llm.draft_model = PromptLookup(2, 50)


def test_a_llama_stays_open_while_it_drafts(coded_model: Models) -> None:
    path = coded_model()
    with opened(path) as llm, ThreadPoolExecutor(1) as pool:
        plain = answer(llm, PROMPT, 8)
        errors = []

        class Intruder(LlamaDraftModel):
            def __call__(self, input_ids: Any, /, **_: Any) -> Any:
                errors.append(pool.submit(llm.close).exception())
                return EMPTY

        llm.draft_model = Intruder()
        assert answer(llm, PROMPT, 8) == plain
        assert errors and all(isinstance(error, CacheError) for error in errors)
