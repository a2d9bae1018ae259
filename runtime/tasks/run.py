"""Samples under several caches, one after the other in one program, and what became of each answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.scoring import log_softmax
from runtime.tasks.grammar import Grammar
from runtime.tasks.kinds import SPARE, Sample, Task
from subkv.base.errors import SubkvError
from subkv.base.progress import note, progress_bar
from subkv.engine.context import Context, Logits
from subkv.engine.model import Model

Tokens = npt.NDArray[np.int32]
Row = npt.NDArray[np.float32]  # logits [n_vocab]


@dataclass(frozen=True)
class Cache:
    """A cache by its name. made: a context of so many tokens."""

    name: str
    made: Callable[[int], Context]


@dataclass
class Outcome:
    """Answers of one sample under one cache. said: what the model would have said in the place of each."""

    right: list[bool] = field(default_factory=list)
    said: list[tuple[int, ...]] = field(default_factory=list)
    nll: float | None = None  # −ln p per token of the right answers


@dataclass(frozen=True)
class Part:
    """Tokens of a sample. asked: they are an answer."""

    tokens: Tokens
    asked: bool


def counter(model: Model) -> Callable[[str], int]:
    """Counts the tokens of a text."""
    return lambda text: len(model.tokenize(text.encode()))


def parts(model: Model, sample: Sample) -> list[Part]:
    """A sample's text as tokens, cut where answers begin and end.

    A token that is partly of an answer belongs to it. Raises SubkvError about `model` where tokens do not spell texts.
    """
    text = sample.text.encode()
    tokens = model.tokenize(text)
    pieces = [model.piece(token) for token in tokens.tolist()]
    if not b"".join(pieces).endswith(text):  # a space may stand before it
        raise SubkvError("model", "expected a tokenizer whose tokens spell the text, found one that changes it")
    ends = np.cumsum([len(piece) for piece in pieces])
    ends -= ends[-1] - len(text)
    found: list[Part] = []
    low = position = 0
    for i, piece in enumerate(sample.pieces):
        position += len(piece.encode())
        asked = i % 2 == 1
        high = int(np.searchsorted(ends, position, "left" if asked else "right")) + (1 if asked else 0)
        found.append(Part(tokens[low:high], asked))
        low = high
    return found


class Reader:
    """One text under one cache, evaluated piece by piece."""

    def __init__(self, context: Context) -> None:
        self._context, self._n = context, 0
        context.clear()

    def read(self, tokens: Tokens, first: int) -> Logits:
        """Logits [len(tokens) − first, n_vocab] behind the tokens from `first` on."""
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


def answered(context: Context, cut: Sequence[Part]) -> Outcome:
    """What a cache makes of a sample's answers, the right ones before each."""
    tokens = np.concatenate([part.tokens for part in cut])
    first = len(cut[0].tokens) - 1
    logits = Reader(context).read(tokens[:-1], first)
    out, row, nll = Outcome(), 0, []
    for part in cut[1:]:
        rows = logits[row : row + len(part.tokens)]
        row += len(part.tokens)
        if part.asked:
            said = rows.argmax(-1)
            out.right.append(bool((said == part.tokens).all()))
            out.said.append(tuple(said.tolist()))
            nll.append(-log_softmax(rows)[np.arange(len(rows)), part.tokens])
    out.nll = float(np.concatenate(nll).mean())
    return out


#
# JSON under a schema: the first cache says it, the others are asked whether they would have said the same
#


def allowed(grammar: Grammar, row: Row) -> int:
    """The likeliest token that may follow."""
    token = int(row.argmax())
    return token if grammar.admits(token) else int(np.where(grammar.allowed(), row, -np.inf).argmax())


def written(model: Model, reader: Reader, row: Row, schema: dict[str, Any], most: int) -> list[int]:
    """At most `most` tokens of a JSON that fits, the likeliest at every step; row: logits of the first."""
    found: list[int] = []
    with Grammar(model.vocab, schema) as grammar:
        while len(found) < most:
            token = allowed(grammar, row)
            if model.is_end(token):
                break
            grammar.accept(token)
            found.append(token)
            row = reader.read(np.array([token], np.int32), 0)[0]
    return found


def followed(model: Model, rows: Logits, said: list[int], schema: dict[str, Any]) -> list[int]:
    """What would be written in the place of each token of a JSON, up to the first other one."""
    found: list[int] = []
    with Grammar(model.vocab, schema) as grammar:
        for row, token in zip(rows, said, strict=False):
            found.append(allowed(grammar, row))
            if found[-1] != token:
                break
            grammar.accept(token)
    return found


def called(model: Model, contexts: Sequence[Context], sample: Sample, schema: dict[str, Any]) -> list[Outcome]:
    """Every JSON of a sample as the first cache writes it, and what the others would write; it stays in the text.

    right: whether it is what the text asks for; of the others, whether it is the first's and that is right, since what
    differs is not written to its end.
    """
    readers, outcomes = [Reader(context) for context in contexts], [Outcome() for _ in contexts]
    for i, (given, answer) in enumerate(zip(sample.pieces[::2], sample.pieces[1::2], strict=True)):
        tokens = model.tokenize(given.encode(), special=i == 0)
        most = len(model.tokenize(answer.encode(), special=False)) + SPARE
        said = written(model, readers[0], readers[0].read(tokens, len(tokens) - 1)[0], schema, most)
        outcomes[0].said.append(tuple(said))
        outcomes[0].right.append(_same_json(b"".join(map(model.piece, said)), answer))
        for reader, outcome in zip(readers[1:], outcomes[1:], strict=True):
            rows = reader.read(np.array([*tokens, *said], np.int32), len(tokens) - 1)
            outcome.said.append(tuple(followed(model, rows, said, schema)))
            outcome.right.append(outcomes[0].right[-1] and outcome.said[-1] == tuple(said))
    return outcomes


def _same_json(text: bytes, wanted: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(wanted))
    except ValueError:
        return False


#
# all of it
#


def run(
    model: Model, caches: Sequence[Cache], tasks: Sequence[Task], lengths: Sequence[int], samples: int, seed: int
) -> list[dict[str, Any]]:
    """Every task at every length under every cache, sample by sample; one result for each of them.

    caches: names and how their contexts are made. Raises SubkvError.
    """
    results = []
    n_tokens = sum(lengths) * samples * len(tasks) * len(caches)
    with progress_bar("tasks", n_tokens, "tok") as bar:
        for length in lengths:
            with contextlib.ExitStack() as opened:
                contexts = [opened.enter_context(cache.made(length)) for cache in caches]
                for task in tasks:
                    outcomes: list[list[Outcome]] = [[] for _ in caches]
                    for i in range(samples):
                        sample = task.sample(seed + i, length, counter(model))
                        for found, outcome in zip(outcomes, under_each(model, contexts, sample), strict=True):
                            found.append(outcome)
                        bar.update(length * len(caches))
                    for cache, context, found in zip(caches, contexts, outcomes, strict=True):
                        results.append(
                            {
                                "name": cache.name,
                                "task": task.name,
                                "length": length,
                                **scores(found, outcomes[0]),
                                "bpe": round(context.stats.bpe, 4),
                                "kv_bytes": context.stats.bytes_kv,
                                "kv_bytes_per_token": context.stats.bytes_per_token,
                            }
                        )
                    base = results[-len(caches)]
                    told = f"{task.name}, {length} tokens: {100 * base['right']:.0f}% right under {base['name']}"
                    bar.set_postfix_str(told)
                    if bar.disable:  # not a terminal
                        note(told)
    return results


def under_each(model: Model, contexts: Sequence[Context], sample: Sample) -> list[Outcome]:
    """One sample under every cache."""
    if sample.schema is not None:
        return called(model, contexts, sample, sample.schema)
    cut = parts(model, sample)
    return [answered(context, cut) for context in contexts]


def scores(found: Sequence[Outcome], base: Sequence[Outcome]) -> dict[str, Any]:
    """Shares of answers with standard errors over samples, and what has changed against the first cache's samples."""
    right = np.array([np.mean(outcome.right) for outcome in found])
    before = np.array([np.mean(outcome.right) for outcome in base])
    pairs = [zip(a.said, b.said, strict=True) for a, b in zip(found, base, strict=True)]
    same = np.array([np.mean([mine == its for mine, its in pair]) for pair in pairs])
    columns = {"right": right, "change": right - before, "same": same}
    nll, exact = (np.array([o.nll for o in some if o.nll is not None]) for some in (found, base))
    if len(nll):
        columns |= {"nll": nll, "nll_change": nll - exact}
    numbers: dict[str, Any] = {"samples": len(found), "answers": sum(len(outcome.right) for outcome in found)}
    for name, values in columns.items():
        numbers[name], numbers[f"{name}_stderr"] = mean(values)
    return numbers


def mean(x: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean and its standard error, 0 of a single value."""
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else 0.0
