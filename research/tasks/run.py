"""Runs samples under several caches in one process, and scores each answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.scoring import log_softmax
from research.tasks.grammar import Grammar
from research.tasks.kinds import SPARE, Sample, Task
from runtime.options import cache_members, open_context
from subkv.base.errors import SubkvError
from subkv.base.progress import note, progress_bar
from subkv.engine.cache import CacheChoice
from subkv.engine.context import Context, ContextOptions, Logits
from subkv.engine.model import Model

Tokens = npt.NDArray[np.int32]
Row = npt.NDArray[np.float32]  # logits [n_vocab]


@dataclass
class Outcome:
    """Scores of one sample under one cache. right, predicted: per answer, the latter the model's own tokens."""

    right: list[bool] = field(default_factory=list)
    predicted: list[tuple[int, ...]] = field(default_factory=list)
    nll: float | None = None  # −ln p per token of the right answers


@dataclass(frozen=True)
class Part:
    """Tokens of a sample. is_answer: they are an answer."""

    tokens: Tokens
    is_answer: bool


def counter(model: Model) -> Callable[[str], int]:
    """Counts the tokens of a text."""
    return lambda text: len(model.tokenize(text.encode()))


def parts(model: Model, sample: Sample) -> list[Part]:
    """A sample's text as tokens, cut where answers begin and end.

    A token that covers part of an answer counts as answer. Raises SubkvError about `model` if its tokens do not spell
    the text.
    """
    text = sample.text.encode()
    tokens = model.tokenize(text)
    pieces = [model.piece(token) for token in tokens.tolist()]
    if not b"".join(pieces).endswith(text):  # the tokenizer may add a space in front
        raise SubkvError("model", "expected a tokenizer whose tokens spell the text, found one that changes it")
    ends = np.cumsum([len(piece) for piece in pieces])
    ends -= ends[-1] - len(text)
    cut: list[Part] = []
    low = position = 0
    for i, piece in enumerate(sample.pieces):
        position += len(piece.encode())
        is_answer = i % 2 == 1
        high = int(np.searchsorted(ends, position, "left" if is_answer else "right")) + (1 if is_answer else 0)
        cut.append(Part(tokens[low:high], is_answer))
        low = high
    return cut


class Reader:
    """One text under one cache, evaluated piece by piece."""

    def __init__(self, context: Context) -> None:
        self._context, self._n = context, 0
        context.clear()

    def read(self, tokens: Tokens, first: int) -> Logits:
        """Evaluate tokens; logits [len(tokens) − first, n_vocab] of those from index `first` on."""
        rows = []
        for low in range(0, len(tokens), self._context.n_batch):
            piece = tokens[low : low + self._context.n_batch]
            n_rows = self._context.decode(piece, self._n, first - low)
            self._n += len(piece)
            if n_rows > 0:
                rows.append(self._context.logits(n_rows).copy())
            else:
                self._context.synchronize()
        return np.concatenate(rows)


def score_answers(context: Context, cut: Sequence[Part]) -> Outcome:
    """Score a sample's answers under one cache, each after the right answers before it."""
    tokens = np.concatenate([part.tokens for part in cut])
    first = len(cut[0].tokens) - 1
    logits = Reader(context).read(tokens[:-1], first)
    out, row, nll = Outcome(), 0, []
    for part in cut[1:]:
        rows = logits[row : row + len(part.tokens)]
        row += len(part.tokens)
        if part.is_answer:
            predicted = rows.argmax(-1)
            out.right.append(bool((predicted == part.tokens).all()))
            out.predicted.append(tuple(predicted.tolist()))
            nll.append(-log_softmax(rows)[np.arange(len(rows)), part.tokens])
    out.nll = float(np.concatenate(nll).mean())
    return out


#
# JSON under a schema: the first cache generates it, the others read it
#


def best_allowed(grammar: Grammar, row: Row) -> int:
    """The most likely token that the grammar allows."""
    token = int(row.argmax())
    return token if grammar.admits(token) else int(np.where(grammar.allowed(), row, -np.inf).argmax())


def generate_json(model: Model, reader: Reader, row: Row, schema: dict[str, Any], max_tokens: int) -> list[int]:
    """Greedy tokens of a JSON that fits the schema. row: logits of the first token."""
    generated: list[int] = []
    with Grammar(model.vocab, schema) as grammar:
        while len(generated) < max_tokens:
            token = best_allowed(grammar, row)
            if model.is_end(token):
                break
            grammar.accept(token)
            generated.append(token)
            row = reader.read(np.array([token], np.int32), 0)[0]
    return generated


def follow_json(model: Model, rows: Logits, generated: list[int], schema: dict[str, Any]) -> list[int]:
    """The greedy token at each place of a generated JSON, up to the first that differs."""
    greedy: list[int] = []
    with Grammar(model.vocab, schema) as grammar:
        for row, token in zip(rows, generated, strict=False):
            greedy.append(best_allowed(grammar, row))
            if greedy[-1] != token:
                break
            grammar.accept(token)
    return greedy


def score_calls(model: Model, contexts: Sequence[Context], sample: Sample, schema: dict[str, Any]) -> list[Outcome]:
    """Score the JSON of a sample: the first cache generates it, and the others are compared token by token.

    right: the JSON equals the expected one. A JSON of another cache that differs from the first's is not completed, so
    it counts as wrong. The generated JSON stays in the text.
    """
    readers, outcomes = [Reader(context) for context in contexts], [Outcome() for _ in contexts]
    for i, (text, answer) in enumerate(zip(sample.pieces[::2], sample.pieces[1::2], strict=True)):
        tokens = model.tokenize(text.encode(), special=i == 0)
        max_tokens = len(model.tokenize(answer.encode(), special=False)) + SPARE
        row = readers[0].read(tokens, len(tokens) - 1)[0]
        generated = generate_json(model, readers[0], row, schema, max_tokens)
        outcomes[0].predicted.append(tuple(generated))
        outcomes[0].right.append(_same_json(b"".join(map(model.piece, generated)), answer))
        for reader, outcome in zip(readers[1:], outcomes[1:], strict=True):
            rows = reader.read(np.array([*tokens, *generated], np.int32), len(tokens) - 1)
            outcome.predicted.append(tuple(follow_json(model, rows, generated, schema)))
            outcome.right.append(outcomes[0].right[-1] and outcome.predicted[-1] == tuple(generated))
    return outcomes


def _same_json(text: bytes, expected: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(expected))
    except ValueError:
        return False


#
# all samples
#


def run(
    model: Model,
    caches: Mapping[str, CacheChoice],
    options: ContextOptions,
    tasks: Sequence[Task],
    lengths: Sequence[int],
    samples: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Run every task at every length under every cache; a result for each. Raises SubkvError."""
    results = []
    n_tokens = sum(lengths) * samples * len(tasks) * len(caches)
    with progress_bar("tasks", n_tokens, "tok") as bar:
        for length in lengths:
            with contextlib.ExitStack() as opened:
                sized = replace(options, n_ctx=length)
                contexts = [open_context(model, choice, sized, name, opened) for name, choice in caches.items()]
                for task in tasks:
                    outcomes: list[list[Outcome]] = [[] for _ in caches]
                    for i in range(samples):
                        sample = task.sample(seed + i, length, counter(model))
                        for of_cache, outcome in zip(outcomes, under_each(model, contexts, sample), strict=True):
                            of_cache.append(outcome)
                        bar.update(length * len(caches))
                    for name, context, of_cache in zip(caches, contexts, outcomes, strict=True):
                        results.append(
                            {
                                "name": name,
                                "task": task.name,
                                "length": length,
                                **scores(of_cache, outcomes[0]),
                                **cache_members(context),
                            }
                        )
                    base = results[-len(caches)]
                    progress = f"{task.name}, {length} tokens: {100 * base['right']:.0f}% right under {base['name']}"
                    bar.set_postfix_str(progress)
                    if bar.disable:  # not a terminal
                        note(progress)
    return results


def under_each(model: Model, contexts: Sequence[Context], sample: Sample) -> list[Outcome]:
    """One sample under every cache."""
    if sample.schema is not None:
        return score_calls(model, contexts, sample, sample.schema)
    cut = parts(model, sample)
    return [score_answers(context, cut) for context in contexts]


def scores(outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> dict[str, Any]:
    """Shares of answers with standard errors over samples, and the changes from the first cache, paired by sample."""
    right, base_right = (np.array([np.mean(o.right) for o in group]) for group in (outcomes, base))
    pairs = [zip(a.predicted, b.predicted, strict=True) for a, b in zip(outcomes, base, strict=True)]
    same = np.array([np.mean([own == of_base for own, of_base in pair]) for pair in pairs])
    columns = {"right": right, "change": right - base_right, "same": same}
    nll, base_nll = (np.array([o.nll for o in group if o.nll is not None]) for group in (outcomes, base))
    if len(nll):
        columns |= {"nll": nll, "nll_change": nll - base_nll}
    numbers: dict[str, Any] = {"samples": len(outcomes), "answers": sum(len(outcome.right) for outcome in outcomes)}
    for name, values in columns.items():
        numbers[name], numbers[f"{name}_stderr"] = mean(values)
    return numbers


def mean(x: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean and its standard error (0 for a single value)."""
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else 0.0
