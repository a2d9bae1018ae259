"""One token from one row of logits, by llama.cpp's samplers."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subkv.base.errors import SubkvError
from subkv.engine.context import Logits
from subkv.native.binding import C, internals, llama_cpp

Processor = Callable[[Any, Logits], Logits]


@dataclasses.dataclass(frozen=True)
class Scored:
    """A token, its natural log-probability and those of the most likely ones; without logprobs None and empty."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SamplingError(SubkvError):
    """No token can follow: a grammar that the vocabulary cannot go on with, or logits that are no numbers."""


def scored(token: int, logits: Logits, n_top: int | None) -> Scored:
    """The token with its log-probability under `logits` [n_vocab]; n_top None: without."""
    if n_top is None:
        return Scored(token)
    logprobs = llama_cpp.Llama.logits_to_logprobs(logits)
    best = np.argpartition(-logprobs, n_top)[:n_top] if n_top else np.empty(0, np.int64)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    return Scored(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


@dataclasses.dataclass
class Sampler:
    """The samplers of one request.

    chain: llama.cpp's samplers; it ends with one that selects. grammar: a chain of a grammar alone. bias: token ->
    what is added to its logit. processors: llama_cpp's logits processors, called with the tokens so far and the logits
    [n_vocab]. n_top: how many likely tokens to score, None: nothing is scored.
    """

    chain: internals.LlamaSampler
    grammar: internals.LlamaSampler | None
    bias: dict[int, float]
    processors: Sequence[Processor]
    n_top: int | None

    def __post_init__(self) -> None:
        self._biased = np.array(list(self.bias), dtype=np.intp)
        self._scores = np.array(list(self.bias.values()), dtype=np.float32)

    def sample(self, logits: Logits, tokens: Sequence[int], candidates: internals.LlamaTokenDataArray) -> Scored:
        """The token that follows `tokens`, from the model's logits [n_vocab]. Raises SamplingError.

        candidates: room for one row, which this call overwrites.
        """
        row = logits
        if self.processors or self.bias:
            row = logits.copy()
            row[self._biased] += self._scores
            for process in self.processors:
                row = process(np.array(tokens, dtype=np.intc), row)
        token = self._choose(row, candidates, self.chain)
        # a grammar takes milliseconds for all of a vocabulary, microseconds for one token: as in llama.cpp's own
        # programs the token is chosen freely, and again under the grammar only when that rules it out
        if self.grammar is not None and (token is None or not self._admits(token)):
            token = self._choose(row, candidates, self.grammar, self.chain)
        # llama.cpp ends the process when a grammar is told to accept what it has ruled out
        if token is None:
            raise SamplingError("", "no token can follow: the grammar rules out all of the vocabulary")
        if self.grammar is not None:
            self.grammar.accept(token)
        self.chain.accept(token)
        return scored(token, logits, self.n_top)

    @staticmethod
    def _choose(row: Logits, candidates: internals.LlamaTokenDataArray, *chains: internals.LlamaSampler) -> int | None:
        """The choice of the chains, one after the other; None when it is none."""
        candidates.copy_logits(row)
        array = candidates.candidates
        array.selected = -1
        for chain in chains:
            C.llama_sampler_apply(chain.sampler, ctypes.byref(array))
        chosen = array.data[array.selected] if 0 <= array.selected < array.size else None
        return int(chosen.id) if chosen is not None and np.isfinite(chosen.logit) else None

    def _admits(self, token: int) -> bool:
        assert self.grammar is not None
        alone = C.llama_token_data(id=token, logit=1.0, p=0.0)
        array = C.llama_token_data_array(data=ctypes.pointer(alone), size=1, selected=-1, sorted=False)
        C.llama_sampler_apply(self.grammar.sampler, ctypes.byref(array))
        return bool(np.isfinite(alone.logit))
