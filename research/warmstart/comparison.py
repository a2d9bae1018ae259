"""Warm starts of prompts with known neighbours, against cold starts and simpler ways, in the native engine.

Every prompt of the file is captured once: its summaries go into a library on disk, as in use. Then every target is
decoded cold in the cache under test, and under every system of divergences.py; a cold start is the yardstick of its own
cache. Times come from a loop in which cold, warm and exact take turns.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from converter.scoring import F32, F64
from research.experiments.grids import grouped
from research.warmstart import divergences as metrics
from research.warmstart import predictor
from research.warmstart.contexts import (
    ColdContext,
    Continued,
    WarmContext,
    capturing,
    cold_context,
    last_outputs,
    warm_context,
)
from research.warmstart.divergences import Latency, Outcome
from research.warmstart.embedding import Embedder, embedder
from research.warmstart.pooled import Plan, Slots, summarise
from research.warmstart.prompts import Prompt
from research.warmstart.summaries import Library, Remembered
from research.warmstart.trained import Placed, Trained
from runtime import options
from subkv.base.errors import SubkvError, concerning
from subkv.base.progress import tracked
from subkv.engine.cache import CacheChoice, parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest

N_ANSWER = 16  # tokens of the cold answer that are scored
N_LABELLED = 8  # tokens of a greedy answer that an exact match is looked for in
N_TIMED = 6  # prompts of each length that are timed
UNBOUNDED = 1 << 40  # bytes
N_NEAREST = 2  # entries asked for: the neighbour, and another for the self-check
ROOM = 32  # tokens of a context beyond the longest prompt
WITH_ATTENTION = (metrics.OWN, metrics.METHOD, metrics.STATIC, metrics.ENDS)  # whose attention outputs are compared


@dataclass(frozen=True)
class Settings:
    """repetitions: of every timing, 0: none. targets: at most so many of each length, None: all."""

    model: Path
    warm_files: tuple[Path, ...]
    caches: tuple[str, ...] = ("f16",)
    bases: Path | None = None
    flash_attn: str = "auto"
    n_threads: int = 1
    repetitions: int = 5
    targets: int | None = None


@dataclass
class Results:
    """about: settings as the report lists them."""

    about: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)


@dataclass
class Side:
    """One trained file with its library of all prompts; entries by the id of the prompt, ids by the entry's name."""

    trained: Trained
    library: Library
    embed: Embedder
    vectors: dict[str, F32] = field(default_factory=dict)
    summaries: dict[str, Remembered] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.trained.plan

    def similarity(self, a: str, b: str) -> float:
        """Cosine of two prompts, centred."""
        return metrics.cosine(self.vectors[a] - self.trained.centre, self.vectors[b] - self.trained.centre)

    def nearest(self, vector: F32, without: Collection[str]) -> list[tuple[str, Remembered]]:
        """The most similar prompts of the library but some, best first."""
        found = self.library.nearest(vector, N_NEAREST, exclude=[self.summaries[name].name for name in without])
        return [(self.ids[entry.name], entry) for entry, _ in found]

    def placed(self, summary: Slots, project: bool, n_tokens: int) -> list[Placed]:
        return self.trained.place(self.trained.slots(summary, project), n_tokens)

    def stored(self, prompt: str, project: bool, n_tokens: int) -> list[Placed]:
        """As placed, from the library."""
        return self.placed(self.library.load(self.summaries[prompt]), project, n_tokens)


def right(text: str, answer: str) -> bool:
    """The known answer is among the words of a short answer; of yes and no the first counts."""
    words = re.findall(r"\w+", text.lower())
    choices = ("yes", "no")
    if answer in choices:
        return next((word for word in words if word in choices), None) == answer
    return answer.lower() in words


class Evaluation:
    """Prompts under one model and several trained files.

    folder: for the libraries. Raises SubkvError about `prompts` and `warm_files`.
    """

    def __init__(self, settings: Settings, prompts: Sequence[Prompt], model: Model, folder: Path) -> None:
        self.settings, self.model = settings, model
        self.prompts = {prompt.id: prompt for prompt in prompts}
        with concerning(path="warm_files"):
            loaded = [Trained.load(path, model) for path in settings.warm_files]
        sizes = [trained.plan.n_slots for trained in loaded]
        if len(set(sizes)) < len(sizes):
            raise SubkvError("warm_files", f"expected files of different numbers of slots, found {sizes}")
        self.tokens = {name: model.tokenize_chat(prompt.text) for name, prompt in self.prompts.items()}
        self._choose(max(trained.plan.shortest for trained in loaded))
        self.sides = []
        for trained in sorted(loaded, key=lambda t: t.plan.n_slots):
            library = Library(folder / str(trained.plan.n_slots), trained, UNBOUNDED)
            self.sides.append(Side(trained, library, embedder(trained.embedding, model, settings.n_threads)))
        self.n_ctx = max(len(self.tokens[name]) for name in self.involved) + ROOM
        self.outputs: dict[str, list[F32]] = {}  # of attention at the last position, of targets

    def _choose(self, shortest: int) -> None:
        """The targets, and all prompts that they need."""
        longest = self.model.n_ctx_train - ROOM
        usable = {name for name, tokens in self.tokens.items() if shortest <= len(tokens) <= longest}
        self.pairs: dict[str, list[tuple[str, str]]] = {}  # of targets: kind and neighbour
        self.targets: list[Prompt] = []
        for own in grouped(self.prompts.values(), lambda prompt: prompt.words).values():
            found = []
            for target in own:
                listed = [(kind, name) for kind, names in target.neighbours.items() for name in names if name in usable]
                if target.id in usable and listed:
                    self.pairs[target.id] = listed
                    found.append(target)
            self.targets += found[: self.settings.targets]
        lengths = f"{shortest} to {longest} tokens"
        if not self.targets:
            raise SubkvError("prompts", f"expected prompts of {lengths}, neighbours included, found {len(usable)} such")
        if left := len(self.tokens) - len(usable):
            options.note(f"-f: {left} of {len(self.tokens)} prompts are not {lengths} long; left out")
        paired = [name for target in self.targets for _, name in self.pairs[target.id]]
        self.involved = list(dict.fromkeys([*(target.id for target in self.targets), *paired]))

    def capture(self) -> None:
        """Summaries and embeddings of all prompts, attention outputs of the targets."""
        targets = {target.id for target in self.targets}
        with capturing(self.model, self.n_ctx, self.settings.n_threads) as context:
            for name in tracked("capture", self.involved, "prompt"):
                tokens = self.tokens[name]
                rows = context.capture(tokens, 1)
                for side in self.sides:
                    vector = side.vectors[name] = side.embed(tokens)
                    entry = side.library.add(tokens, vector, summarise(rows.k, rows.v, side.plan, side.trained.frame))
                    side.summaries[name], side.ids[entry.name] = entry, name
                if name in targets:
                    self.outputs[name] = last_outputs(rows)

    @contextlib.contextmanager
    def _in(self, cache: str) -> Iterator[_Run]:
        settings = self.settings
        choice = parse_cache(cache, self.model.path, CacheRequest(bases=settings.bases))
        common = ContextOptions(self.n_ctx, n_threads=settings.n_threads, flash_attn=settings.flash_attn)
        with (
            cold_context(self.model, choice, common) as cold,
            warm_context(self.model, choice, common) as warm,
        ):
            yield _Run(self, cache, choice, cold, warm)

    def measure(self, cache: str) -> tuple[list[Outcome], list[Latency]]:
        """All outcomes and times in a cache."""
        with self._in(cache) as run:
            for name in tracked(f"{cache}: cold", self.involved, "prompt"):
                run.log_p[name] = run.cold.decode(self.tokens[name]).log_p
            outcomes: list[Outcome] = []
            for target in tracked(f"{cache}: warm", self.targets, "prompt"):
                outcomes += run.target(target)
            return outcomes, run.times() if self.settings.repetitions else []

    def fit_guards(self, cache: str) -> list[dict[str, float]]:
        """Coefficients of the guard for every trained file, from what its library finds for the targets.

        Raises SubkvError where that is too little.
        """
        samples: list[list[tuple[float, float, float]]] = [[] for _ in self.sides]
        with self._in(cache) as run:
            for target in tracked("guard", self.targets, "prompt"):
                tokens = self.tokens[target.id]
                cold = run.cold.decode(tokens).log_p
                for side, rows in zip(self.sides, samples, strict=True):
                    for _, name, other in run.retrieved(side, target):
                        placed = side.stored(name, True, len(tokens))
                        kl = metrics.divergence(run.warm.decode(tokens, side.plan, placed).log_p, cold)
                        rows.append((side.similarity(target.id, name), run.check(side, target, placed, other), kl))
        return [predictor.fit([row[:2] for row in rows], [row[2] for row in rows]) for rows in samples]


class _Run:
    """One cache: its contexts, and the cold log-probabilities [n_vocab] of the first token after every prompt."""

    def __init__(
        self, evaluation: Evaluation, cache: str, choice: CacheChoice, cold: ColdContext, warm: WarmContext
    ) -> None:
        self.all, self.cache, self.choice, self.cold, self.warm = evaluation, cache, choice, cold, warm
        self.log_p: dict[str, F64] = {}

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.all.model.piece, tokens)).decode("utf-8", "replace")

    def target(self, target: Prompt) -> Iterator[Outcome]:
        """Every system on one prompt, for every trained file."""
        tokens = self.all.tokens[target.id]
        cold = self.cold.decode(tokens)
        scorer = _Scorer(self, target, cold)
        for side in self.all.sides:
            yield scorer.outcome(side, metrics.COLD, cold)
            yield from self._alone(side, target, scorer)
            pairs = [(kind, name, None) for kind, name in self.all.pairs[target.id]]
            for kind, name, other in [*pairs, *self.retrieved(side, target)]:
                yield from self._pair(side, target, scorer, kind, name, other)
        again = self.cold.again(tokens)  # last: in a coded cache, cells that were exact may be coded by now
        for side in self.all.sides:
            yield scorer.outcome(side, metrics.EXACT, again)

    def retrieved(self, side: Side, target: Prompt) -> list[tuple[str, str, str | None]]:
        """What the library finds with and without paraphrases in it: kind of the pair, neighbour, second neighbour."""
        pairs: list[tuple[str, str, str | None]] = []
        same = [name for name in side.summaries if self.all.prompts[name].group == target.group]
        for kind, without in ((metrics.RETRIEVED, [target.id]), (metrics.UNRELATED, same)):
            found = [name for name, _ in side.nearest(side.vectors[target.id], without)]
            if found:
                pairs.append((kind, found[0], found[1] if len(found) > 1 else None))
        return pairs

    def _alone(self, side: Side, target: Prompt, scorer: _Scorer) -> Iterator[Outcome]:
        """Systems without a neighbour."""
        n, plan = len(self.all.tokens[target.id]), side.plan
        longer = Plan(plan.n_slots, plan.n_sink, plan.n_last + plan.n_slots)
        ways: dict[str, tuple[Plan, list[Placed]]] = {
            metrics.OWN: (plan, side.stored(target.id, False, n)),
            metrics.STATIC: (plan, side.trained.place(side.trained.static(), n)),
            metrics.LAST: (longer, []),
            metrics.ENDS: (plan, []),
        }
        for system, (used, placed) in ways.items():
            yield scorer.warm(side, system, used, placed)

    def _pair(
        self, side: Side, target: Prompt, scorer: _Scorer, kind: str, name: str, other: str | None
    ) -> Iterator[Outcome]:
        """Systems with a neighbour; other: the second one, for the guard."""
        n = len(self.all.tokens[target.id])
        pair: dict[str, Any] = {"kind": kind, "neighbour": name, "similarity": side.similarity(target.id, name)}
        yield scorer.warm(side, metrics.UNPROJECTED, side.plan, side.stored(name, False, n), **pair)
        projected = side.stored(name, True, n)
        found = scorer.warm(side, metrics.METHOD, side.plan, projected, **pair)
        if kind in metrics.FOUND:
            found.self_check = self.check(side, target, projected, other)
            if side.trained.guard:
                found.predicted_kl = predictor.predict(side.trained.guard, pair["similarity"], found.self_check)
        yield found
        yield scorer.other(side, metrics.NEIGHBOUR, self.log_p[name], **pair)

    def check(self, side: Side, target: Prompt, placed: list[Placed], other: str | None) -> float:
        """The guard's self-check: divergence of the warm start from that of the second neighbour, nats."""
        tokens = self.all.tokens[target.id]
        second = side.stored(other, True, len(tokens)) if other else []
        log_p = self.warm.decode(tokens, side.plan, placed).log_p
        return predictor.self_check(log_p, self.warm.decode(tokens, side.plan, second).log_p)

    #
    # times
    #

    def times(self) -> list[Latency]:
        """Seconds to the first token of some prompts of each length, everything that a warm start does counted."""
        by_words = grouped(self.all.targets, lambda target: target.words).values()
        chosen = [target for own in by_words for target in own[:N_TIMED]]
        found = []
        for target in tracked(f"{self.cache}: time", chosen, "prompt"):
            found += [self._time(side, target) for side in self.all.sides]
        return found

    def _time(self, side: Side, target: Prompt) -> Latency:
        tokens = self.all.tokens[target.id]
        steps: dict[str, list[float]] = {"embed": [], "retrieve": [], "project": [], "decode": []}

        def warm() -> None:
            clock = [time.perf_counter()]
            vector = side.embed(tokens)
            clock.append(time.perf_counter())
            _, entry = side.nearest(vector, [target.id])[0]
            summary = side.library.load(entry)
            clock.append(time.perf_counter())
            placed = side.placed(summary, True, len(tokens))
            clock.append(time.perf_counter())
            _ = self.warm.decode(tokens, side.plan, placed).first
            clock.append(time.perf_counter())
            for own, seconds in zip(steps.values(), np.diff(clock), strict=True):
                own.append(float(seconds))

        ways: dict[str, Callable[[], Any]] = {
            "cold": lambda: self.cold.decode(tokens).first,
            "exact": lambda: self.cold.again(tokens).first,  # the cold start has just left its prompt there
            "warm": warm,
        }
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for repetition in range(self.all.settings.repetitions + 1):
            order = list(ways) if repetition % 2 else ["warm", "cold", "exact"]
            for name in order:
                start = time.perf_counter()
                ways[name]()
                samples[name].append(time.perf_counter() - start)
        # the first round builds graphs and pages things in
        medians = {name: float(np.median(values[1:])) for name, values in (samples | steps).items()}
        return Latency(
            cache=self.cache,
            n_slots=side.plan.n_slots,
            target=target.id,
            n_tokens=len(tokens),
            **{name: medians[name] for name in ways},
            steps={name: medians[name] for name in steps},
        )


class _Scorer:
    """Scores warm starts of one prompt against its cold start, which the context still holds."""

    def __init__(self, run: _Run, target: Prompt, cold: Continued) -> None:
        self.run, self.target, self.cold = run, target, cold
        self.answer = cold.greedy(N_ANSWER) or [cold.first]
        self.nll = float(cold.nll(self.answer).mean())
        self.short = self.answer[:N_LABELLED]

    def warm(self, side: Side, system: str, plan: Plan, placed: list[Placed], **pair: Any) -> Outcome:
        """Decode and compare one warm start."""
        run, tokens = self.run, self.run.all.tokens[self.target.id]
        cosines: list[float] = []
        if system in WITH_ATTENTION and not run.choice.coded:
            outputs, cold = run.warm.attention(tokens, plan, placed), run.all.outputs[self.target.id]
            cosines = [metrics.cosine(a, b) for a, b in zip(outputs, cold, strict=True)]
        return self.outcome(side, system, run.warm.decode(tokens, plan, placed), cosines=cosines, **pair)

    def outcome(self, side: Side, system: str, found: Continued, **more: Any) -> Outcome:
        """All scores of a context that holds the prompt."""
        nll = float(found.nll(self.answer).mean())
        own, known = found.greedy(N_LABELLED), self.target.answer
        answers: dict[str, Any] = {"same_answer": own == self.short}
        if known is not None:
            head = own if found is self.cold else self.cold.greedy(N_LABELLED, first=found.first)
            texts = {"correct": own, "correct_head": head, "correct_cold": self.short}
            answers |= {name: right(self.run.text(tokens), known) for name, tokens in texts.items()}
        return self.other(side, system, found.log_p, nll=nll, nll_cold=self.nll, **answers, **more)

    def other(self, side: Side, system: str, log_p: F64, **more: Any) -> Outcome:
        """The scores of the first token's distribution."""
        cold = self.cold.log_p
        return Outcome(
            cache=self.run.cache,
            n_slots=side.plan.n_slots,
            target=self.target.id,
            task=self.target.task,
            words=self.target.words,
            n_tokens=self.cold.n_tokens,
            system=system,
            kl=metrics.divergence(log_p, cold),
            kl_reverse=metrics.divergence(cold, log_p),
            same_top=bool(log_p.argmax() == cold.argmax()),
            **more,
        )


@contextlib.contextmanager
def opened(settings: Settings, prompts: Sequence[Prompt]) -> Iterator[Evaluation]:
    """An evaluation whose prompts are captured. Raises SubkvError."""
    with Model(settings.model) as model, tempfile.TemporaryDirectory(prefix="warmstart-") as folder:
        evaluation = Evaluation(settings, prompts, model, Path(folder))
        evaluation.capture()
        yield evaluation


def run(settings: Settings, prompts: Sequence[Prompt]) -> Results:
    """Evaluate all caches. Raises SubkvError."""
    with opened(settings, prompts) as evaluation:
        plans = [side.plan for side in evaluation.sides]
        about: dict[str, Any] = {
            "model": settings.model.name,
            "trained": ", ".join(path.name for path in settings.warm_files),
            "plan": "; ".join(f"{p.n_slots} slots, {p.n_sink} sinks, {p.n_last} last tokens" for p in plans),
            "embedding": ", ".join(dict.fromkeys(side.trained.embedding for side in evaluation.sides)),
            "caches": ", ".join(settings.caches),
            "flash attention": settings.flash_attn,
            "threads": settings.n_threads,
            "targets": len(evaluation.targets),
            "library": f"{len(evaluation.involved)} prompts",
            "repetitions": settings.repetitions,
        }
        results = Results(about)
        for cache in settings.caches:
            outcomes, latencies = evaluation.measure(cache)
            results.outcomes += outcomes
            results.latencies += latencies
    return results
