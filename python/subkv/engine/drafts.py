"""Speculative decoding: the model evaluates a draft of several tokens in one batch, and rejects tokens that its sampler
does not choose. The source of drafts affects only the speed.

    llm = subkv.Llama("model.gguf", draft_model="small.gguf")
    llm = subkv.Llama("model.gguf", draft_model=subkv.DraftModel("small.gguf", num_pred_tokens=8))
    llm = subkv.Llama("model.gguf", draft_model=subkv.PromptLookup())

Any LlamaDraftModel of llama_cpp works, too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.base.errors import SubkvError, concerning
from subkv.engine.cache import CacheChoice, CacheOptions, choose_cache
from subkv.engine.checkpoints import Checkpoints
from subkv.engine.context import Context, ContextOptions
from subkv.engine.model import Model
from subkv.engine.prompt_cache import common_prefix
from subkv.format.window import N_ROLLBACK
from subkv.native.binding import C

# isort: split
from llama_cpp.llama_speculative import LlamaDraftModel

Tokens = npt.NDArray[np.intc]

N_DRAFT = 3  # maximum tokens per draft of a draft model, llama.cpp's default
N_GRAM, M_GRAM = 12, 48  # tokens that must match, tokens per draft: llama.cpp's defaults
PADDING = 128  # maximum difference in size of two equal vocabularies (unused tokens)
EMPTY: Tokens = np.empty(0, np.intc)


class PromptLookup(LlamaDraftModel):
    """Drafts the tokens after the latest earlier occurrence of the last `ngram` tokens: llama.cpp's ngram-simple.

    A repetition that reaches the end of the text is continued. Needs no memory and little time. n_min: shorter drafts
    are dropped.
    """

    def __init__(self, ngram: int = N_GRAM, num_pred_tokens: int = M_GRAM, n_min: int = 0) -> None:
        for key, n in (("ngram", ngram), ("num_pred_tokens", num_pred_tokens)):
            if n < 1:
                raise SubkvError(key, f"expected 1 or more tokens, found {n}")
        self.ngram, self.num_pred_tokens, self.n_min = ngram, num_pred_tokens, n_min

    def __call__(self, input_ids: Tokens, /, **_: Any) -> Tokens:
        """A draft of the next tokens, [num_pred_tokens] i32, or empty; input_ids: the text, [n] i32."""
        n, last = self.ngram, len(input_ids) - 1
        if last < n:
            return EMPTY
        starts = np.flatnonzero(input_ids[n - 1 : last] == input_ids[last])
        for i in range(1, n):
            starts = starts[input_ids[starts + n - 1 - i] == input_ids[last - i]]
        if not starts.size:
            return EMPTY
        return np.resize(input_ids[starts[-1] + n :], self.num_pred_tokens)


class DraftModel(LlamaDraftModel):
    """Drafts greedily with a smaller model of the same vocabulary.

    num_pred_tokens: maximum tokens per draft; n_min: shorter drafts are dropped. p_min: a draft ends before a token
    with a smaller probability. kv_cache: of the small model, as in Llama. The Llama that verifies the drafts opens it,
    with the same context size. Its cells keep the common prefix of successive texts. Raises SubkvError.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        num_pred_tokens: int = N_DRAFT,
        p_min: float = 0.0,
        kv_cache: str = "f16",
        n_gpu_layers: int = 0,
        n_min: int = 0,
    ) -> None:
        if num_pred_tokens < 1:
            raise SubkvError("num_pred_tokens", f"expected 1 or more tokens, found {num_pred_tokens}")
        if not 0 <= p_min <= 1:
            raise SubkvError("p_min", f"expected a probability, found {p_min}")
        self.model_path, self.num_pred_tokens, self.p_min = Path(model_path), num_pred_tokens, p_min
        self.kv_cache, self.n_gpu_layers, self.n_min = kv_cache, n_gpu_layers, n_min
        self._model: Model | None = None
        self._context: Context | None = None

    def __reduce__(self) -> Any:
        arguments = self.model_path, self.num_pred_tokens, self.p_min, self.kv_cache, self.n_gpu_layers, self.n_min
        return DraftModel, arguments

    def open(self, target: Model, n_ctx: int, n_threads: int | None) -> None:
        """Load the model, for a text of at most n_ctx tokens of `target`. Raises SubkvError about draft_model."""
        if self._model is not None:
            raise SubkvError("draft_model", "another Llama is using this draft model")
        with concerning(model="draft_model", type_k="draft_model", kv_cache="draft_model"):
            self._model = Model(self.model_path, self.n_gpu_layers)
            try:
                require_same_vocabulary(self._model, target)
                choice = choose_cache(self.model_path, CacheOptions(self.kv_cache))
                choice = choice.with_rollback(max(self.num_pred_tokens, N_ROLLBACK))
                self._context = self._model.context(choice, ContextOptions(n_ctx, n_threads=n_threads))
            except BaseException:
                self.close()
                raise
        self._checkpoints = Checkpoints(self._context.handle) if self._context.recurrent else None
        self._cell_tokens = np.empty(n_ctx, np.intc)
        self._n_cells = 0

    def close(self) -> None:
        """Free the model; it can be opened again."""
        if self._context is not None:
            self._context.close()
        if self._model is not None:
            self._model.close()
        self._context = self._model = None

    def __call__(self, input_ids: Tokens, /, **_: Any) -> Tokens:
        """A draft of the next tokens, [at most num_pred_tokens] i32; input_ids: the text, [n] i32."""
        model, context = self._model, self._context
        if model is None or context is None:
            raise SubkvError("draft_model", "expected a draft model that a Llama has opened, found a closed one")
        n = len(input_ids)
        n_max = min(self.num_pred_tokens, len(self._cell_tokens) - n)
        if n < 1 or n_max < 1 or input_ids.max() >= model.n_vocab:  # or a token that this model does not have
            return EMPTY
        try:
            self._rewind(context, input_ids)
            for start in range(self._n_cells, n, context.n_batch):
                batch = input_ids[start : start + context.n_batch]
                self._decode(context, batch, len(batch) - 1)
            if self._checkpoints is not None:
                self._checkpoints.take_for_draft(n)
            drafted: list[int] = []
            while True:
                logits = context.logits(1)[0]
                token = int(logits.argmax())
                if self.p_min and 1 / np.exp(logits - logits[token]).sum() < self.p_min:
                    break
                drafted.append(token)
                if len(drafted) == n_max or model.is_end(token):
                    break
                self._decode(context, np.array([token], np.intc), 0)
        except BaseException:
            self._n_cells = 0  # the content of the cells is unknown now
            raise
        return np.array(drafted, np.intc)

    def _rewind(self, context: Context, ids: Tokens) -> None:
        """Remove all cells except those of the common prefix with `ids`; the last token is always evaluated again,
        because its logits are needed.
        """
        n = common_prefix(self._cell_tokens[: self._n_cells], ids[:-1])
        if self._checkpoints is not None:
            n = self._checkpoints.rewind(n)
        elif not C.llama_memory_seq_rm(context.memory, 0, n, -1):
            n = 0
            C.llama_memory_seq_rm(context.memory, 0, -1, -1)
        self._n_cells = n

    def _decode(self, context: Context, tokens: Tokens, first_logits: int) -> None:
        start, self._n_cells = self._n_cells, self._n_cells + len(tokens)
        context.decode(tokens, start, first_logits)
        self._cell_tokens[start : self._n_cells] = tokens


def require_same_vocabulary(draft: Model, target: Model) -> None:
    """Raises SubkvError about draft_model if a token has different texts in the two models."""
    kinds = [C.llama_vocab_type(model.vocab) for model in (draft, target)]
    sizes = [draft.n_vocab, target.n_vocab]
    if kinds[0] != kinds[1] or abs(sizes[0] - sizes[1]) > PADDING:
        raise SubkvError(
            "draft_model",
            f"expected the vocabulary of the model, {sizes[1]} tokens of type {kinds[1]}, found {sizes[0]} of type "
            f"{kinds[0]} in {draft.path}",
        )
    for token in range(min(sizes)):
        text, expected = (C.llama_vocab_get_text(model.vocab, token) for model in (draft, target))
        if text != expected:
            raise SubkvError(
                "draft_model",
                f"expected the vocabulary of the model, whose token {token} is {expected!r}, found {text!r} in "
                f"{draft.path}",
            )


@dataclass
class DraftStats:
    """Counts of speculative decoding."""

    n_drafted: int = 0  # evaluated tokens of drafts
    n_accepted: int = 0  # those among them that the sampler has chosen
    n_drafts: int = 0


class CheckedDrafts(LlamaDraftModel):
    """Wraps the LlamaDraftModel of a Llama: checks, truncates and counts its drafts.

    n_max: maximum tokens per draft. exclusive: the Llama's; prevents closing or replacing the model meanwhile.
    """

    def __init__(
        self, model: LlamaDraftModel, n_vocab: int, n_max: int, exclusive: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.model = model
        self.stats = DraftStats()
        self._n_vocab, self._n_max, self._exclusive = n_vocab, n_max, exclusive
        self.n_latest = 0  # tokens of the latest draft, 0 once they are evaluated

    @property
    def num_pred_tokens(self) -> int:
        """Maximum tokens per draft; 0: unknown."""
        return _length(self.model)

    def __call__(self, input_ids: Tokens, /, **kwargs: Any) -> Tokens:
        with self._exclusive():
            draft = np.asarray(self.model(input_ids, **kwargs)).astype(np.intc)
        draft = draft[: min(self.num_pred_tokens or self._n_max, self._n_max)]
        unknown = np.flatnonzero((draft < 0) | (draft >= self._n_vocab))  # padding of the draft model's vocabulary
        draft = draft[: unknown[0]] if unknown.size else draft
        draft = draft if len(draft) >= getattr(self.model, "n_min", 0) else EMPTY
        self.n_latest = len(draft)
        return draft

    def evaluated(self, n_max: int) -> int:
        """Count the drafted tokens in the next evaluation; returns their number, at most n_max."""
        n, self.n_latest = max(min(self.n_latest, n_max), 0), 0
        self.stats.n_drafted += n
        self.stats.n_drafts += n > 0
        return n

    def count(self, accepted: bool) -> None:
        """Count a drafted token; accepted: the sampler has chosen it."""
        self.stats.n_accepted += bool(accepted)


def as_draft_model(source: Any) -> Any:
    """The draft_model argument as a LlamaDraftModel or None; a path means a DraftModel. Raises SubkvError."""
    if isinstance(source, (str, os.PathLike)):
        return DraftModel(source)
    if source is not None and not callable(source):
        raise SubkvError("draft_model", f"expected a path or a LlamaDraftModel, found {type(source).__name__}")
    return source.model if isinstance(source, CheckedDrafts) else source


def _length(model: Any) -> int:
    return int(getattr(model, "num_pred_tokens", 0))


def draft_length(model: Any, n_batch: int) -> int:
    """Maximum tokens per draft of a model, 0: unknown. Raises SubkvError."""
    n = _length(model)
    if n >= n_batch:
        raise SubkvError("draft_model", f"expected drafts shorter than n_batch, {n_batch} tokens, found {n}")
    return n


def check_rollback(n_draft: int, n_rollback: int | None, stacklevel: int = 3) -> None:
    """Warn if drafts may be longer than the n_rollback tokens whose removal costs no exact row (None: unlimited)."""
    if n_rollback is not None and n_draft > n_rollback:
        warnings.warn(
            f"n_rollback: expected at least the {n_draft} tokens that draft_model predicts, found {n_rollback}; "
            "a rejected draft may then evaluate 32 tokens again",
            stacklevel=stacklevel,
        )


def with_room_for_drafts(choice: CacheChoice, n_draft: int) -> CacheChoice:
    """The choice with an n_rollback for drafts of n_draft tokens, all of which may be rejected."""
    requested = choice.window.requested().get("n_rollback")
    if choice.coded:
        check_rollback(n_draft, requested, stacklevel=4)
    return choice.with_rollback(n_draft) if requested is None and n_draft > N_ROLLBACK else choice


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Tokens as the array type of draft models."""
    return np.fromiter(tokens, np.intc, len(tokens))
