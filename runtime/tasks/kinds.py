"""The tasks: texts made from a seed, in which what is asked stands once, or several times, far back.

A sample is pieces of text, given ones and answers in turn. After a question the right answer stands in the text that
goes on, so that one long text asks several questions, and the later ones see how answers look. One shown question
comes before them where the form has to be learnt. All texts are our own words, put together at random.

Every kind has one number that makes it harder. The defaults suit a model of 135M parameters, which with an exact cache
shall neither fail nor be perfect.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from subkv.base.errors import SubkvError

ASKED = 16  # questions about a text, at most
COPIED = 8  # answers of a copy
CHAINS = 4  # of variables
CALLS = 3  # tool calls asked for in a text
SPARE = 16  # tokens by which a call may be longer than the right one
JOINS = 4  # tokens that a text tokenized call by call may have more for each
SHOWN = 4  # groups of a random string that say where the copy goes on

CITIES = [
    "Oslo",
    "Lima",
    "Cairo",
    "Porto",
    "Quebec",
    "Delhi",
    "Hanoi",
    "Perth",
    "Turin",
    "Kyoto",
    "Malmo",
    "Dakar",
    "Riga",
    "Bergen",
    "Lagos",
    "Austin",
    "Tunis",
    "Seville",
    "Bremen",
    "Osaka",
    "Havana",
    "Denver",
    "Krakow",
    "Nairobi",
]
NOUNS = [
    "apple",
    "river",
    "candle",
    "wagon",
    "mirror",
    "ladder",
    "basket",
    "garden",
    "hammer",
    "pillow",
    "bottle",
    "button",
    "carpet",
    "window",
    "engine",
    "forest",
    "ticket",
    "saddle",
    "pepper",
    "violin",
    "needle",
    "anchor",
    "blanket",
    "feather",
    "lantern",
    "marble",
    "orange",
    "pencil",
    "rabbit",
    "shovel",
    "turtle",
    "valley",
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
    """pieces: given text, answer, given text, answer, …. schema: what the JSON that follows them must fit, if any."""

    pieces: tuple[str, ...]
    schema: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Make = Callable[[random.Random, int, int], Sample]  # from a source of chance, units of text, and how hard it is


def sentence(rng: random.Random) -> str:
    form = rng.choice(PLAIN)
    return form.format(*rng.sample(NOUNS, form.count("{}")))


def digits(rng: random.Random, n: int) -> str:
    """A number of n digits that does not begin with 0."""
    return str(rng.randrange(10 ** (n - 1), 10**n))


def letters(rng: random.Random, n: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=n))


def distinct(make: Callable[[], str], n: int, of: int) -> list[str]:
    """n different texts, in the order in which they came. of: how many there are. Raises SubkvError about `length`."""
    if n > of:
        raise SubkvError("length", f"expected a larger number behind the task: {of} names exist, {n} are needed")
    found: dict[str, None] = {}
    while len(found) < n:
        found[make()] = None
    return list(found)


def hidden(rng: random.Random, n_plain: int, lines: list[str]) -> list[str]:
    """Plain sentences with lines among them, each somewhere, in their order."""
    places = sorted(rng.randrange(n_plain + 1) for _ in lines)
    text = [sentence(rng) for _ in range(n_plain)]
    for place, line in reversed(list(zip(places, lines, strict=True))):
        text.insert(place, line)
    return text


def questions(context: str, pairs: list[tuple[str, str]], end: str = "\n") -> Sample:
    """A text, and questions with their answers."""
    pieces = [context]
    for question, answer in pairs:
        pieces[-1] += question
        pieces += [answer, end]
    return Sample(tuple(pieces[:-1]))


def needle(rng: random.Random, size: int, hard: int) -> Sample:
    """One number of `hard` digits in plain sentences."""
    city, number = rng.choice(CITIES), digits(rng, hard)
    text = hidden(rng, size, [f"The secret number of {city} is {number}."])
    return questions(" ".join(text), [(f"\n\nThe secret number of {city} is", f" {number}")])


def needles(rng: random.Random, size: int, hard: int) -> Sample:
    """`hard` numbers in plain sentences."""
    cities = rng.sample(CITIES, hard)
    numbers = distinct(lambda: digits(rng, 6), hard, 9 * 10**5)
    facts = [(f"The secret number of {city} is", f" {number}") for city, number in zip(cities, numbers, strict=True)]
    text = hidden(rng, size, [f"{fact}{number}." for fact, number in facts])
    return questions(" ".join(text) + "\n\n", rng.sample(facts, min(hard, ASKED)), end=".\n")


def recall(rng: random.Random, size: int, hard: int) -> Sample:
    """Nothing but keys and values; keys of `hard` letters."""
    keys = distinct(lambda: letters(rng, hard), size + ASKED, 26**hard)
    pairs = [(f"{key}:", f" {digits(rng, 4)}") for key in keys]
    return questions("\n".join(map("".join, pairs)) + "\n\n", rng.sample(pairs, ASKED))


def variables(rng: random.Random, size: int, hard: int) -> Sample:
    """Chains of `hard` assignments in plain sentences: what is the last variable of each?"""
    names = distinct(lambda: letters(rng, 3), (hard + 1) * (CHAINS + 1), 26**3)
    numbers = distinct(lambda: digits(rng, 4), CHAINS + 1, 9 * 10**3)
    chains = [names[i :: CHAINS + 1] for i in range(CHAINS + 1)]
    steps = [[f"Let {chain[0]} = {number}."] for chain, number in zip(chains, numbers, strict=True)]
    for chain, lines in zip(chains, steps, strict=True):
        lines += [f"Let {new} = {old}." for old, new in zip(chain, chain[1:], strict=False)]
    merged = []
    while any(steps):
        merged.append(rng.choice([lines for lines in steps if lines]).pop(0))
    asked = [(f"{chain[-1]} =", f" {number}") for chain, number in zip(chains, numbers, strict=True)]
    rng.shuffle(asked)
    (question, answer), *rest = asked
    text = " ".join(hidden(rng, size, merged))
    return questions(f"{text}\n\nThe values are:\n{question}{answer}\n", rest)


def copy(rng: random.Random, size: int, hard: int) -> Sample:
    """Plain sentences, of which a passage is said again, the first given; `hard` sentences an answer."""
    said = [" ".join(sentence(rng) for _ in range(hard)) for _ in range(size + COPIED + 1)]
    start = rng.randrange(size + 1)
    first, *rest = said[start : start + COPIED + 1]
    return questions(f"{' '.join(said)}\n\n{first}", [("", f" {answer}") for answer in rest], end="")


def count(rng: random.Random, size: int, hard: int) -> Sample:
    """How often each of some words stands among plain sentences: 1 to `hard` times."""
    words = rng.sample(CITIES, 9)
    often = [rng.randint(1, hard) for _ in words]
    lines = [f"A letter came from {word}." for word, n in zip(words, often, strict=True) for _ in range(n)]
    rng.shuffle(lines)
    asked = [(f"Letters from {word}:", f" {n}") for word, n in zip(words, often, strict=True)]
    (question, answer), *rest = asked
    return questions(" ".join(hidden(rng, size, lines)) + f"\n\n{question}{answer}\n", rest)


def induction(rng: random.Random, size: int, hard: int) -> Sample:
    """Random groups of `hard` letters: a passage of them comes again."""
    groups = [f" {letters(rng, hard)}" for _ in range(size + SHOWN + ASKED)]
    start = rng.randrange(size + 1)
    shown, asked = groups[start : start + SHOWN], groups[start + SHOWN : start + SHOWN + ASKED]
    return questions("".join(groups).strip() + "\n" + "".join(shown).strip(), [("", group) for group in asked], end="")


def tools(rng: random.Random, size: int, hard: int) -> Sample:
    """Orders of a shop, and calls of its tools about them, with the order's number, `hard` digits, and its city."""
    numbers = distinct(lambda: digits(rng, hard), size + CALLS + 1, 9 * 10 ** (hard - 1))
    orders = [(number, rng.choice(NOUNS), rng.choice(CITIES), rng.randint(2, 9)) for number in numbers]
    lines = [f"Order {number}: {n} {thing}s, to {city}." for number, thing, city, n in orders]
    requests = []
    for number, thing, city, n in rng.sample(orders, CALLS + 1):
        tool = rng.choice(TOOLS)
        call = {"name": tool, "arguments": {"order": number, "item": thing, "quantity": n, "city": city}}
        requests.append((f"Request: {tool} order {number}.\nCall:\n", json.dumps(call)))
    (question, answer), *rest = requests
    text = "\n".join(lines)
    made = questions(f"{text}\n\nTools: {', '.join(TOOLS)}.\n{question}{answer}\n", rest)
    return Sample(made.pieces, SCHEMA)


MAKERS: dict[str, tuple[Make, int]] = {
    "needle": (needle, 6),
    "needles": (needles, 8),
    "recall": (recall, 3),
    "variables": (variables, 1),
    "copy": (copy, 1),
    "count": (count, 4),
    "induction": (induction, 3),
    "tools": (tools, 5),
}
# the least and the most of each kind's number: fewer would not be distinct, more are not there
RANGES = {
    "needle": (2, 18),
    "needles": (1, len(CITIES)),
    "recall": (3, 18),
    "variables": (1, 16),
    "copy": (1, 16),
    "count": (2, 99),
    "induction": (1, 64),
    "tools": (4, 18),
}


@dataclass(frozen=True)
class Task:
    """One kind at one difficulty."""

    kind: str
    hard: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.hard}"

    def sample(self, seed: int, length: int, count: Callable[[str], int]) -> Sample:
        """The longest text of at most `length` tokens. count: tokens of a text.

        The same for the same seed, length and tokenizer. Raises SubkvError about `length` where nothing fits.
        """
        make = MAKERS[self.kind][0]

        def made(size: int) -> Sample:
            return make(random.Random(f"{self.name} {seed}"), size, self.hard)

        def fits(size: int) -> bool:
            try:
                sample = made(size)
            except SubkvError:
                return False
            return count(sample.text) + (CALLS * (SPARE + JOINS) if sample.schema else 0) <= length

        low, high = 0, 8
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        made(high)  # raises where the task ends before the length does
        if low == 0:
            raise SubkvError("length", f"expected more tokens for the task {self.name}, found {length}")
        return made(low)


def parse(spec: str) -> Task:
    """`recall` or `recall:4` → Task. Raises SubkvError about `tasks`."""
    kind, colon, number = spec.partition(":")
    if kind not in MAKERS:
        raise SubkvError("tasks", f"expected names out of {', '.join(MAKERS)}, found {kind!r}")
    hard = MAKERS[kind][1]
    low, high = RANGES[kind]
    if colon:
        if not (number.isascii() and number.isdigit() and low <= int(number[:9]) <= high):
            raise SubkvError("tasks", f"{kind}: expected a number from {low} to {high} behind it, found {number!r}")
        hard = int(number)
    return Task(kind, hard)
