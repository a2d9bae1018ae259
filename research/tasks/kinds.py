"""The tasks: texts generated from a seed, with questions about facts far back in the text.

A sample is a list of pieces that alternate between text and answer. The right answer follows each question in the text.
So one long text asks several questions, and earlier answers show the form of later ones. Kinds with an unusual form
start with an answered question. All texts are random combinations of our own words.

Each kind has one number that sets its difficulty. With the defaults, a model of 135M parameters and an exact cache
neither fails nor is perfect.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from subkv.base.errors import SubkvError

MAX_QUESTIONS = 16  # per text
COPIED = 8  # answers of `copy`
CHAINS = 4  # of `variables`
CALLS = 3  # tool calls per text
SPARE = 16  # tokens that a generated call may be longer than the right one
JOINS = 4  # further tokens per call, because the text is tokenized call by call
SHOWN = 4  # groups of `induction` that are repeated before the first question

CITIES = [
    *("Oslo", "Lima", "Cairo", "Porto", "Quebec", "Delhi", "Hanoi", "Perth"),
    *("Turin", "Kyoto", "Malmo", "Dakar", "Riga", "Bergen", "Lagos", "Austin"),
    *("Tunis", "Seville", "Bremen", "Osaka", "Havana", "Denver", "Krakow", "Nairobi"),
]
NOUNS = [
    *("apple", "river", "candle", "wagon", "mirror", "ladder", "basket", "garden"),
    *("hammer", "pillow", "bottle", "button", "carpet", "window", "engine", "forest"),
    *("ticket", "saddle", "pepper", "violin", "needle", "anchor", "blanket", "feather"),
    *("lantern", "marble", "orange", "pencil", "rabbit", "shovel", "turtle", "valley"),
]
TOOLS = ("ship", "refund", "cancel", "track")
ARGUMENTS = {"order": "string", "item": "string", "quantity": "integer", "city": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": list(TOOLS)},
        "arguments": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in ARGUMENTS.items()},
            "required": list(ARGUMENTS),
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
PLAIN = [
    "The old {} stood beside the {}.",
    "Nobody had seen the {} since spring.",
    "She put the {} under the {}.",
    "The {} is not the {}.",
    "They carried the {} past the {} and went home.",
    "He painted the {} twice before noon.",
    "In the evening the {} was quiet.",
    "We traded the {} for the {}.",
]


@dataclass(frozen=True)
class Sample:
    """pieces: text, answer, text, answer, …. schema: JSON schema of the answers, if they have one."""

    pieces: tuple[str, ...]
    schema: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Make = Callable[[random.Random, int, int], Sample]  # arguments: random source, size (sentences or lines), difficulty


def sentence(rng: random.Random) -> str:
    """A plain sentence, which no question is about."""
    form = rng.choice(PLAIN)
    return form.format(*rng.sample(NOUNS, form.count("{}")))


def digits(rng: random.Random, n: int) -> str:
    """A number of n digits that does not begin with 0."""
    return str(rng.randrange(10 ** (n - 1), 10**n))


def letters(rng: random.Random, n: int) -> str:
    """n lowercase letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=n))


def distinct(make: Callable[[], str], n: int, n_possible: int) -> list[str]:
    """n different texts from make(), which can make n_possible. Raises SubkvError about `length`."""
    if n > n_possible:
        reason = f"expected a larger number behind the task: {n_possible} names exist, {n} are needed"
        raise SubkvError("length", reason)
    texts: dict[str, None] = {}
    while len(texts) < n:
        texts[make()] = None
    return list(texts)


def hidden(rng: random.Random, n_plain: int, lines: list[str]) -> list[str]:
    """Plain sentences with the lines inserted at random places, in their order."""
    places = sorted(rng.randrange(n_plain + 1) for _ in lines)
    text = [sentence(rng) for _ in range(n_plain)]
    for place, line in reversed(list(zip(places, lines, strict=True))):
        text.insert(place, line)
    return text


def questions(context: str, pairs: list[tuple[str, str]], end: str = "\n") -> Sample:
    """A text followed by questions and answers."""
    pieces = [context]
    for question, answer in pairs:
        pieces[-1] += question
        pieces += [answer, end]
    return Sample(tuple(pieces[:-1]))


def needle(rng: random.Random, size: int, difficulty: int) -> Sample:
    """One number of `difficulty` digits among plain sentences."""
    city, number = rng.choice(CITIES), digits(rng, difficulty)
    text = hidden(rng, size, [f"The secret number of {city} is {number}."])
    return questions(" ".join(text), [(f"\n\nThe secret number of {city} is", f" {number}")])


def needles(rng: random.Random, size: int, difficulty: int) -> Sample:
    """`difficulty` numbers among plain sentences."""
    cities = rng.sample(CITIES, difficulty)
    numbers = distinct(lambda: digits(rng, 6), difficulty, 9 * 10**5)
    facts = [(f"The secret number of {city} is", f" {number}") for city, number in zip(cities, numbers, strict=True)]
    text = hidden(rng, size, [f"{fact}{number}." for fact, number in facts])
    return questions(" ".join(text) + "\n\n", rng.sample(facts, min(difficulty, MAX_QUESTIONS)), end=".\n")


def recall(rng: random.Random, size: int, difficulty: int) -> Sample:
    """Only keys and values; keys have `difficulty` letters."""
    keys = distinct(lambda: letters(rng, difficulty), size + MAX_QUESTIONS, 26**difficulty)
    pairs = [(f"{key}:", f" {digits(rng, 4)}") for key in keys]
    return questions("\n".join(map("".join, pairs)) + "\n\n", rng.sample(pairs, MAX_QUESTIONS))


def variables(rng: random.Random, size: int, difficulty: int) -> Sample:
    """Chains of `difficulty` assignments among plain sentences; questions ask for the last variable of each chain."""
    names = distinct(lambda: letters(rng, 3), (difficulty + 1) * (CHAINS + 1), 26**3)
    numbers = distinct(lambda: digits(rng, 4), CHAINS + 1, 9 * 10**3)
    chains = [names[i :: CHAINS + 1] for i in range(CHAINS + 1)]
    steps = [[f"Let {chain[0]} = {number}."] for chain, number in zip(chains, numbers, strict=True)]
    for chain, lines in zip(chains, steps, strict=True):
        lines += [f"Let {new} = {old}." for old, new in zip(chain, chain[1:], strict=False)]
    merged = []
    while any(steps):
        merged.append(rng.choice([lines for lines in steps if lines]).pop(0))
    pairs = [(f"{chain[-1]} =", f" {number}") for chain, number in zip(chains, numbers, strict=True)]
    rng.shuffle(pairs)
    (question, answer), *rest = pairs
    text = " ".join(hidden(rng, size, merged))
    return questions(f"{text}\n\nThe values are:\n{question}{answer}\n", rest)


def copy(rng: random.Random, size: int, difficulty: int) -> Sample:
    """Plain sentences, then a passage of them again, without a question; `difficulty` sentences per answer."""
    passages = [" ".join(sentence(rng) for _ in range(difficulty)) for _ in range(size + COPIED + 1)]
    start = rng.randrange(size + 1)
    first, *rest = passages[start : start + COPIED + 1]
    return questions(f"{' '.join(passages)}\n\n{first}", [("", f" {answer}") for answer in rest], end="")


def count(rng: random.Random, size: int, difficulty: int) -> Sample:
    """Counts of words among plain sentences: 1 to `difficulty` times each."""
    words = rng.sample(CITIES, 9)
    counts = [rng.randint(1, difficulty) for _ in words]
    lines = [f"A letter came from {word}." for word, n in zip(words, counts, strict=True) for _ in range(n)]
    rng.shuffle(lines)
    pairs = [(f"Letters from {word}:", f" {n}") for word, n in zip(words, counts, strict=True)]
    (question, answer), *rest = pairs
    return questions(" ".join(hidden(rng, size, lines)) + f"\n\n{question}{answer}\n", rest)


def induction(rng: random.Random, size: int, difficulty: int) -> Sample:
    """Random groups of `difficulty` letters, then a passage of them again."""
    groups = [f" {letters(rng, difficulty)}" for _ in range(size + SHOWN + MAX_QUESTIONS)]
    start = rng.randrange(size + 1)
    shown, answers = groups[start : start + SHOWN], groups[start + SHOWN : start + SHOWN + MAX_QUESTIONS]
    return questions(
        "".join(groups).strip() + "\n" + "".join(shown).strip(), [("", group) for group in answers], end=""
    )


def tools(rng: random.Random, size: int, difficulty: int) -> Sample:
    """A shop's orders, and tool calls about them; order numbers have `difficulty` digits."""
    numbers = distinct(lambda: digits(rng, difficulty), size + CALLS + 1, 9 * 10 ** (difficulty - 1))
    orders = [(number, rng.choice(NOUNS), rng.choice(CITIES), rng.randint(2, 9)) for number in numbers]
    lines = [f"Order {number}: {n} {item}s, to {city}." for number, item, city, n in orders]
    requests = []
    for number, item, city, n in rng.sample(orders, CALLS + 1):
        tool = rng.choice(TOOLS)
        call = {"name": tool, "arguments": {"order": number, "item": item, "quantity": n, "city": city}}
        requests.append((f"Request: {tool} order {number}.\nCall:\n", json.dumps(call)))
    (question, answer), *rest = requests
    text = "\n".join(lines)
    sample = questions(f"{text}\n\nTools: {', '.join(TOOLS)}.\n{question}{answer}\n", rest)
    return Sample(sample.pieces, SCHEMA)


# kind -> (function, default difficulty, lowest and highest difficulty, limited by the number of distinct names)
MAKERS: dict[str, tuple[Make, int, int, int]] = {
    "needle": (needle, 6, 2, 18),
    "needles": (needles, 8, 1, len(CITIES)),
    "recall": (recall, 3, 3, 18),
    "variables": (variables, 1, 1, 16),
    "copy": (copy, 1, 1, 16),
    "count": (count, 4, 2, 99),
    "induction": (induction, 3, 1, 64),
    "tools": (tools, 5, 4, 18),
}


@dataclass(frozen=True)
class Task:
    """A kind with its difficulty."""

    kind: str
    difficulty: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.difficulty}"

    def sample(self, seed: int, length: int, count: Callable[[str], int]) -> Sample:
        """The longest text of at most `length` tokens. count: counts the tokens of a text.

        Deterministic for a seed, length and tokenizer. Raises SubkvError about `length` if no text fits.
        """

        def make(size: int) -> Sample:
            return MAKERS[self.kind][0](random.Random(f"{self.name} {seed}"), size, self.difficulty)

        def fits(size: int) -> bool:
            try:
                sample = make(size)
            except SubkvError:
                return False
            return count(sample.text) + (CALLS * (SPARE + JOINS) if sample.schema else 0) <= length

        low, high = 0, 8
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        make(high)  # raises if the task has too few names for the length
        if low == 0:
            raise SubkvError("length", f"expected more tokens for the task {self.name}, found {length}")
        return make(low)


def parse(spec: str) -> Task:
    """The task of `recall` (default difficulty) or `recall:4`. Raises SubkvError about `tasks`."""
    kind, colon, number = spec.partition(":")
    if kind not in MAKERS:
        raise SubkvError("tasks", f"unknown task {kind!r}; expected one of {', '.join(MAKERS)}")
    _, difficulty, low, high = MAKERS[kind]
    if colon:
        if not (number.isascii() and number.isdigit() and low <= int(number[:9]) <= high):
            raise SubkvError("tasks", f"{kind}: expected a number from {low} to {high}; found {number!r}")
        difficulty = int(number)
    return Task(kind, difficulty)
