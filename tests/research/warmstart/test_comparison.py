"""The evaluation end to end on a tiny model: its files, and systems with known results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from starting import trained_without
from test_prompts import text

from research.warmstart import comparison, predictor, prompts, report
from research.warmstart import divergences as metrics
from research.warmstart.cli import main
from research.warmstart.contexts import attention, capturing, cold_context, warm_context
from research.warmstart.embedding import input_mean
from research.warmstart.frame import Frame
from research.warmstart.pooled import Plan, summarise
from research.warmstart.trained import Trained
from subkv.engine.cache import choose_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest
from subkv.native.bases import model_content

NOISE = 1e-4  # nats between two ways to the same tiny model's distribution, f16 cache
N_SINK, N_LAST = 2, 3


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A text, prompts of it, and trained files of 4 and of 8 slots that were not trained."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "text").write_text(text(), encoding="utf-8")
    arguments = ["-m", str(model), "-f", str(folder / "text"), "-o", str(folder / "prompts.jsonl")]
    run(["prompts", *arguments, "--words", "30", "-n", "7", "--test-share", "0.4"])
    found = prompts.read(folder / "prompts.jsonl")
    embed = input_mean(model)
    with Model(str(model)) as opened:
        tokens = [opened.tokenize_chat(prompt.text) for prompt in found]
        centre = np.mean([embed(own) for own in tokens], axis=0)
        with capturing(opened, len(tokens[0])) as context:
            shapes = context.capture(tokens[0]).shapes
        for m in (4, 8):
            plan = Plan(m, N_SINK, N_LAST)
            trained = trained_without(model_content(opened.path), plan, shapes, Frame.of(model), centre)
            trained.save(folder / f"warm{m}")
    return {name: folder / name for name in ("text", "prompts.jsonl", "warm4", "warm8")}


def run(arguments: list[str], code: int = 0) -> str:
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_one_slot_per_token_equals_the_cold_start(model: Path, files: dict[str, Path]) -> None:
    """With one slot per token of the same prompt, logits, answers and attention outputs equal a cold start's."""
    prompt = prompts.read(files["prompts.jsonl"])[0]
    choice, options = choose_cache(model, CacheRequest("f16")), ContextOptions(96, n_threads=1)
    with Model(str(model)) as opened:
        tokens = opened.tokenize_chat(prompt.text)[:60]
        plan = Plan(60 - N_SINK - N_LAST, N_SINK, N_LAST)
        with capturing(opened, 60) as context:
            rows = context.capture(tokens, 1)
        own = summarise(rows.k, rows.v, plan, Frame.of(model))
        trained = trained_without("0" * 64, plan, rows.shapes, Frame.of(model), np.zeros(1, np.float32))
        placed = trained.place(trained.slots(own, False), 60)
        with cold_context(opened, choice, options) as cold, warm_context(opened, choice, options) as warm:
            exact, found = cold.decode(tokens), warm.decode(tokens, plan, placed)
            assert metrics.divergence(found.log_p, exact.log_p) < NOISE
            answer = exact.greedy(6)
            assert found.greedy(6) == answer
            assert np.allclose(found.nll(answer), exact.nll(answer), atol=1e-2)
            again = cold.again(tokens)
            assert metrics.divergence(again.log_p, exact.log_p) < NOISE
            ends = warm.decode(tokens, plan, [])
            assert metrics.divergence(ends.log_p, exact.log_p) > 100 * NOISE
            outputs = warm.attention(tokens, plan, placed)
            parts = zip(rows.q, rows.k, rows.v, rows.scale, strict=True)
            for output, (q, k, v, scale) in zip(outputs, parts, strict=True):
                assert metrics.cosine(output, attention(q, k, v, scale)) > 0.999


@pytest.fixture(scope="module")
def evaluated(model: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("evaluated") / "report"
    warm = [part for m in (4, 8) for part in ("--warm-file", str(files[f"warm{m}"]))]
    fit = ["guard", "-m", str(model), *warm[:2], "-f", str(files["prompts.jsonl"]), "-t", "1"]
    before = files["warm4"].read_bytes()
    assert run([*fit, "--targets", "1"], code=1) == "guard: expected 8 pairs or more, found 2 and 2\n"
    assert files["warm4"].read_bytes() == before
    assert "margin" in run(fit)
    output = run(
        [
            "evaluate",
            "-m",
            str(model),
            *warm,
            "-f",
            str(files["prompts.jsonl"]),
            "-t",
            "1",
            "-r",
            "1",
            "-o",
            str(folder),
        ]
    )
    return output, folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_outcomes(evaluated: tuple[str, Path], model: Path, files: dict[str, Path]) -> None:
    found = lines(evaluated[1])
    assert found[0]["what"] == "settings"
    outcomes = [line for line in found if line["what"] == "outcome"]
    known = {prompt.id: prompt for prompt in prompts.read(files["prompts.jsonl"])}
    targets = {p.id for p in known.values() if p.split == "test" and p.neighbours}
    assert {line["target"] for line in outcomes} == targets
    for m in (4, 8):
        for target in targets:
            own = [line for line in outcomes if line["target"] == target and line["n_slots"] == m]
            assert {line["system"] for line in own} == set(metrics.SYSTEMS)
            pairs = sum(len(names) for names in known[target].neighbours.values()) + 2  # two of the library's
            for system in (metrics.METHOD, metrics.UNPROJECTED, metrics.NEIGHBOUR):
                assert sum(line["system"] == system for line in own) == pairs
    cold = [line for line in outcomes if line["system"] == metrics.COLD]
    assert all(line["kl"] == 0.0 and line["same_top"] and line["nll"] == line["nll_cold"] for line in cold)
    assert all(line["kl"] < NOISE for line in outcomes if line["system"] == metrics.EXACT)
    # nothing is trained: the projector is the identity
    by_key = {(o["n_slots"], o["target"], o["kind"], o["neighbour"], o["system"]): o["kl"] for o in outcomes}
    for (m, target, kind, name, system), kl in by_key.items():
        if system == metrics.METHOD:
            assert kl == pytest.approx(by_key[m, target, kind, name, metrics.UNPROJECTED], rel=1e-6)
    retrieved = [line for line in outcomes if line["kind"] == metrics.RETRIEVED]
    for line in retrieved:
        given = [o["similarity"] for o in outcomes if o["target"] == line["target"] and o["similarity"] is not None]
        assert line["similarity"] == max(given)
    assert all(line["neighbour"] != line["target"] for line in outcomes)
    others = [line for line in outcomes if line["kind"] == metrics.UNRELATED]
    assert all(known[line["neighbour"]].group != known[line["target"]].group for line in others)
    checked = [line for line in outcomes if line["self_check"] is not None]
    assert {(line["system"], line["kind"]) for line in checked} == {(metrics.METHOD, kind) for kind in metrics.FOUND}
    with Model(model) as opened:
        coefficients = Trained.load(files["warm4"], opened).guard
    for line in checked:  # the guard of 8 slots was not fitted
        expected = (
            predictor.predict(coefficients, line["similarity"], line["self_check"]) if line["n_slots"] == 4 else None
        )
        assert line["predicted_kl"] == expected


def test_files_of_the_report(evaluated: tuple[str, Path]) -> None:
    output, folder = evaluated
    times = [line for line in lines(folder) if line["what"] == "latency"]
    assert times and all(set(line["steps"]) == {"embed", "retrieve", "project", "decode"} for line in times)
    assert all(0 < sum(line["steps"].values()) <= 1.5 * line["warm"] for line in times)
    text_of = (folder / "report.md").read_text(encoding="utf-8")
    for needle in ("# Warm start: evaluation", "## Criteria", "## f16, m = 4", "## f16, m = 8", metrics.METHOD):
        assert needle in text_of
    assert text_of.count("No guard is fitted") == text_of.count("| predicted KL at most |") == 1
    criteria = [line for line in output.splitlines() if line.startswith("  ") and ": " in line]
    assert all(any(f": {answer} (" in line for answer in ("met", "not met", "not measured"))
               for line in criteria if "comparison" not in line)  # fmt: skip
    assert output.count("f16, m = ") == 2


def test_coded_cache(coded_model: Callable[..., Path], files: dict[str, Path], tmp_path: Path) -> None:
    """The converted copy of the model, with the same weights, in its coded cache."""
    arguments = ["-m", str(coded_model()), "--warm-file", str(files["warm4"]), "-f", str(files["prompts.jsonl"])]
    run(["evaluate", *arguments, "-ctk", "subkv", "--targets", "1", "-t", "1", "-r", "0", "-o", str(tmp_path)])
    outcomes = [line for line in lines(tmp_path) if line["what"] == "outcome"]
    assert {line["cache"] for line in outcomes} == {"subkv"}
    assert {line["system"] for line in outcomes} == set(metrics.SYSTEMS)
    assert all(line["kl"] < 1e-3 for line in outcomes if line["system"] in (metrics.COLD, metrics.EXACT))
    assert not any(line["cosines"] for line in outcomes)
    assert "Not measured." in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_build_and_list(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["-m", str(model), "--warm-file", str(files["warm4"]), "--warm-library", str(tmp_path / "library")]
    n = len(prompts.read(files["prompts.jsonl"]))
    assert f"{n} prompts, 0 were there" in run(["build", *arguments, "-f", str(files["prompts.jsonl"])])
    assert f"0 prompts, {n} were there" in run(["build", *arguments, "-f", str(files["prompts.jsonl"])])
    listed = run(["list", *arguments]).splitlines()
    assert len(listed) == n and all("tokens  …" in line for line in listed)


def test_bad_input(model: Path, files: dict[str, Path], tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    common = ["-m", str(model), "-f", str(files["prompts.jsonl"]), "-o", str(tmp_path / "out")]
    warm = ["--warm-file", str(files["warm4"])]
    for arguments, needle in (
        ([*common, "--warm-file", str(tmp_path / "none")], "--warm-file: expected a file of"),
        ([*common, *warm, *warm], "--warm-file: expected files of different numbers of slots, found [4, 4]"),
        ([*common[:2], "-f", str(files["text"]), *common[4:], *warm], "-f: expected a JSON object in line 1"),
        (["-m", str(tiny_model("llama", seed=4)), *common[2:], *warm], "--warm-file: expected a file trained for this"),
        ([*common, *warm, "-ctk", "q9"], "-ctk: expected one of"),
    ):
        output = run(["evaluate", *arguments], code=1)
        assert output.startswith(needle) and len(output.splitlines()) == 1, output
    (tmp_path / "train.jsonl").write_text('{"id": "a", "group": "a", "kind": "base", "text": "x", "split": "train"}\n')
    output = run(["evaluate", *common[:2], "-f", str(tmp_path / "train.jsonl"), *common[4:], *warm], code=1)
    assert output == "-f: expected prompts to test on, with neighbours, found none\n"
    pair = ({"id": "a", "text": text()[:300], "neighbours": {"random": ["b"]}}, {"id": "b", "text": "x"})
    lines = [json.dumps({"group": "g", "kind": "base", **prompt}) for prompt in pair]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    output = run(["evaluate", *common[:2], "-f", str(tmp_path / "short.jsonl"), *common[4:], *warm], code=1)
    assert re.fullmatch(r"-f: expected prompts of 9 to \d+ tokens, neighbours included, found 1 such\n", output)


def test_the_model_is_not_overwritten(model: Path, files: dict[str, Path]) -> None:
    before = model.stat()
    output = run(["prompts", "-m", str(model), "-f", str(files["text"]), "-o", str(model)], code=1)
    assert output == f"-o: expected another file than -m, found {model}\n"
    assert model.stat() == before


def test_right() -> None:
    assert comparison.right("The year is 1984.", "1984") and not comparison.right("The year is 1985.", "1984")
    assert comparison.right("No, yes", "no") and not comparison.right("No, yes", "yes")
    assert not comparison.right("", "no")


def test_report_without_anything() -> None:
    text_of = report.markdown({"a": 1}, [], [], [])
    assert "## Criteria" in text_of
