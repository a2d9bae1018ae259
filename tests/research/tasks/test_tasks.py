"""research.tasks: samples are valid, scores equal those of generation, results and errors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each

from research.tasks import kinds, run
from research.tasks.cli import main, table
from research.tasks.harness import questions_and_answers
from subkv.base.errors import SubkvError
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model

Models = Callable[..., Path]
N_CTX = 800  # characters, nearly, of the tiny models
SMALL = "needle:2,recall:3,variables:1,induction:2"


def tasks(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@each("kind", kinds.MAKERS)
def test_samples_are_seeded_fit_and_have_their_answer(kind: str) -> None:
    task = kinds.parse(kind)
    sample = task.sample(3, 3000, len)
    assert sample == task.sample(3, 3000, len) != task.sample(4, 3000, len)
    assert 2000 < len(sample.text) <= 3000 and len(sample.pieces) % 2 == 0
    longer = task.sample(3, 6000, len)
    assert len(longer.pieces) == len(sample.pieces) and len(longer.pieces[0]) > len(sample.pieces[0]) + 2000
    answers = sample.pieces[1::2]
    if kind not in ("count", "tools"):
        assert all(answer.strip() in sample.pieces[0] for answer in answers)
    if kind == "count":
        for before, answer in questions_and_answers(sample):
            word = before.rpartition("from ")[2].removesuffix(":")
            assert sample.pieces[0].count(f"from {word}.") == int(answer)


def test_variables_are_followed() -> None:
    """Checked by an independent interpreter."""
    sample = kinds.parse("variables:3").sample(0, 2000, len)
    values: dict[str, str] = {}
    for step in sample.pieces[0].split("Let ")[1:]:
        name, _, value = step.split(".")[0].partition(" = ")
        values[name] = values.get(value, value)
    for before, answer in questions_and_answers(sample):
        assert values[before.split()[-2]] == answer.strip()


def test_calls_are_right_and_fit_their_schema() -> None:
    sample = kinds.parse("tools").sample(0, 2000, len)
    for before, answer in questions_and_answers(sample):
        call = json.loads(answer)
        arguments = call["arguments"]
        assert (
            f"Order {arguments['order']}: {arguments['quantity']} {arguments['item']}s, to {arguments['city']}"
            in before
        )
        assert f"Request: {call['name']} order {arguments['order']}." in before
        assert call.keys() == sample.schema["properties"].keys() and list(arguments) == list(kinds.ARGUMENTS)


def test_answers_are_cut_at_tokens(tiny_model: Models) -> None:
    with Model(str(tiny_model("llama"))) as model:
        sample = kinds.Sample(("the cat is on", " the mat", " and in the", " house"))
        cut = run.parts(model, sample)
        spelled = [b"".join(map(model.piece, part.tokens.tolist())).decode() for part in cut]
        assert spelled == list(sample.pieces) and [part.is_answer for part in cut] == [False, True, False, True]


def test_right_equals_greedy_generation(tiny_model: Models) -> None:
    """A model's greedy continuation is right, another one is not; nll follows the definition."""
    path = tiny_model("llama")
    with Model(str(path)) as model, model.context(parse_cache("f16", path), ContextOptions(64, n_threads=1)) as context:
        tokens = model.tokenize(b"the cat is on ")
        reader, greedy = run.Reader(context), []
        row = reader.read(tokens, len(tokens) - 1)[0]
        for _ in range(4):
            greedy.append(int(row.argmax()))
            row = reader.read(np.array(greedy[-1:], np.int32), 0)[0]
        good = run.score_answers(context, [run.Part(tokens, False), run.Part(np.array(greedy, np.int32), True)])
        greedy[2] = (greedy[2] + 1) % 256
        bad = run.score_answers(context, [run.Part(tokens, False), run.Part(np.array(greedy, np.int32), True)])
    assert good.right == [True] and bad.right == [False]
    assert good.nll is not None and bad.nll is not None and 0 < good.nll < bad.nll


def test_a_json_under_a_schema_is_the_same_under_the_same_cache(tiny_model: Models) -> None:
    path, schema = tiny_model("llama"), {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    sample = kinds.Sample(("Say a. ", '{"a": "x"}', "\nAgain: ", '{"a": "y"}'), schema)
    options = ContextOptions(128, n_threads=1)
    with Model(str(path)) as model, model.context(parse_cache("f16", path), options) as one:
        with (
            model.context(parse_cache("f16", path), options) as two,
            model.context(parse_cache("q4_0", path), options) as q4,
        ):
            base, same, other = run.score_calls(model, [one, two, q4], sample, schema)
        texts = [b"".join(map(model.piece, greedy)).decode() for greedy in base.predicted]
    assert same.predicted == base.predicted and same.right == base.right
    for text, answer, right in zip(texts, ("x", "y"), base.right, strict=True):
        assert json.loads(text)["a"] in ("x", "y") and right == (json.loads(text)["a"] == answer)
    for mine, its, right, base_right in zip(other.predicted, base.predicted, other.right, base.right, strict=True):
        assert right == (base_right and mine == its)


def test_scores_are_paired() -> None:
    base = [run.Outcome([True, True], [(1,), (2,)], 1.0), run.Outcome([True, False], [(1,), (2,)], 2.0)]
    other = [run.Outcome([True, False], [(1,), (3,)], 1.5), run.Outcome([False, False], [(4,), (2,)], 2.5)]
    found = run.scores(other, base)
    assert (found["samples"], found["answers"], found["right"], found["change"]) == (2, 4, 0.25, -0.5)
    assert found["change_stderr"] == 0 and found["right_stderr"] == 0.25
    assert found["same"] == 0.5 and found["nll_change"] == 0.5 and found["nll_change_stderr"] == 0


def test_the_program_compares_caches(coded_model: Models) -> None:
    arguments = ("-m", coded_model(), "--tasks", SMALL, "-c", N_CTX, "--samples", 2, "-t", 1)
    result = tasks(*arguments, "--compare", "f16,q8_0,subkv", "-o", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows[:3]] == ["f16", "q8_0", "subkv"]
    assert [row["task"] for row in rows[::3]] == SMALL.split(",")
    for row in rows:
        assert 0 <= row["right"] <= 1 and row["samples"] == 2 and row["length"] == N_CTX and row["nll"] > 0
    assert all(row["change"] == row["nll_change"] == 0 and row["same"] == 1 for row in rows[::3])
    lines = table(rows).splitlines()
    assert lines[0] == "| cache | tokens | bpe | " + SMALL.replace(",", " | ") + " | worst change |"
    assert len(lines) == 5 and lines[3].startswith("| q8_0 | 800 | 8.50 | ")


def test_the_harness_gets_the_same_answers(coded_model: Models, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install '.[eval]')")
    from lm_eval.tasks import TaskManager

    from research.lm_eval import SubkvLM

    arguments = ("-m", coded_model(), "--tasks", "induction:1", "-c", 200, "--samples", 2, "-t", 1)
    assert tasks(*arguments, "--lm-eval", tmp_path / "tasks").exit_code == 0
    (row,) = json.loads(tasks(*arguments, "--compare", "f16", "-o", "json").stdout)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    model = SubkvLM(model=str(coded_model()), cache="f16", n_ctx=256, threads=1)
    found = lm_eval.simple_evaluate(model, tasks=["subkv_induction_1_200"], task_manager=manager)["results"]
    assert found["subkv_induction_1_200"]["acc,none"] == pytest.approx(row["right"])


@each(
    ("arguments", "message"),
    [
        (("--tasks", "needl"), "unknown task 'needl'; expected one of needle, "),
        (("--tasks", "recall:x"), "recall: expected a number from 3 to 18; found 'x'"),
        (("--tasks", "count:1"), "count: expected a number from 2 to 99; found '1'"),
        (("-c", "9999999"), r"-c: expected 64 to .* tokens \(the trained context\), found 9999999"),
        (("-c", "64"), "-c: expected more tokens for the task needle:6, found 64"),
        (("--compare", "f16,q9"), "--compare: expected one of .*, found 'q9'"),
        (("--compare", "f16", "--lm-eval", "/dev/null/x"), "--lm-eval: cannot write /dev/null/x"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str, tiny_model: Models) -> None:
    result = tasks("-m", tiny_model("llama"), "-t", "1", *arguments)
    assert result.exit_code in (1, 2)
    assert re.search(message, result.output), result.output


def test_chance_is_only_of_the_seed() -> None:
    random.seed(1)
    first = kinds.parse("needle").sample(0, 500, len)
    random.seed(2)
    assert kinds.parse("needle").sample(0, 500, len) == first


def test_a_text_longer_than_a_task_has_names_for_is_refused() -> None:
    with pytest.raises(SubkvError, match="larger number behind the task: 9000 names exist"):
        kinds.parse("tools:4").sample(0, 10**9, lambda text: 0)
