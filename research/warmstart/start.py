"""Warm starts of a subkv.Llama: whether to, the first tokens, and the library of earlier prompts.

    planting = Planting()
    with planting.attach():
        llm = subkv.Llama("model.gguf", n_ctx=8192)
    warm = WarmStart(llm, planting, trained, library)
    first = list(warm.begin(prompt, 0, sampler))  # none: the start is cold, `decision` says why
    with warm.reading(prompt):
        llm.eval(prompt)
    llm.eval(first)  # and so on, exactly
    llm.close(); planting.close()

The cells of a warm start are not those of the prompt, and nobody may take them for it. So a Llama counts no tokens
(`n_tokens` 0) as long as it holds them: whatever comes next, a prompt, a saved state, a prompt cache, begins from an
empty context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from converter.scoring import F32, F64, log_softmax
from research.warmstart import MAX_KL, MODES, THRESHOLD, predictor
from research.warmstart.embedding import embedder
from research.warmstart.planting import Planting
from research.warmstart.pooled import summarise
from research.warmstart.summaries import Library, Remembered
from research.warmstart.trained import Placed, Trained
from subkv.base.command import sentence
from subkv.base.errors import SubkvError, concerning
from subkv.engine.llama import Llama

WARM, PREFIX = "warm", "prefix"


@dataclass
class Decision:
    """What became of a prompt. cause: "warm" where its first tokens come from a similar prompt's summary, else what
    error is about; "prefix": it is in exact cells already.

    similarity: cosine of the nearest prompt's embedding. self_check, predicted_kl in nats. logits [n_vocab]: of the
    first token, if warm.
    """

    error: SubkvError | None = None
    similarity: float | None = None
    self_check: float | None = None
    predicted_kl: float | None = None
    logits: F32 | None = field(default=None, repr=False)

    @property
    def cause(self) -> str:
        return WARM if self.error is None else self.error.key


class WarmStart:
    """First tokens of prompts from the summaries of similar ones.

    llm: made inside planting.attach(), which binds here; trained: for its model. mode: "on": whenever a prompt is
    similar enough, a cosine of at least `threshold`; "auto": if, besides, the guard of the trained file predicts at
    most max_kl nats between the warm and the cold distribution. n_warm: tokens that come from a warm start before the
    prompt is evaluated exactly; what was emitted cannot be taken back. Raises SubkvError for bad arguments.

    decision: on the latest prompt; problem: why it is not in the library, "": it is, or need not be.
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
    ) -> None:
        if mode not in MODES[1:]:
            raise SubkvError("mode", f"expected on or auto, found {mode!r}")
        if n_warm < 1:
            raise SubkvError("n_warm", f"expected 1 or more tokens, found {n_warm}")
        self.llm, self.planting, self.trained, self.library = llm, planting, trained, library
        self.mode, self.threshold, self.max_kl, self.n_warm = mode, threshold, max_kl, n_warm
        self.n_cells = trained.plan.shortest
        self.decision, self.problem = Decision(), ""
        self._n_emitted = 0
        self._embed = embedder(trained.embedding, llm.loaded_model, llm.n_threads)
        self._embedded: tuple[tuple[int, ...], F32] | None = None
        planting.bind(llm.ctx, llm._batch.batch, llm.cache_choice.coded)

    #
    # what a conversation asks for (runtime/chat/conversation.py, FirstTokens)
    #

    def begin(self, prompt: Sequence[int], n_held: int, sampler: Any) -> Iterator[int]:
        """The first n_warm tokens of an answer, none for a cold start. n_held: tokens of the prompt that are in exact
        cells; half of it or more are better than a warm start. sampler: a chain of llama_cpp, which accepts them."""
        self.problem, self._n_emitted = "", 0
        if 2 * n_held >= max(len(prompt), 1):
            held = f"{n_held} of {len(prompt)} tokens are in the cache already"
            self.decision = Decision(SubkvError(PREFIX, held))
        elif self.first(prompt).error is None:
            try:
                yield from self._head(len(prompt), sampler)
            finally:  # leave no warm cells behind; an abandoned answer may outlive the context
                if self.llm._ctx.ctx:
                    self.planting.empty()

    def _head(self, n_prompt: int, sampler: Any) -> Iterator[int]:
        for i in range(self.n_warm):
            token = int(sampler.sample(self.llm._ctx, -1))
            self._n_emitted += 1
            yield token
            if i + 1 < self.n_warm:
                self.planting.follow([token], n_prompt + i)

    @contextlib.contextmanager
    def reading(self, prompt: Sequence[int]) -> Iterator[None]:
        """The prompt is evaluated exactly inside the block, from position 0 and nothing else there, and then is in the
        library, unless it is too short or there already."""
        tokens, self.problem = list(prompt), ""
        if len(tokens) < self.trained.plan.shortest or tokens in self.library:
            yield
            return
        with self.planting.recording(range(len(tokens))):
            yield
            try:
                self._remember(tokens)
            except SubkvError as error:
                self.problem = _sentence(error)

    def report(self) -> tuple[str, list[str]]:
        """For the user: a mark for the status line, "" for none, and sentences about what went otherwise."""
        mark, sentences, error = "", [], self.decision.error
        if error is None:
            head = "first token" if self._n_emitted == 1 else f"first {self._n_emitted} tokens"
            mark = f"warm start: {self.decision.similarity:.2f} similar, {head}"
        elif error.key != PREFIX:
            sentences.append(f"warm start: cold; {_sentence(error)}")
        if self.problem:
            sentences.append(f"warm start: {self.problem}")
        return mark, sentences

    #
    # the decision
    #

    def first(self, prompt: Sequence[int]) -> Decision:
        """Decide, and if it is for a warm start, put the warm cells in the context and return the first token's logits.

        Nothing that is wrong with prompt or library is raised: the start is cold, and the reason one sentence.
        """
        self.decision = decision = Decision()
        try:
            with concerning(folder="warm_library"):
                self._decide(decision, list(prompt))
        except (SubkvError, OSError) as error:
            decision.error = error if isinstance(error, SubkvError) else SubkvError("", str(error))
            decision.logits = None
            if not self.llm.n_tokens:  # nor may it hold any
                self.planting.empty()
        return decision

    def _decide(self, decision: Decision, tokens: list[int]) -> None:
        n, n_ctx = len(tokens), self.llm.n_ctx()
        if not tokens:
            raise SubkvError("prompt", "expected at least one token, found none")
        if n >= n_ctx:
            raise SubkvError("prompt", f"expected fewer than {n_ctx} tokens (the context), found {n}")
        self.trained.plan.span(n)
        if self.mode == "auto" and not self.trained.guard:
            raise SubkvError(
                "guard", "expected coefficients in the trained file (python -m research.warmstart guard), found none"
            )
        found = self.library.nearest(self._embedding(tokens), 2)
        if not found:
            raise SubkvError("library", "expected summaries of earlier prompts, found none yet")
        decision.similarity = found[0][1]
        if not decision.similarity >= self.threshold:  # NaN is none
            raise SubkvError("similarity", f"expected at least {self.threshold:g}, found {decision.similarity:.3f}")
        own = found[0][0].tokens.tolist() == tokens
        summary = self.trained.slots(self.library.load(found[0][0]), project=not own)
        placed = self.trained.place(summary, n)
        self.llm.reset()
        other = self._log_p(tokens, self._second(found[1:], n)) if self.mode == "auto" else None
        self.planting.decode(tokens, self.trained.plan, placed)
        decision.logits = self.planting.logits(self.llm.n_vocab())
        if other is not None:
            decision.self_check = predictor.self_check(log_softmax(decision.logits[None])[0], other)
            kl = predictor.predict(self.trained.guard, decision.similarity, decision.self_check)
            decision.predicted_kl = kl
            if not kl <= self.max_kl:
                raise SubkvError("guard", f"expected KL up to {self.max_kl:g} nats, found {kl:.3g} predicted")

    def _second(self, found: list[tuple[Remembered, float]], n_tokens: int) -> list[Placed]:
        """What the self-check compares with: the second neighbour's slots, or, without one, none."""
        for entry, _ in found:
            with contextlib.suppress(SubkvError):
                return self.trained.place(self.trained.slots(self.library.load(entry), project=True), n_tokens)
        return []

    def _log_p(self, tokens: list[int], placed: list[Placed]) -> F64:
        self.planting.decode(tokens, self.trained.plan, placed)
        return log_softmax(self.planting.logits(self.llm.n_vocab())[None])[0]

    def _embedding(self, tokens: list[int]) -> F32:
        key = tuple(tokens)
        if self._embedded is None or self._embedded[0] != key:
            self._embedded = key, self._embed(tokens)
        return self._embedded[1]

    def _remember(self, tokens: list[int]) -> None:
        """Put the prompt whose rows were recorded in the library."""
        rows = self.planting.rows()
        if any(len(k) != len(tokens) for k in rows.k):
            raise SubkvError("library", f"expected rows of {len(tokens)} tokens, found {len(rows.k[0])}; not stored")
        summary = summarise(rows.k, rows.v, self.trained.plan, self.trained.frame)
        with concerning(folder="warm_library"):
            self.library.add(tokens, self._embedding(tokens), summary)


def _sentence(error: SubkvError) -> str:
    """An error as the chat tells it: its flag has to do with the library alone, `prompt` is no -p."""
    return sentence(error) if error.key == "warm_library" else str(error)
