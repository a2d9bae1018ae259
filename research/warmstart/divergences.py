"""What a warm start is judged by, and the paper's criteria, computed from results alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.scoring import F64

# The paper's success criteria, for pairs more similar than this.
SIMILAR = 0.9
LATENCY_CUT, MEAN_KL, TASK_DROP = 0.40, 0.05, 0.01
BINS = (-1.0, 0.0, 0.5, 0.8, 0.9, 0.95, 0.99)  # lower ends of the bins of similarity

# Systems, by what stands for the middle of the prompt.
OWN = "own summary"  # compression alone, nothing transferred
METHOD = "projected neighbour"
UNPROJECTED = "neighbour, not projected"
LAST = "last-k tokens"
STATIC = "static learned prefix"
ENDS = "sinks and last tokens"
NEIGHBOUR = "exact neighbour"  # the neighbour's own answer: what a perfect copy of its cache would give
EXACT = "exact prefix"
COLD = "cold"
SYSTEMS = (COLD, EXACT, OWN, METHOD, UNPROJECTED, LAST, STATIC, ENDS, NEIGHBOUR)
RETRIEVED = "retrieved"  # kinds of pairs of a prompt and what the library finds for it
UNRELATED = "retrieved, no paraphrase in the library"
FOUND = (RETRIEVED, UNRELATED)


@dataclass
class Outcome:
    """One prompt under one system, against the same prompt's cold start in the same cache.

    kind: of the pair, "" for systems without a neighbour. kl: KL(warm‖cold), kl_reverse: KL(cold‖warm) of the first
    token, nats. cosines: of the attention outputs of each layer at the last position. nll, nll_cold: mean −ln p of the
    first tokens of the cold answer. correct…: the greedy answer is the known one: warm to its end, with a head start of
    one token (exact from there), and cold.
    """

    cache: str
    n_slots: int
    target: str
    task: str
    words: int
    n_tokens: int
    system: str
    kl: float
    kl_reverse: float
    same_top: bool
    kind: str = ""
    neighbour: str | None = None
    similarity: float | None = None
    cosines: list[float] = field(default_factory=list)
    nll: float | None = None
    nll_cold: float | None = None
    correct: bool | None = None
    correct_head: bool | None = None
    correct_cold: bool | None = None
    same_answer: bool | None = None
    self_check: float | None = None
    predicted_kl: float | None = None


@dataclass
class Latency:
    """Seconds to the first token of one prompt: medians of interleaved repeats. steps: of the warm start."""

    cache: str
    n_slots: int
    target: str
    n_tokens: int
    cold: float
    warm: float
    exact: float
    steps: dict[str, float]

    @property
    def cut(self) -> float:
        """Share of the cold start's time that the warm start saves."""
        return 1.0 - self.warm / self.cold


#
# of distributions and vectors
#


def divergence(log_p: F64, log_q: F64) -> float:
    """KL(p‖q) in nats of two distributions given by their logarithms [n]."""
    p = np.exp(log_p)
    used = p > 0.0
    return float(np.sum(p[used] * (log_p[used] - log_q[used])))


def cosine(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Cosine of two vectors; 0 where one of them is zero."""
    x, y = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    norm = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norm if norm > 0.0 else 0.0


#
# of many outcomes
#


def mean(values: Iterable[float]) -> tuple[float, float, int]:
    """Mean, its standard error (0 of a single value) and the number of values; nan, nan, 0 without any."""
    x = np.asarray(list(values), np.float64)
    if not len(x):
        return math.nan, math.nan, 0
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else 0.0, len(x)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A table row of outcomes of one system; None or NaN for what none of them has."""

    def of(*names: str) -> dict[str, Any]:
        """Means, over the outcomes that have them."""
        return {name: mean(x for o in outcomes if (x := getattr(o, name)) is not None)[0] for name in names}

    kl, error, n = mean(o.kl for o in outcomes)
    ratio, _, answered = mean(o.nll - o.nll_cold for o in outcomes if o.nll is not None and o.nll_cold is not None)
    return {
        "n": n,
        "kl": kl,
        "kl_stderr": error,
        "kl_median": float(np.median([o.kl for o in outcomes])) if n else math.nan,
        "ppl_ratio": math.exp(ratio) if answered else None,
        "cosine": mean(float(np.mean(o.cosines)) for o in outcomes if o.cosines)[0],
        "n_labelled": sum(o.correct is not None for o in outcomes),
        **of("kl_reverse", "same_top", "correct", "correct_head", "correct_cold", "same_answer"),
    }


def similarity_bin(similarity: float) -> str:
    """The bin of BINS that a similarity falls in, as text."""
    low = max((low for low in BINS if similarity >= low), default=BINS[0])
    higher = [other for other in BINS if other > low]
    return f"{low:g} to {higher[0] if higher else 1:g}"


def layer_cosines(outcomes: Sequence[Outcome]) -> F64:
    """[n_layer] mean cosine of the attention outputs by layer; empty where none was measured."""
    rows = [o.cosines for o in outcomes if o.cosines]
    found: F64 = np.mean(rows, axis=0) if rows else np.zeros(0)
    return found


#
# criteria
#


@dataclass(frozen=True)
class Criterion:
    """One of the paper's criteria: what was found, of how many, and whether that is enough; met None: not measured."""

    name: str
    found: str
    n: int
    met: bool | None

    def __str__(self) -> str:
        answer = {True: "met", False: "not met", None: "not measured"}[self.met]
        return f"{self.name}: {answer} ({self.found}, n = {self.n})"


def similar(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of the method for pairs more similar than SIMILAR; a pair that was given and found again counts once."""
    pairs: dict[tuple[Any, ...], Outcome] = {}
    for o in outcomes:
        if o.system == METHOD and o.similarity is not None and o.similarity > SIMILAR:
            pairs.setdefault((o.cache, o.n_slots, o.target, o.neighbour), o)
    return list(pairs.values())


def criteria(outcomes: Sequence[Outcome], latencies: Sequence[Latency]) -> list[Criterion]:
    """The paper's criteria on outcomes and latencies of one cache and number of slots."""
    pairs = similar(outcomes)
    targets = {o.target for o in pairs}
    cut, cut_error, n_cut = mean(latency.cut for latency in latencies if latency.target in targets)
    kl, kl_error, n_kl = mean(o.kl for o in pairs)
    faster = f"at least {LATENCY_CUT:.0%} less first-token latency"
    same = f"mean KL(warm‖cold) at most {MEAN_KL:g}"
    found = [
        Criterion(faster, f"{cut:.1%} ± {cut_error:.1%} less", n_cut, cut >= LATENCY_CUT)
        if n_cut
        else Criterion(faster, "nothing timed", 0, None),
        Criterion(same, f"{kl:.3g} ± {kl_error:.2g}", n_kl, kl <= MEAN_KL)
        if n_kl
        else Criterion(same, "no such pair", 0, None),
    ]
    labelled = [o for o in pairs if o.correct is not None]
    right = mean(bool(o.correct_cold) for o in labelled)[0]
    for way, flag in (("warm to the end", "correct"), ("a head start of one token", "correct_head")):
        name = f"at most {TASK_DROP:.0%} absolute drop on tasks, {way}"
        drop, error, n = mean(float(o.correct_cold or 0) - float(getattr(o, flag) or 0) for o in labelled)
        if n and right:
            text = f"{drop:+.1%} ± {error:.1%} drop from {right:.1%}"
            found.append(Criterion(name, text, n, drop <= TASK_DROP))
        else:  # what is never right cannot get worse
            found.append(Criterion(name, "no cold answer is right" if n else "no labelled pair", n, None))
    return found


def risk_coverage(outcomes: Sequence[Outcome], limit: float) -> dict[str, Any]:
    """What the guard lets through: of outcomes with a predicted KL, the share at most `limit` and their mean KL.

    curve: for every prompt, in the order of the predicted KL, [share of prompts so far, their mean KL].
    """
    predicted = sorted((o for o in outcomes if o.predicted_kl is not None), key=lambda o: float(o.predicted_kl or 0.0))
    passed = [o for o in predicted if float(o.predicted_kl or 0.0) <= limit]
    kl, error, n = mean(o.kl for o in passed)
    so_far = np.cumsum([o.kl for o in predicted]) / np.arange(1, len(predicted) + 1)
    return {
        "n": len(predicted),
        "coverage": n / len(predicted) if predicted else None,
        "kl": kl if n else None,
        "kl_stderr": error if n else None,
        "kl_all": mean(o.kl for o in predicted)[0] if predicted else None,
        "curve": [[(i + 1) / len(predicted), float(risk)] for i, risk in enumerate(so_far)],
    }
