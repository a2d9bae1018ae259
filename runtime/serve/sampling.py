"""One token from one row of logits, by llama.cpp's samplers."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from subkv.base.errors import SubkvError
from subkv.engine.context import Logits
from subkv.native.binding import C, internals, llama_cpp

Processor = Callable[[Any, Logits], Logits]

# Seconds that a step waits for a grammar; most answer in a tenth of a millisecond. Others are asked again after the
# next step, without waiting.
PATIENCE = 0.02


class Grammar(Protocol):
    """What may follow, as runtime.serve.grammars.Grammar says it."""

    def ask(self, token: int | None) -> None: ...
    def answer(self, wait: float) -> Any: ...
    def accept(self, token: int) -> None: ...
    def close(self) -> None: ...


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


def left_of(token: int, p: float, candidates: internals.LlamaTokenDataArray, n_top: int) -> Scored:
    """The token that a chain chose with probability p, and the most likely ones of those that it left."""
    array, whole = candidates.candidates, candidates.candidates_data
    start = (ctypes.addressof(array.data.contents) - whole.ctypes.data) // whole.itemsize
    left = whole[start : start + array.size]
    n = min(n_top, len(left))
    best = np.argpartition(-left.p, n - 1)[:n] if n else np.empty(0, np.int64)
    best = best[np.argsort(-left.p[best], kind="stable")]
    top = tuple((int(left.id[i]), math.log(left.p[i])) for i in best if left.p[i] > 0)
    return Scored(token, math.log(p) if p > 0 else -math.inf, top)


@dataclasses.dataclass
class Sampler:
    """The samplers of one request.

    chain: llama.cpp's samplers; it ends with one that selects. grammar: what the answer must follow. bias: token ->
    what is added to its logit. processors: llama_cpp's logits processors, called with the tokens so far and the logits
    [n_vocab]. n_top: how many likely tokens to score, None: nothing is scored; by the model's logits, or with
    `post` by what the chain has left.
    """

    chain: internals.LlamaSampler
    grammar: Grammar | None
    bias: dict[int, float]
    processors: Sequence[Processor]
    n_top: int | None
    post: bool = False

    def __post_init__(self) -> None:
        self._biased = np.array(list(self.bias), dtype=np.intp)
        self._scores = np.array(list(self.bias.values()), dtype=np.float32)
        self._left: Scored | None = None  # the choice by what the chain left
        self._asked: tuple[int | None, Logits, Logits] | None = None  # the grammar: token, logits, the same with biases

    def sample(self, logits: Logits, tokens: Sequence[int], candidates: internals.LlamaTokenDataArray) -> Scored | None:
        """The token that follows `tokens`, from the model's logits [n_vocab]. Raises SamplingError.

        candidates: room for one row, which this call overwrites. None: the grammar has not answered yet; resume()
        asks it again.
        """
        row = logits
        if self.processors or self.bias:
            row = logits.copy()
            row[self._biased] += self._scores
            for process in self.processors:
                row = process(np.array(tokens, dtype=np.intc), row)
        token = self._choose(row, candidates)
        if self.grammar is None:
            return self._taken(token, logits)
        # a grammar takes milliseconds for all of a vocabulary, microseconds for one token: as in llama.cpp's own
        # programs the token is chosen freely, and again under the grammar only when that rules it out
        self.grammar.ask(token)
        self._asked = token, logits, row
        found = self.resume(candidates, PATIENCE)
        if found is None:
            self._asked = token, logits.copy(), row.copy()  # the next step overwrites them
        return found

    def resume(self, candidates: internals.LlamaTokenDataArray, wait: float = 0.0) -> Scored | None:
        """What sample() has not returned, after at most `wait` seconds; None: not yet. Raises SamplingError."""
        assert self.grammar is not None and self._asked is not None
        allowed = self.grammar.answer(wait)
        if allowed is None:
            return None
        token, logits, row = self._asked
        self._asked = None
        if allowed is not True:
            token = self._choose(np.where(allowed, row, np.float32(-np.inf)), candidates)
            if token is not None:
                self.grammar.accept(token)
        return self._taken(token, logits)

    def close(self) -> None:
        """End the grammar. Any thread may."""
        if self.grammar is not None:
            self.grammar.close()

    def _taken(self, token: int | None, logits: Logits) -> Scored:
        if token is None:
            raise SamplingError("", "no token can follow: the grammar rules out all of the vocabulary")
        self.chain.accept(token)
        return self._left or scored(token, logits, self.n_top)

    def _choose(self, row: Logits, candidates: internals.LlamaTokenDataArray) -> int | None:
        """The chain's choice; None when it is none."""
        candidates.copy_logits(row)
        array = candidates.candidates
        array.data = candidates.candidates_data.ctypes.data_as(llama_cpp.llama_token_data_p)  # XTC moves it on
        array.selected = -1
        C.llama_sampler_apply(self.chain.sampler, ctypes.byref(array))
        chosen = array.data[array.selected] if 0 <= array.selected < array.size else None
        if chosen is None or not np.isfinite(chosen.logit):
            return None
        token = int(chosen.id)
        if self.post and self.n_top is not None:
            self._left = left_of(token, float(chosen.p), candidates, self.n_top)
        return token
