"""--warm-start in chat and server: marks, exact continuations, and nothing without it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from serving import Served, running
from starting import PLAN, cold, library, opened, prompt, untrained, warm

from runtime.chat.conversation import Conversation, Sampling, Turn
from runtime.chat.program import main as chat
from runtime.serve.cli import main as serve
from runtime.serve.completion import Logprobs
from runtime.warmstart.planting import Planting
from runtime.warmstart.start import WarmStart

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
    common = ["-m", model, "-c", "512", "-n", "8", "--temp", "0", "-t", "1", "-st"]
    return CliRunner().invoke(chat, [str(word) for word in [*common, *arguments]])


def test_chat_marks_what_began_warm(model: Path, warm_file: Path, tmp_path: Path) -> None:
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
    return Conversation(start.llm, None, Sampling(temp=0.0), seed=1, warm=start)


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
        assert turn.warm is not None and turn.warm.warm
        assert (turn.n_warm, turn.n_prompt) == (1, PLAN.shortest)
        begin = conversation.answer_start
        tokens = conversation.tokens[:]
        assert start.llm.input_ids[: start.llm.n_tokens].tolist() == tokens[: start.llm.n_tokens]
        _, later = ask(conversation, "Go on.")
        assert later.warm is None  # earlier turns are in the cells
        conversation.save(tmp_path / "saved")
        assert cold(start.llm, tokens[: begin + 1], len(tokens) - begin - 1) == tokens[begin + 1 :]
        conversation.load(tmp_path / "saved")
        # stopped while the prompt is read behind the first token: what was said is kept, and nothing warm is
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
    embedding = CliRunner().invoke(serve, ["-m", str(model), "--embeddings", "--warm-start", "on"])
    assert embedding.exit_code == 2
    assert "--warm-start: expected a server that generates text" in embedding.stderr


#
# server
#


@contextlib.contextmanager
def serving(model: Path, folder: Path) -> Iterator[Served]:
    """Two slots, warm starts of any prompt that has a neighbour."""
    planting = Planting()

    def begin(llm: Any) -> WarmStart:
        planting.bind(llm.ctx, llm._batch.batch, llm.cache_choice.coded)
        trained = untrained(llm, planting)
        return WarmStart(llm, planting, trained, library(trained, folder), threshold=-1.0)

    try:
        with running(model, n_slots=2, n_ctx=1024, attach=planting.attach, begin=begin) as served:
            yield served
    finally:
        planting.close()


def complete(served: Served, tokens: list[int], n: int = 12, **more: Any) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": n, "temperature": 0, "logprobs": 1} | more
    answer = served.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def words(answer: dict[str, Any]) -> list[str]:
    found: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return found


def test_requests_begin_warm_and_go_on_exactly(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as served:
        first = complete(served, prompt(80))
        assert first["subkv"]["warm_start"] == {
            "warm": False,
            "reason": "library: expected summaries of earlier prompts, found none yet",
            "seconds": first["subkv"]["warm_start"]["seconds"],
        }
        assert served.idle() and len(list(tmp_path.iterdir())) == 1
        texts = [prompt(90 + i, 3 + i) for i in range(6)]
        gate = threading.Barrier(2)

        def both(tokens: list[int]) -> dict[str, Any]:
            gate.wait(20)
            return complete(served, tokens)

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(both, texts))
        for answer in answers:
            mark = answer["subkv"]["warm_start"]
            assert mark["warm"] and mark["n_first"] == 1
            assert answer["timings"]["cache_n"] == 0
        metrics = served.client.get("/metrics").text
        assert 'subkv:requests_began_total{how="warm"} 6.0' in metrics
        assert 'subkv:requests_began_total{how="library"} 1.0' in metrics
        again = complete(served, texts[-1])["subkv"]["warm_start"]
        assert again["reason"].startswith("prefix: ")
        with served.client.stream(
            "POST", "/v1/completions", json={"prompt": prompt(70, 9), "max_tokens": 3, "stream": True}
        ) as stream:
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        assert [chunk["subkv"]["warm_start"]["warm"] for chunk in chunks if "subkv" in chunk] == [True]
        one = complete(served, prompt(75, 11), n=1)
        assert one["subkv"]["warm_start"]["warm"]
        assert served.idle()
        slots = served.client.get("/slots").json()
        assert 0 in [slot["n_tokens"] for slot in slots]  # warm cells are not kept
    with running(model, n_slots=2, n_ctx=1024) as plain:
        assert "subkv" not in complete(plain, prompt(80))
        assert words(complete(plain, prompt(80))) == words(first)
        assert "requests_began" not in plain.client.get("/metrics").text
        llm = plain.service.llm
        names = Logprobs(llm, 0)
        for tokens, answer in zip(texts, answers, strict=True):
            said = words(answer)
            token = next(t for t in range(llm.n_vocab()) if names._text(t) == said[0])
            exact = complete(plain, [*tokens, token], n=len(said) - 1)
            assert words(exact) == said[1:]


def test_a_cancelled_request_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as served:
        complete(served, prompt(80))
        with served.client.stream(
            "POST", "/v1/completions", json={"prompt": prompt(85, 2), "max_tokens": 300, "stream": True}
        ) as stream:
            next(stream.iter_lines())
        assert served.idle()
        answer = complete(served, prompt(60, 4))
        assert answer["subkv"]["warm_start"]["warm"]
        scored = complete(served, prompt(60, 5), echo=True)
        assert "subkv" not in scored  # the prompt's own probabilities need exact cells


def test_a_fault_of_one_request_is_not_that_of_others(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, tmp_path) as served:
        long = {"prompt": prompt(80), "max_tokens": 200, "temperature": 0, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            monkeypatch.setattr(served.service.engine.warm.embedder, "embed", lambda _: {}["no embedding"])
            other = served.client.post("/v1/completions", json={"prompt": prompt(60, 4), "max_tokens": 4})
            assert other.status_code == 500
            monkeypatch.undo()
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert all("choices" in chunk for chunk in rest)
        assert rest[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        assert served.idle()
        assert complete(served, prompt(60, 4))["subkv"]["warm_start"]["warm"]
