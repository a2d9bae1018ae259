"""research.drafts: a smaller model and repetitions as sources of drafts; they change no answer."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from opening import last_logits, opened, prompt

from research.drafts import DraftModel, PromptLookup
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama

Models = Callable[..., Path]
PROMPT = prompt(20) * 5


def answer(llm: Llama, tokens: list[int], n: int = 60) -> list[int]:
    return list(itertools.islice(llm.generate(tokens, temp=0.0), n))


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
@each("n_draft", [1, 10, 48])
def test_drafts_change_no_answer(coded_model: Models, cache: str, n_draft: int) -> None:
    path = coded_model()
    options: dict[str, Any] = {"kv_cache": cache} | ({"n_rollback": 48} if cache == "subkv" else {})
    with opened(path, **options) as llm, closing(DraftModel(llm, path, n_draft)) as small:
        plain = answer(llm, PROMPT)
        for draft in (small, PromptLookup(2, n_draft)):
            llm.reset()
            llm.draft_model = draft
            assert answer(llm, PROMPT) == plain, type(draft).__name__
            stats = llm.draft_stats()
            assert 0 <= stats.n_accepted <= stats.n_drafted <= n_draft * stats.n_drafts


def test_a_model_that_drafts_for_itself_is_always_right(coded_model: Models) -> None:
    path = coded_model()
    with opened(path, kv_cache="f16") as llm:
        with closing(DraftModel(llm, path, 4)) as llm.draft_model:
            first = answer(llm, PROMPT, 21)
            stats = llm.draft_stats()
            assert (stats.n_drafts, stats.n_accepted) == (4, stats.n_drafted)
            assert answer(llm, PROMPT[:30] + first) != []  # another text: its cells follow
        with closing(DraftModel(llm, path, 4, p_min=1.0)) as llm.draft_model:
            assert answer(llm, PROMPT, 21) == first
            assert llm.draft_stats().n_drafted == 0


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_recurrent_state_is_restored(tiny_model: Models, arch: str) -> None:
    path = tiny_model(arch)
    with opened(path, kv_cache="f16") as llm:
        plain = answer(llm, PROMPT, 40)
        with closing(DraftModel(llm, path, 3)) as llm.draft_model:
            assert answer(llm, PROMPT, 40) == plain
            assert llm.draft_stats().n_drafted > 20


def test_refusals(coded_model: Models, tiny_model: Models, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_model("llama").read_bytes().replace(b"<|pad|>", b"<|pid|>"))
    with pytest.raises(SubkvError, match="ngram: expected 1 or more tokens, found 0"):
        PromptLookup(0)
    with opened(coded_model()) as llm:
        for arguments, message in (
            ((other,), r"draft_model: .* whose token \d+ is b'<\|pad\|>', found b'<\|pid\|>' in .*"),
            ((tmp_path / "missing.gguf",), "draft_model: .*missing.gguf"),
            (("m.gguf", 0), "num_pred_tokens: expected 1 or more tokens, found 0"),
            (("m.gguf", 1, 2), "p_min: expected a probability, found 2"),
        ):
            with pytest.raises(SubkvError, match=message):
                DraftModel(llm, *arguments)


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
