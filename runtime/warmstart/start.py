"""Warm starts of a subkv.Llama: whether to, the first tokens, and the way back to exact cells.

    planting = Planting()
    with planting.attach():
        llm = subkv.Llama("model.gguf", n_ctx=8192)
    warm = WarmStart(llm, planting, trained, library)
    for token in warm.generate(tokens, temp=0.0):
        …
    warm.close(); llm.close(); planting.close()

The cells of a warm start are not those of the prompt, and nobody may take them for it. So a Llama counts no tokens
(`n_tokens` 0) as long as it holds them: whatever comes next, a prompt, a saved state, a prompt cache, begins from an
empty context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from converter.scoring import log_softmax
from runtime.warmstart import MAX_KL, MODES, THRESHOLD, guard
from runtime.warmstart.embedding import CALLABLE, Embedder, embedder
from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.library import Entry, Library
from runtime.warmstart.planting import Planting
from runtime.warmstart.refine import Refiner
from runtime.warmstart.shapes import F32
from runtime.warmstart.summary import summarise
from runtime.warmstart.trained import Placed, Trained
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.llama import Llama

REFINES = ("first", "background", "never")


@dataclasses.dataclass
class Decision:
    """What became of a prompt. warm: its first tokens come from a similar prompt's summary; else reason says why not.

    cause: "warm" or one of runtime.warmstart.CAUSES. similarity: cosine of the nearest prompt's embedding. self_check,
    predicted_kl in nats. seconds: of embed, retrieve, project, check, decode. n_cells: evaluated for the first token.
    touched: the sequence has lost what it held. logits [n_vocab]: of the first token, if warm.
    """

    warm: bool = False
    cause: str = "error"
    reason: str = ""
    similarity: float | None = None
    self_check: float | None = None
    predicted_kl: float | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    n_cells: int = 0
    touched: bool = False
    logits: F32 | None = dataclasses.field(default=None, repr=False)

    def cold(self, cause: str, reason: str) -> Decision:
        self.warm, self.cause, self.reason, self.logits = False, cause, reason, None
        return self

    def mark(self, n_first: int) -> dict[str, Any]:
        """For answers: what the user should know."""
        numbers = ("similarity", "self_check", "predicted_kl")
        given = {name: getattr(self, name) for name in numbers}
        # JSON has neither NaN nor infinity, which a guard may predict
        found: dict[str, Any] = {name: x for name, x in given.items() if x is not None and math.isfinite(x)}
        head = {"warm": self.warm, "n_first": n_first} if self.warm else {"warm": False, "reason": self.reason}
        return head | found | {"seconds": self.seconds}


class WarmStart:
    """First tokens of prompts from the summaries of similar ones.

    llm: made inside planting.attach(), which binds here. mode: "on": whenever a prompt is similar enough, a cosine of
    at least `threshold`; "auto": if, besides, the guard of the trained file predicts at most max_kl nats between the
    warm and the cold distribution. n_warm: tokens that come from a warm start before the prompt is evaluated exactly.
    embed: a function from tokens to a vector, where the trained file was made with one. Raises WarmStartError for a
    trained file of another model, and for bad arguments.
    """

    def __init__(
        self,
        llm: Llama,
        planting: Planting,
        trained: Trained,
        library: Library,
        mode: str = "on",
        threshold: float = THRESHOLD,
        max_kl: float = MAX_KL,
        n_warm: int = 1,
        embed: Callable[[Sequence[int]], Any] | None = None,
    ) -> None:
        if mode not in MODES[1:]:
            raise WarmStartError("--warm-start", f"expected on or auto, found {mode!r}")
        if n_warm < 1:
            raise WarmStartError("n_warm", f"expected 1 or more tokens, found {n_warm}")
        trained.check(llm.identity()["model"])
        self.llm, self.planting, self.trained, self.library = llm, planting, trained, library
        self.mode, self.threshold, self.max_kl, self.n_warm = mode, threshold, max_kl, n_warm
        self.decision: Decision | None = None  # of the latest prompt
        kind: Any = embed if trained.embedding == CALLABLE and embed is not None else trained.embedding
        self.embedder: Embedder = embedder(kind, Path(llm.model_path), llm.model, llm.n_threads)
        self._embedded: tuple[tuple[int, ...], F32] | None = None
        self._recording: contextlib.ExitStack | None = None
        self._recorded: list[int] = []
        self._refiner: Refiner | None = None
        planting.bind(llm.ctx, llm._batch.batch, llm.cache_choice.coded)

    def close(self) -> None:
        """Before the Llama is closed; a second call does nothing."""
        self.drop()
        if self._refiner is not None:
            self._refiner.close()
            self._refiner = None
        self.embedder.close()

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    #
    # the decision
    #

    def first(self, tokens: Sequence[int], seq: int = 0, n_ctx: int | None = None) -> Decision:
        """Decide, and if it is for a warm start, put the warm cells in a sequence and return the first token's logits.

        n_ctx: tokens that the sequence can hold. Nothing that is wrong with prompt or library is raised: the start is
        cold, and the reason one sentence.
        """
        self.decision = decision = Decision()
        self.drop()  # its decoding is no part of what is recorded
        try:
            return self._decide(decision, list(tokens), seq, n_ctx or self.llm.n_ctx())
        except (SubkvError, OSError) as error:
            if decision.touched:
                self.planting.empty(seq)
            return decision.cold("error", str(error))

    def begin(self, tokens: Sequence[int], n_held: int, seq: int = 0, n_ctx: int | None = None) -> Decision:
        """first(), unless the first n_held tokens, half of the prompt or more, are in exact cells already."""
        self.problem = ""
        if 2 * n_held < max(len(tokens), 1):
            return self.first(tokens, seq, n_ctx)
        self.decision = Decision().cold("prefix", f"prefix: {n_held} of {len(tokens)} tokens are in the cache already")
        return self.decision

    def _decide(self, decision: Decision, tokens: list[int], seq: int, n_ctx: int) -> Decision:
        n = len(tokens)
        if not tokens:
            return decision.cold("prompt", "prompt: expected at least one token, found none")
        if n >= n_ctx:
            return decision.cold("prompt", f"prompt: expected fewer than {n_ctx} tokens (the context), found {n}")
        try:
            self.trained.plan.span(n)
        except WarmStartError as error:
            return decision.cold("prompt", str(error))
        if self.mode == "auto" and not self.trained.guard:
            return decision.cold(
                "guard",
                "guard: expected coefficients in the trained file (python -m runtime.warmstart guard), found none",
            )
        with _timed(decision, "embed"):
            embedding = self._embed(tokens)
        try:
            with _timed(decision, "retrieve"):
                found = self.library.nearest(embedding, 2)
                if not found:
                    return decision.cold("library", "library: expected summaries of earlier prompts, found none yet")
                decision.similarity = found[0][1]
                if not decision.similarity >= self.threshold:  # NaN is none
                    return decision.cold(
                        "similarity",
                        f"similarity: expected at least {self.threshold:g}, found {decision.similarity:.3f}",
                    )
                summary = self.library.load(found[0][0])
        except WarmStartError as error:
            return decision.cold("library", str(error))
        with _timed(decision, "project"):
            own = found[0][0].tokens.tolist() == tokens
            placed = self.trained.place(self.trained.slots(summary, project=not own), n)
        decision.touched = True
        self.llm.reset()
        if self.mode == "auto":
            with _timed(decision, "check"):
                other = _log_p(self._logits(tokens, self._other(found[1:], tokens), seq))
        with _timed(decision, "decode"):
            decision.logits = self._logits(tokens, placed, seq)
        decision.n_cells = self.trained.plan.shortest
        if self.mode == "auto":
            decision.self_check = guard.self_check(_log_p(decision.logits), other)
            decision.predicted_kl = guard.predict(self.trained.guard, decision.similarity, decision.self_check)
            if not decision.predicted_kl <= self.max_kl:
                self.planting.empty(seq)
                return decision.cold(
                    "guard",
                    f"guard: expected KL up to {self.max_kl:g} nats, found {decision.predicted_kl:.3g} predicted",
                )
        decision.warm, decision.cause = True, "warm"
        return decision

    def _embed(self, tokens: list[int]) -> F32:
        key = tuple(tokens)
        if self._embedded is None or self._embedded[0] != key:
            self._embedded = key, self.embedder.embed(tokens)
        return self._embedded[1]

    def _other(self, found: list[tuple[Entry, float]], tokens: list[int]) -> list[Placed]:
        """What the self-check compares with: the second neighbour's slots, or, without one, none."""
        for entry, _ in found:
            with contextlib.suppress(WarmStartError):
                slots = self.trained.slots(self.library.load(entry), project=True)
                return self.trained.place(slots, len(tokens))
        return []

    def _logits(self, tokens: list[int], placed: list[Placed], seq: int) -> F32:
        self.planting.decode(tokens, self.trained.plan, placed, seq)
        return self.planting.logits(self.llm.n_vocab())

    #
    # generation, of a Llama with one sequence
    #

    def head(self, tokens: Sequence[int], sampler: Any) -> Iterator[int]:
        """The first n_warm tokens of an answer to a prompt that first() put in place; the Llama counts none of them.

        sampler: a chain of llama_cpp, which accepts them.
        """
        try:
            for i in range(self.n_warm):
                token = int(sampler.sample(self.llm._ctx, -1))
                yield token
                if i + 1 < self.n_warm:
                    self.planting.follow([token], len(tokens) + i)
        finally:
            self._empty()

    def generate(self, tokens: Sequence[int], refine: str = "first", **sampling: Any) -> Iterator[int]:
        """Tokens of an answer, without end, as Llama.generate; `decision` says how it began.

        refine: "first": after n_warm tokens the prompt and these are evaluated exactly, and the answer goes on from
        there; "background": another context, of the same cache, reads the prompt in a thread while tokens come from the
        warm cells, which its cells replace when it is ready; "never": the answer stays warm. What was emitted cannot be
        taken back. sampling: arguments of Llama.generate. Raises CacheError when the context is full.
        """
        if refine not in REFINES:
            raise WarmStartError("refine", f"expected one of {', '.join(REFINES)}, found {refine!r}")
        llm, tokens = self.llm, list(tokens)
        decision = self.begin(tokens, llm.longest_token_prefix(llm._input_ids, tokens))
        if not tokens:
            raise WarmStartError("prompt", "expected at least one token, found none")
        if decision.cause == "prefix":
            yield from llm.generate(tokens, **sampling)
        if not decision.warm:
            llm.reset()
            with self.remembering(tokens):
                llm.eval(tokens)
            yield from self._exact(llm._init_sampler(**sampling))
        sampler = llm._init_sampler(**sampling)
        if refine == "first":
            emitted = []
            for token in self.head(tokens, sampler):
                emitted.append(token)
                yield token
            with self.remembering(tokens):
                llm.eval([*tokens, *emitted])
        else:
            refiner = None
            if refine == "background":
                refiner = self._refiner = self._refiner or Refiner(llm)
                refiner.begin(tokens)
            try:
                yield from self._warm(tokens, sampler, refiner)
            finally:
                if refiner is not None:
                    refiner.stop()
                if not llm.n_tokens:
                    self._empty()
        yield from self._exact(sampler)

    def _empty(self) -> None:
        """Leave no warm cells behind; an abandoned answer may outlive the context."""
        if self.llm._ctx.ctx:
            self.planting.empty()

    def _exact(self, sampler: Any) -> Iterator[int]:
        """Sample and evaluate, without end."""
        while True:
            token = int(sampler.sample(self.llm._ctx, -1))
            yield token
            self.llm.eval([token])

    def _warm(self, tokens: list[int], sampler: Any, refiner: Refiner | None) -> Iterator[int]:
        """Sample from the warm cells until the refiner has exact ones, with which the Llama then goes on."""
        llm, emitted = self.llm, list[int]()
        while True:
            emitted.append(int(sampler.sample(llm._ctx, -1)))
            yield emitted[-1]
            if refiner is not None and refiner.ready:
                refiner.hand_over()  # or, where it failed, all is evaluated here
                llm.eval([*tokens, *emitted][llm.n_tokens :])
                return
            if len(tokens) + len(emitted) >= llm.n_ctx():
                raise CacheError("n_ctx", f"expected room for another token, found {llm.n_ctx()} in the context")
            self.planting.follow(emitted[-1:], len(tokens) + len(emitted) - 1)

    #
    # memory
    #

    def record(self, tokens: Sequence[int]) -> bool:
        """Keep the rows of a prompt that is evaluated from now on, from position 0; False: it will not be remembered.

        Between this and store() or drop() nothing else may be evaluated at these positions.
        """
        self.drop()
        if len(tokens) < self.trained.plan.shortest or tokens in self.library:
            return False
        self._recording, self._recorded = contextlib.ExitStack(), list(tokens)
        self._recording.enter_context(self.planting.recording(range(len(tokens))))
        return True

    def store(self) -> str:
        """Put the prompt whose rows were kept in the library. Returns "", or why that failed, in one sentence."""
        if self._recording is None:
            return ""
        tokens = self._recorded
        try:
            rows = self.planting.rows()
            if any(len(k) != len(tokens) for k, _ in rows):
                return f"library: expected rows of {len(tokens)} tokens, found {len(rows[0][0])}; not remembered"
            summary = summarise([k for k, _ in rows], [v for _, v in rows], self.trained.plan, self.trained.frame)
            self.library.add(tokens, self._embed(tokens), summary)
        except SubkvError as error:
            return str(error)
        finally:
            self.drop()
        return ""

    def drop(self) -> None:
        """Forget the rows that were kept."""
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    @contextlib.contextmanager
    def remembering(self, tokens: Sequence[int]) -> Iterator[None]:
        """The prompt is evaluated exactly inside the block, from position 0, and then is in the library.

        What keeps it out of there is in `problem`.
        """
        self.problem = ""
        self.record(tokens)
        try:
            yield
            self.problem = self.store()
        finally:
            self.drop()

    problem = ""  # why the latest prompt is not in the library


@contextlib.contextmanager
def _timed(decision: Decision, step: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        decision.seconds[step] = time.perf_counter() - start


def _log_p(logits: F32) -> Any:
    return log_softmax(logits[None])[0]
