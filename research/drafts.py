"""Drafts for subkv.Llama by a smaller model, or from repetitions in the text, as llama.cpp's programs make them.

llm = subkv.Llama("model.gguf", n_rollback=48)
llm.draft_model = DraftModel(llm, "small.gguf", num_pred_tokens=8)
llm.draft_model = PromptLookup()
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.base.errors import SubkvError, concerning
from subkv.engine.cache import choose_cache
from subkv.engine.checkpoints import Checkpoints
from subkv.engine.context import Context, ContextOptions
from subkv.engine.llama import Llama
from subkv.engine.model import Model
from subkv.engine.prompt_cache import common_prefix
from subkv.engine.request import CacheRequest
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

    A repetition that reaches the end of the text is continued. Needs no memory and little time.
    """

    def __init__(self, ngram: int = N_GRAM, num_pred_tokens: int = M_GRAM) -> None:
        for key, n in (("ngram", ngram), ("num_pred_tokens", num_pred_tokens)):
            if n < 1:
                raise SubkvError(key, f"expected 1 or more tokens, found {n}")
        self.ngram, self.num_pred_tokens = ngram, num_pred_tokens

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
    """Drafts greedily with a smaller model of the same vocabulary; its cells keep the common prefix of texts."""

    def __init__(
        self,
        target: Llama,
        model_path: str | os.PathLike[str],
        num_pred_tokens: int = N_DRAFT,
        p_min: float = 0.0,
        kv_cache: str = "f16",
    ) -> None:
        """target: verifies the drafts; the context gets its size. num_pred_tokens: maximum tokens per draft. p_min: a
        draft ends before a token with a smaller probability. kv_cache: of the small model, as in Llama. Raises
        SubkvError.
        """
        if num_pred_tokens < 1:
            raise SubkvError("num_pred_tokens", f"expected 1 or more tokens, found {num_pred_tokens}")
        if not 0 <= p_min <= 1:
            raise SubkvError("p_min", f"expected a probability, found {p_min}")
        self.num_pred_tokens, self.p_min = num_pred_tokens, p_min
        n_ctx = int(C.llama_n_ctx_seq(target.ctx))
        with concerning(model="draft_model", type_k="draft_model", kv_cache="draft_model"):
            self._model = Model(Path(model_path))
            try:
                require_same_vocabulary(self._model, target.loaded_model)
                choice = choose_cache(Path(model_path), CacheRequest(kv_cache))
                choice = choice.with_rollback(max(num_pred_tokens, N_ROLLBACK))
                self._context = self._model.context(choice, ContextOptions(n_ctx, n_threads=target.n_threads))
            except BaseException:
                self._model.close()
                raise
        self._checkpoints = Checkpoints(self._context.handle) if self._context.recurrent else None
        self._cell_tokens = np.empty(n_ctx, np.intc)
        self._n_cells = 0

    def close(self) -> None:
        self._context.close()
        self._model.close()

    def __call__(self, input_ids: Tokens, /, **_: Any) -> Tokens:
        """A draft of the next tokens, [at most num_pred_tokens] i32; input_ids: the text, [n] i32."""
        model, context = self._model, self._context
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
