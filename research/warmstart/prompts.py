"""Prompts in pairs of known kinship, made from a text file by rule: nobody labels anything, a seed gives the same file.

The text is cut into passages of whole sentences, each out of one article (a heading `= … =` starts one; without
headings every 40th paragraph does); articles, and so passages, are either for training or for testing. Every passage
gets a base prompt: an instruction of wordings.py in its usual wording, a blank line, the passage, and the model's own
chat template around them. Its neighbours, by kind:

- paraphrase: the same task about the same passage. The instruction has another wording, and the passage is edited by
  rule with a strength s: every applicable edit (synonyms, digits for number words, an opening "In 1999, …" moved to the
  end of its sentence, clauses behind a semicolon made sentences) happens with probability s, and from s = 0.75 on
  neighbouring sentences change places. s = 0 changes the wording of the instruction alone, so the similarity of the
  pairs spans a range.
- template: the same instruction, word for word, about another passage.
- question: another task about the same passage.
- format: of a labelled task with worked examples, the same examples and another last question.
- random: another task about another passage.

Labelled tasks have an answer that follows from how they are made: the one year that a passage mentions, its missing
last word, whether the last of its sentences has a digit in it (the others are worked examples). Edits leave it alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from research.warmstart.wordings import INSTRUCTIONS, LABELLED, NUMERALS, ONE_WAY, SYNONYMS
from subkv.base.errors import SubkvError

KINDS = ("paraphrase", "template", "question", "format", "random")
STRENGTHS = (0.0, 0.25, 0.5, 1.0)
SWAP = 0.75  # strength from which sentences change places
WORDS = (60, 180, 600)
FEW = 3  # sentences that a task with worked examples needs
TEST, TRAIN = "test", "train"
ARTICLE = 40  # paragraphs, in a text without headings


@dataclass(frozen=True)
class Passage:
    """Consecutive sentences of one article, about `words` words; nothing else shares a sentence with it."""

    id: str
    split: str
    words: int
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass
class Prompt:
    """One line of a prompt file; text is the whole prompt, chat template applied.

    group: paraphrases of each other share one. split: "train" or "test", else for both. neighbours: kind of pair ->
    ids. answer: of labelled tasks.
    """

    id: str
    group: str
    kind: str
    text: str
    split: str = ""
    passage: str = ""
    task: str = ""
    words: int = 0
    strength: float | None = None
    answer: str | None = None
    neighbours: dict[str, list[str]] = field(default_factory=dict)


#
# text to passages
#


_MARKS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" 's", "'s"), (" n't", "n't"), ("s ' ", "s' "))


def clean(text: str) -> str:
    """Prose as people write it: WikiText's markers for hyphens and points, its spaces before punctuation undone."""
    for mark, plain in _MARKS:
        text = text.replace(mark, plain)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    text = re.sub(r"\s+([,.;:!?%)\]])", r"\1", text)
    return re.sub(r"([(\[$£])\s+", r"\1", text)


def articles(text: str) -> list[list[str]]:
    """Sentences of each article, without headings, unknown words and fragments."""
    found: list[list[str]] = [[]]
    headings = re.search(r"^ = [^=].* = $", text, re.MULTILINE) is not None
    n = 0
    for line in text.split("\n"):
        if re.match(r"^\s*=.*=\s*$", line):
            if re.match(r"^ = [^=].* = $", line):
                found.append([])
            continue
        if not line.strip():
            continue
        n += 1
        if not headings and n % ARTICLE == 0:
            found.append([])
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", clean(line.strip())):
            if sentence[-1:] in ".!?" and len(sentence.split()) >= 4 and "<unk>" not in sentence:
                found[-1].append(sentence)
    return [article for article in found if article]


def passages(text: str, words: Sequence[int], n: int, test_share: float, seed: int) -> list[Passage]:
    """n passages of each number of words, in an order that depends on the seed alone.

    Raises SubkvError about `text` where it has too few.
    """
    pool = articles(text)
    rng = random.Random(seed)
    rng.shuffle(pool)
    n_test = round(test_share * len(pool))
    found: list[Passage] = []
    parts = ((TEST, pool[:n_test], round(n * test_share)), (TRAIN, pool[n_test:], n - round(n * test_share)))
    for split, articles_of, expected in parts:
        rest = [list(article) for article in articles_of]
        for size in sorted(words, reverse=True):  # long ones first: few articles have room for them
            own = list(_cut(rest, size, expected))
            if len(own) < expected:
                raise SubkvError(
                    "text", f"expected text for {expected} passages of {size} words ({split}), found {len(own)}"
                )
            found += [Passage(f"{split}-{size}-{i}", split, size, tuple(part)) for i, part in enumerate(own)]
    return sorted(found, key=lambda p: (p.split, words.index(p.words), int(p.id.rpartition("-")[2])))


def _cut(rest: list[list[str]], size: int, n_passages: int) -> Iterator[list[str]]:
    """Up to `n_passages` passages of `size` words from the articles in turn; removes them from `rest`."""
    taken = True
    while n_passages and taken:
        taken = False
        for article in rest:
            if not n_passages:
                return
            n_words, n = 0, 0
            while n < len(article) and n_words < size:
                n_words += len(article[n].split())
                n += 1
            if n_words < size:
                continue
            yield article[:n]
            del article[:n]
            taken, n_passages = True, n_passages - 1


#
# rewording
#


_PAIRS = [*SYNONYMS, *((b, a) for a, b in SYNONYMS), *ONE_WAY, *NUMERALS]
_RULES = [(re.compile(rf"\b{re.escape(a)}\b"), b) for a, b in _PAIRS]
_OPENING = re.compile(r"^((?:In|On|By|After|During|Since|Until|For|At|From|With) [^,;]{3,40}), (\w)(.*)([.!?])$")
_CLAUSES = re.compile(r"; (\w)")


def reword(sentences: Sequence[str], strength: float, rng: random.Random, keep: str = "") -> list[str]:
    """A passage edited with the strength in [0, 1]; sentences with the word `keep` stay as they are."""
    out = []
    for sentence in sentences:
        if keep and re.search(rf"\b{re.escape(keep)}\b", sentence):
            out.append(sentence)
            continue
        if rng.random() < strength:
            sentence = _OPENING.sub(lambda m: f"{m[2].upper()}{m[3]} {m[1][0].lower()}{m[1][1:]}{m[4]}", sentence)
            sentence = _CLAUSES.sub(lambda m: f". {m[1].upper()}", sentence)
        done: set[str] = set()  # a word that was put there is not changed back
        for pattern, other in _RULES:
            if pattern.pattern not in done and pattern.search(sentence) and rng.random() < strength:
                sentence = pattern.sub(other, sentence)
                done.add(rf"\b{re.escape(other)}\b")
        out.append(sentence)
    if strength >= SWAP:
        movable = len(out) - bool(keep)  # a cloze ends where it ended
        for i in range(0, movable - 1, 2):
            out[i], out[i + 1] = out[i + 1], out[i]
    return out


#
# tasks
#


def _year(passage: Passage) -> str | None:
    years = set(re.findall(r"\b(1[0-9]{3}|20[0-2][0-9])\b", passage.text))
    return years.pop() if len(years) == 1 else None


def _last_word(passage: Passage) -> str | None:
    found = re.search(r"\b([a-z]{3,})[.!?]$", passage.sentences[-1])
    return found[1] if found else None


def _has_number(sentence: str) -> str:
    return "yes" if re.search(r"\d", sentence) else "no"


def _few_shot(wording: str, shown: Sequence[str], question: str) -> str:
    lines = [f"Sentence: {s}\nAnswer: {_has_number(s)}" for s in shown]
    return "\n\n".join([wording, *lines, f"Sentence: {question}\nAnswer:"])


def _about(wording: str, sentences: Sequence[str], cloze: str | None = None) -> str:
    text = " ".join(sentences)
    return f"{wording}\n\n{text[: text.rindex(cloze)].rstrip() if cloze else text}"


class _Writer:
    """Collects prompts; `render` applies the chat template to a user's message."""

    def __init__(self, render: Callable[[str], str], seed: int) -> None:
        self.render, self.seed = render, seed
        self.prompts: list[Prompt] = []

    def _add(self, passage: Passage, kind: str, name: str, task: str, text: str, **more: Any) -> Prompt:
        prompt = Prompt(
            id=name,
            kind=kind,
            text=self.render(text),
            split=passage.split,
            passage=passage.id,
            task=task,
            words=passage.words,
            **{"group": name, **more},
        )
        self.prompts.append(prompt)
        return prompt

    def _rng(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed}/{'/'.join(map(str, key))}")

    def _other(self, base: Prompt, passage: Passage, kind: str, task: str, text: str, group: str, **more: Any) -> None:
        """Add a neighbour of a base."""
        name = f"{group}/{kind}-{more.pop('number', 0)}"
        base.neighbours.setdefault(kind, []).append(self._add(passage, kind, name, task, text, group=group, **more).id)

    def instruction(self, passage: Passage, task: str, number: int) -> Prompt:
        """Base, paraphrases of every strength and another question on one passage."""
        wordings, labels = (INSTRUCTIONS | LABELLED)[task], {"year": _year, "cloze": _last_word}
        answer = labels[task](passage) if task in labels else None
        cloze = answer if task == "cloze" else None
        text = _about(wordings[0], passage.sentences, cloze)
        base = self._add(passage, "base", f"{passage.id}/{task}", task, text, answer=answer)

        def reworded(wording: str, strength: float) -> str:
            edited = reword(passage.sentences, strength, self._rng(base.id, strength), answer or "")
            return _about(wording, edited, cloze)

        self._paraphrases(base, passage, wordings, number, reworded)
        others = [name for name in INSTRUCTIONS if name != task]
        other = others[number % len(others)]
        text = _about(INSTRUCTIONS[other][0], passage.sentences)
        self._other(base, passage, "question", other, text, f"{base.id}/{other}")
        return base

    def examples(self, passage: Passage, number: int) -> Prompt | None:
        """A base with worked examples, the same with another last sentence, and reworded ones."""
        sentences, wordings = list(passage.sentences), LABELLED["number"]
        self._rng(passage.id, "examples").shuffle(sentences)
        if len(sentences) < FEW:
            return None
        *shown, question, other = sentences
        name, text = f"{passage.id}/number", _few_shot(wordings[0], shown, question)
        base = self._add(passage, "base", name, "number", text, answer=_has_number(question))
        text = _few_shot(wordings[0], shown, other)
        self._other(base, passage, "format", "number", text, f"{base.id}/other", answer=_has_number(other))

        def reworded(wording: str, strength: float) -> str:
            return _few_shot(wording, reword(shown, strength, self._rng(base.id, strength)), question)

        self._paraphrases(base, passage, wordings, number, reworded)
        return base

    def _paraphrases(
        self,
        base: Prompt,
        passage: Passage,
        wordings: Sequence[str],
        number: int,
        reworded: Callable[[str, float], str],
    ) -> None:
        """Add one of every strength, unless no edit applied and it stands there already."""
        texts = {base.text}
        for i, strength in enumerate(STRENGTHS):
            text = reworded(wordings[1 + (number + i) % 3], strength)
            if self.render(text) not in texts:
                texts.add(self.render(text))
                more = {"number": i, "strength": strength, "answer": base.answer}
                self._other(base, passage, "paraphrase", base.task, text, base.id, **more)


def make(
    text: str,
    render: Callable[[str], str],
    words: Sequence[int] = WORDS,
    n: int = 24,
    test_share: float = 0.25,
    seed: int = 0,
) -> list[Prompt]:
    """All prompts about n passages of each number of words. render: a user's message to a whole prompt.

    Raises SubkvError about `text` for one that is too short.
    """
    writer = _Writer(render, seed)
    bases: list[Prompt] = []
    for number, passage in enumerate(passages(text, words, n, test_share, seed)):
        plain = list(INSTRUCTIONS)[number // 2 % len(INSTRUCTIONS)]
        labelled = [t for t, known in (("year", _year(passage)), ("cloze", _last_word(passage))) if known]
        kind = number % 4  # half of the passages get a labelled task, where they have one
        if kind == 1 and labelled:
            plain = labelled[number // 4 % len(labelled)]
        own = writer.examples(passage, number) if kind == 3 else None
        bases.append(own or writer.instruction(passage, plain, number))
    for i, base in enumerate(bases):
        others = [b for b in bases[i + 1 :] + bases[:i] if b.split == base.split and b.words == base.words]
        for relation, same in (("template", True), ("random", False)):
            pair = next((b.id for b in others if (b.task == base.task) == same), None)
            if pair is not None:
                base.neighbours[relation] = [pair]
    return writer.prompts


#
# files
#


def dumps(prompts: Sequence[Prompt]) -> str:
    return "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)


def read(path: Path) -> list[Prompt]:
    """Prompts of a file. Raises SubkvError about `path` with the line that is not one."""
    try:
        # splitlines() would split at U+2028, too, which JSON leaves in texts as it is
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SubkvError("path", f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    found: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"line {number} of {path.name}"
            prompt = _prompt(where, line)
            if prompt.id in found:
                raise SubkvError("path", f"expected every id once, found {prompt.id!r} again in {where}")
            found[prompt.id] = prompt
    if not found:
        raise SubkvError("path", f"expected prompts, one JSON object a line, found none in {path.name}")
    for prompt in found.values():
        for other in (name for names in prompt.neighbours.values() for name in names):
            if other not in found:
                raise SubkvError(
                    "path", f"expected {other!r}, a neighbour of {prompt.id!r}, in {path.name}, found none"
                )
    return list(found.values())


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "group", "kind", "text", "split", "passage", "task"), (str,)),
    "words": (int,),
    "strength": (int, float, type(None)),
    "answer": (str, type(None)),
    "neighbours": (dict,),
}


def _prompt(where: str, line: str) -> Prompt:
    """One line. Raises SubkvError about `path`; where: which line."""

    def expect(fits: bool, expected: str, found: str) -> None:
        if not fits:
            raise SubkvError("path", f"expected {expected}, found {found}")

    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SubkvError("path", f"expected a JSON object in {where}, found text that does not parse") from error
    expect(isinstance(given, dict), f"a JSON object in {where}", type(given).__name__)
    for name in ("id", "group", "kind", "text"):
        expect(name in given, f"{name!r} in {where}", "none")
    for name, value in given.items():
        expect(name in _TYPES, f"one of {', '.join(_TYPES)} in {where}", repr(name))
        expected = " or ".join(kind.__name__ for kind in _TYPES[name])
        expect(isinstance(value, _TYPES[name]), f"{name} as {expected} in {where}", type(value).__name__)
    for kind, names in given.get("neighbours", {}).items():
        fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
        expect(fits, f"ids of neighbours of kind {kind} in {where}", "something else")
    return Prompt(**given)
