"""Generated prompts: the same for a seed, no passage on both sides, answers at the right places."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from research.warmstart import prompts
from subkv.base.errors import SubkvError

SENTENCE = "In {year}, the {a} team began to use {n} small ships near the old city, and many of them were built there."
NOUNS = ("red", "northern", "young", "famous", "quiet", "local", "royal", "modern", "eastern", "lost")
NUMBERS = ("two", "three", "four", "five", "several")


def text(n_articles: int = 12, n_sentences: int = 40) -> str:
    """Articles in WikiText's form; every sentence occurs once."""
    rng = random.Random(1)
    lines = []
    for i in range(n_articles):
        lines.append(f" = Article {i} = ")
        for j in range(n_sentences):
            words = {"year": 1500 + 40 * i + j, "a": rng.choice(NOUNS), "n": rng.choice(NUMBERS)}
            lines.append(
                f" {SENTENCE.format(**words)} Nobody knew why it was so on day {i * n_sentences + j} @,@ 000 ."
            )
            lines.append(f" The {words['a']} captain of the {words['n']} ships <unk> was there .")
    return "\n".join(lines)


def chat(message: str) -> str:
    return f"<user>{message}<assistant>"


@pytest.fixture(scope="module")
def made() -> list[prompts.Prompt]:
    return prompts.make(text(), chat, (40, 120), 8, 0.5, 0)


def test_deterministic_and_split_by_passage(made: list[prompts.Prompt]) -> None:
    assert prompts.make(text(), chat, (40, 120), 8, 0.5, 0) == made
    assert prompts.make(text(), chat, (40, 120), 8, 0.5, 1) != made
    assert len({p.id for p in made}) == len(made)
    assert all(p.text.startswith("<user>") and p.text.endswith("<assistant>") for p in made)
    bases = [p for p in made if p.kind == "base"]
    assert Counter((p.split, p.words) for p in bases) == {(s, w): 4 for s in ("test", "train") for w in (40, 120)}
    years: dict[str, set[str]] = {"test": set(), "train": set()}  # one year for each sentence of the text
    for prompt in made:
        years[prompt.split] |= set(re.findall(r"\b1[5-9]\d\d\b", prompt.text))
    assert years["test"] and not years["test"] & years["train"]


def test_neighbours_match_their_kind(made: list[prompts.Prompt]) -> None:
    known = {p.id: p for p in made}
    counts: Counter[str] = Counter()
    for base in (p for p in made if p.neighbours):
        for kind, names in base.neighbours.items():
            for other in (known[name] for name in names):
                counts[kind] += 1
                assert other.split == base.split and other.words == base.words and other.text != base.text
                assert (other.passage == base.passage) == (kind not in ("template", "random"))
                assert (other.task == base.task) == (kind not in ("question", "random"))
                assert (other.group == base.group) == (kind == "paraphrase")
                if kind == "paraphrase":
                    assert other.answer == base.answer
    assert set(counts) == set(prompts.KINDS)


def test_answers_follow_from_the_prompt(made: list[prompts.Prompt]) -> None:
    labelled = [p for p in made if p.answer is not None]
    assert {p.task for p in labelled} >= {"number", "cloze"}
    for prompt in labelled:
        body = prompt.text.removesuffix("<assistant>")
        if prompt.task == "year":
            assert body.count(str(prompt.answer)) >= 1
        elif prompt.task == "cloze":
            assert not body.endswith((str(prompt.answer), "."))
        else:
            last = body.split("Sentence: ")[-1].removesuffix("\nAnswer:")
            assert prompt.answer == ("yes" if re.search(r"\d", last) else "no")


def test_strength_grades_the_edits() -> None:
    sentences = [f"Several ships were built in {year}, and many children used two roads." for year in range(30)]
    changed = [
        sum(a != b for a, b in zip(sentences, prompts.reword(sentences, s, random.Random(0)), strict=True))
        for s in (0.0, 0.25, 1.0)
    ]
    assert changed[0] == 0 < changed[1] < changed[2] == len(sentences)
    reworded = prompts.reword(["In 1999, the small town was big; many people left."], 1.0, random.Random(0))
    assert reworded == ["The little city was large. Many people left in 1999."]
    assert prompts.reword(["Many ships."], 1.0, random.Random(0), keep="ships") == ["Many ships."]


def test_wikitext_is_cleaned() -> None:
    assert prompts.clean('a @-@ b , 1 @,@ 000 ( x ) " y " it \'s .') == 'a-b, 1,000 (x) "y" it\'s.'
    assert not any("<unk>" in s for article in prompts.articles(text()) for s in article)


def test_text_too_short() -> None:
    with pytest.raises(SubkvError, match=r"^text: expected text for 8 passages of 600 words \(test\), found \d"):
        prompts.make(text(2, 4), chat, (600,), 8, 1.0, 0)


def test_file_round_trip_and_errors(tmp_path: Path, made: list[prompts.Prompt]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(prompts.dumps(made), encoding="utf-8")
    assert prompts.read(path) == made
    strange = [prompts.Prompt("a", "a", "base", "one\u2028two\x85three\x1dfour\nfive")]
    path.write_text(prompts.dumps(strange), encoding="utf-8")
    assert prompts.read(path) == strange
    good = {"id": "a", "group": "a", "kind": "base", "text": "x"}
    for line, message in (
        ("", "expected prompts, one JSON object a line, found none"),
        ("{", "expected a JSON object in line 1 of prompts.jsonl, found text that does not parse"),
        ("[" * 100000, "expected a JSON object in line 1 of prompts.jsonl, found text that does not parse"),
        ("[]", "expected a JSON object in line 1 of prompts.jsonl, found list"),
        (json.dumps({"id": "a"}), "expected 'group' in line 1"),
        (json.dumps({**good, "more": 1}), "found 'more'"),
        (json.dumps({**good, "text": 1}), "expected text as str in line 1 of prompts.jsonl, found int"),
        (json.dumps({**good, "neighbours": {"random": "b"}}), "expected ids of neighbours of kind random"),
        (json.dumps({**good, "neighbours": {"random": ["b"]}}), "expected 'b', a neighbour of 'a'"),
        (f"{json.dumps(good)}\n{json.dumps(good)}", "found 'a' again in line 2"),
    ):
        path.write_text(line, encoding="utf-8")
        with pytest.raises(SubkvError, match=f"^path: .*{re.escape(message)}"):
            prompts.read(path)
    with pytest.raises(SubkvError, match="^path: cannot read"):
        prompts.read(tmp_path / "none.jsonl")
