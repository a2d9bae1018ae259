"""One generation, between the thread that asked for it and the engine's."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Iterator

from runtime.serve.prefixes import Found
from runtime.serve.sampling import Sampler, Scored

# Tokens the engine may sample before the caller has taken them: it goes on while a caller is late by a few, and a
# caller that ends at a stop string has cost no more than these, and a draft.
N_AHEAD = 4


class CancelledError(Exception):
    """Nobody waits for this generation any more."""


def per(n: float, of: float) -> float:
    """n / of, 0 where there is nothing to divide by."""
    return n / of if of else 0.0


@dataclasses.dataclass(frozen=True)
class Awaited:
    """A task at work, whose slot will hold the first n tokens of another one's prompt."""

    task: Task
    n: int


@dataclasses.dataclass(eq=False)
class Task:
    """A prompt and its tokens as they come: iterate over it in the caller's thread.

    prompt: at least one token. limit: most tokens to sample. scores_prompt: log-probabilities of the prompt's tokens,
    too, in `prompt_scores` (from the second on). fresh: no cells are reused. space: whose it is. id_slot: where it has
    to go, -1: anywhere; then where it is. found: what is remembered of the prompt. awaited: what it waits for, instead
    of evaluating the same.
    """

    prompt: list[int]
    sampler: Sampler
    limit: int
    scores_prompt: bool = False
    fresh: bool = False
    space: str = ""
    id_slot: int = -1
    found: Found | None = None
    awaited: Awaited | None = None
    n_cached: int = 0
    n_sampled: int = 0
    n_taken: int = 0
    n_missing: int = 1  # tokens at the end that its slot does not hold, once it generates
    n_drafted: int = 0
    n_accepted: int = 0  # of them
    choosing: bool = False  # its grammar has not said yet what may follow
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.prompt_scores: list[Scored] = []
        self.tokens = list(self.prompt)  # and the sampled ones
        self.started = self.prompt_done = self.last = time.perf_counter()
        self.notify: Callable[[], None] = lambda: None
        self._results: queue.SimpleQueue[Scored | Exception | None] = queue.SimpleQueue()

    #
    # the caller's side
    #

    def __iter__(self) -> Iterator[Scored]:
        while (result := self._results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            self.n_taken += 1
            self.notify()
            yield result

    def cancel(self, error: Exception | None = None) -> None:
        """Give the slot back now; the iteration raises the error, default: CancelledError."""
        self.cancelled = True
        self._results.put(error or CancelledError())
        self.sampler.close()
        self.notify()

    def timings(self) -> dict[str, float]:
        """llama-server's fields; milliseconds."""
        n_prompt = len(self.prompt) - self.n_cached
        prompt_ms, predicted_ms = 1e3 * self.prompt_seconds, 1e3 * self.predicted_seconds
        drafts = {"draft_n": self.n_drafted, "draft_n_accepted": self.n_accepted} if self.n_drafted else {}
        return drafts | {
            "cache_n": self.n_cached,
            "prompt_n": n_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / n_prompt,
            "prompt_per_second": per(1e3 * n_prompt, prompt_ms),
            "predicted_n": self.n_taken,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": per(predicted_ms, self.n_taken),
            "predicted_per_second": per(1e3 * self.n_taken, predicted_ms),
        }

    #
    # the engine's side
    #

    @property
    def anew(self) -> bool:
        """Whether all of its prompt is evaluated."""
        return self.scores_prompt or self.fresh

    @property
    def prompt_seconds(self) -> float:
        return self.prompt_done - self.started

    @property
    def predicted_seconds(self) -> float:
        """From the first token on; llama-server counts so, too."""
        return self.last - self.prompt_done

    @property
    def reading(self) -> bool:
        """Whether its prompt is still being read."""
        return not self.n_sampled and not self.choosing

    @property
    def ready(self) -> bool:
        """Whether the token sampled last should be evaluated."""
        return not self.reading and not self.choosing and self.n_sampled - self.n_taken < N_AHEAD

    def give(self, result: Scored) -> None:
        self.last = time.perf_counter()
        if not self.n_sampled:
            self.prompt_done = self.last
        self.n_sampled += 1
        self.tokens.append(result.token)
        self._results.put(result)

    def end(self, error: Exception | None = None) -> None:
        self.sampler.close()
        self._results.put(error)
