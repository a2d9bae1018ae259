"""--warm-start in the chat: marks, exact continuations, and nothing without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starting import PLAN, cold, opened, untrained, warm

from research.warmstart.chat import main as chat
from research.warmstart.start import WarmStart
from runtime.chat.conversation import Conversation, Sampling, Turn
from subkv.engine.cache import choose_cache

Models = Callable[..., Path]
Program = Callable[..., Any]
FIRST, SECOND = "Hello there, how are you my friend?", "Good day, what do you think of the sea?"


@pytest.fixture(scope="module", params=["coded", "f16"])
def model(request: pytest.FixtureRequest, coded_model: Models, tiny_model: Models) -> Path:
    return coded_model() if request.param == "coded" else tiny_model("llama")


@pytest.fixture
def warm_file(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "warm.safetensors"
    with opened(model) as (llm, planting):
        untrained(llm, planting).save(path)
    return path


def run(model: Path, *arguments: Any) -> Result:
    common = [
        "-m",
        model,
        "-ctk",
        choose_cache(model, derive=False).name,
        "-c",
        "512",
        "-n",
        "8",
        "--temp",
        "0",
        "-t",
        "1",
        "-st",
    ]
    return CliRunner().invoke(chat, [str(word) for word in [*common, *arguments]])


def test_chat_marks_warm_answers(model: Path, warm_file: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "library"
    flags = ["--warm-start", "on", "--warm-file", warm_file, "--warm-library", shelf, "--warm-threshold", "-1"]
    plain = run(model, "-p", FIRST)
    assert "warm" not in plain.stderr
    first = run(model, *flags, "-p", FIRST)
    assert first.stdout == plain.stdout
    assert "warm start (experimental): 0 prompts in" in first.stderr
    assert "warm start: cold; library: expected summaries of earlier prompts, found none yet" in first.stderr
    assert "| warm start:" not in first.stderr
    assert len(list(shelf.iterdir())) == 1
    second = run(model, *flags, "-p", SECOND)
    assert second.exit_code == 0
    assert " similar, first token ]" in second.stderr
    assert len(list(shelf.iterdir())) == 2
    high = run(model, *flags, "--warm-threshold", "0.9999", "-p", "Something else, if you please.")
    assert "warm start: cold; similarity: expected at least 0.9999, found " in high.stderr


def talk(start: WarmStart) -> Conversation:
    return Conversation(start.llm, None, Sampling(temp=0.0, seed=1), first_tokens=start)


def ask(
    conversation: Conversation, text: str, n: int = 6, stop: Callable[[], bool] = lambda: False
) -> tuple[str, Turn]:
    turn = Turn()
    return "".join(conversation.ask(text, n, stop, turn)), turn


def test_conversations_go_on_exactly(model: Path, tmp_path: Path) -> None:
    with warm(model, tmp_path, n_ctx=512) as start:
        ask(talk(start), FIRST)
        conversation = talk(start)
        _, turn = ask(conversation, SECOND)
        assert turn.first_tokens is start and start.decision.error is None
        assert (turn.n_first_tokens, turn.n_prompt) == (1, PLAN.shortest)
        begin = conversation.answer_start
        tokens = conversation.tokens[:]
        assert start.llm.input_ids[: start.llm.n_tokens].tolist() == tokens[: start.llm.n_tokens]
        _, later = ask(conversation, "Go on.")
        assert later.first_tokens is None  # earlier turns are in the cells
        conversation.save(tmp_path / "saved")
        assert cold(start.llm, tokens[: begin + 1], len(tokens) - begin - 1) == tokens[begin + 1 :]
        conversation.load(tmp_path / "saved")
        # stopped after the first token, while the prompt is evaluated: the answer is kept, warm rows are not
        other = talk(start)
        calls = iter(range(9))
        _, stopped = ask(other, "Why is the sky blue at noon, and red later?", stop=lambda: next(calls) >= 1)
        assert (stopped.stopped, stopped.n_answer, start.llm.n_tokens) == ("interrupt", 1, 0)
        ask(other, "Go on.")
        held = start.llm.n_tokens
        assert start.llm.input_ids[:held].tolist() == other.tokens[:held]


def test_flags_that_do_not_fit(model: Path, warm_file: Path, tiny_model: Models, tmp_path: Path) -> None:
    alone = run(model, "--warm-start", "auto", "-p", FIRST)
    assert (alone.exit_code, "--warm-start: expected --warm-file and --warm-library beside it" in alone.stderr) == (
        2,
        True,
    )
    flags = ["--warm-start", "on", "--warm-library", tmp_path / "library", "-p", FIRST]
    other = run(tiny_model("llama", seed=1), *flags, "--warm-file", warm_file)
    assert other.exit_code == 1
    assert "--warm-file: expected a file trained for this model" in other.stderr
    (tmp_path / "file").write_text("no folder")
    bad = run(model, "--warm-start", "on", "--warm-file", warm_file, "--warm-library", tmp_path / "file", "-p", FIRST)
    assert (bad.exit_code, bad.stderr.splitlines()[-1].startswith("--warm-library: expected a folder")) == (1, True)
