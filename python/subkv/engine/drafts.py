"""Speculative decoding: the model evaluates a draft of several tokens in one batch, and rejects tokens that its sampler
does not choose. Drafts come from a LlamaDraftModel of llama_cpp, and affect only the speed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.base.errors import SubkvError
from subkv.engine.cache import CacheChoice
from subkv.format.window import N_ROLLBACK, Window

# isort: split
from llama_cpp.llama_speculative import LlamaDraftModel

Tokens = npt.NDArray[np.intc]


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
        """Maximum tokens per draft, or 0 if it is unknown."""
        return _length(self.model)

    def __call__(self, input_ids: Tokens, /, **kwargs: Any) -> Tokens:
        with self._exclusive():
            draft = np.asarray(self.model(input_ids, **kwargs)).astype(np.intc)
        draft = draft[: min(self.num_pred_tokens or self._n_max, self._n_max)]
        unknown = np.flatnonzero((draft < 0) | (draft >= self._n_vocab))  # padding of the draft model's vocabulary
        draft = draft[: unknown[0]] if unknown.size else draft
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
    """The draft_model argument as a LlamaDraftModel or None. Raises SubkvError."""
    if source is not None and not callable(source):
        raise SubkvError("draft_model", f"expected a LlamaDraftModel, found {type(source).__name__}")
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


def with_room_for_drafts(choice: CacheChoice, window: Window, n_draft: int) -> CacheChoice:
    """The choice with an n_rollback for drafts of n_draft tokens, all of which may be rejected. window: requested."""
    requested = window.requested().get("n_rollback")
    if choice.coded:
        check_rollback(n_draft, requested, stacklevel=4)
    return choice.with_rollback(n_draft) if requested is None and n_draft > N_ROLLBACK else choice
