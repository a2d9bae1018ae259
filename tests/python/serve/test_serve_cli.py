"""The program: flags, faults at the start, the end by signals; the demo model; embeddings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from serving import running, waited

from runtime.serve.cli import main
from runtime.serve.server import LAST_SECONDS

REPO = Path(__file__).resolve().parents[3]
CHAT = {"messages": [{"role": "user", "content": "Say something."}], "temperature": 0}


# the program, where a token costs a second to evaluate, and nothing to restore
DEAR = """
from runtime.serve import cli, prefixes
prefixes.Pace.took = lambda pace, _, n: setattr(pace, "seconds", 1.0 if n < 4096 else 0.0)  # tokens, bytes
cli.main()
"""


@contextlib.contextmanager
def started(
    *arguments: Any, program: tuple[str, str] = ("-m", "runtime.serve")
) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """A server process on a free port: its address, the process, its lines on stderr so far."""
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *program, "--port", "0", "-t", "1", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"},
    )
    assert process.stderr
    lines: list[str] = []
    address = ""
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                address = found[1]
                break
        assert address, "".join(lines)
        rest = threading.Thread(target=lambda: lines.extend(process.stderr or []))
        rest.start()
        yield address, process, lines
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


def quietly(url: str, body: dict[str, Any]) -> None:
    """A request whose answer may be cut off."""
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url, json=body, timeout=60)


def test_a_signal_ends_it_with_streams_under_way(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama", n_ctx_train=32768)
    with started("-m", model, "-np", 1, "-c", 32768) as (address, process, lines):
        body = CHAT | {"stream": True}
        waiting = [threading.Thread(target=quietly, args=(f"{address}/v1/chat/completions", body)) for _ in range(5)]
        for thread in waiting:
            thread.start()
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as stream:
            pieces = stream.iter_text()
            next(pieces)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                for _ in pieces:
                    pass
        assert process.wait(30) == 0
        for thread in waiting:
            thread.join()
        assert "Traceback" not in "".join(lines)


def test_a_signal_lets_answers_finish(tiny_model: Callable[..., Path]) -> None:
    """Those under way are whole, nobody else is let in, and the process ends with code 0."""
    model = tiny_model("llama", n_ctx_train=32768)
    with started("-m", model, "-np", 1, "-c", 4096) as (address, process, _):
        body = {"prompt": "on", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            found = [next(lines)]
            process.send_signal(signal.SIGTERM)
            found += [line for line in lines if line]
        assert found[-1] == "data: [DONE]"
        last = json.loads(found[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] in ("length", "stop") and "error" not in "".join(found)
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


def test_killed_and_started_again(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9: what was idle is on the disk, whole, and the next server goes on from it."""
    folder, body = tmp_path / "kept", {"prompt": "It was a dark night; " * 20, "max_tokens": 8, "temperature": 0}
    kind = ("-m", coded_model(), "-np", 1, "-c", 1024, "--cache-disk", folder)
    answers = []
    for _ in range(2):
        with started(*kind, program=("-c", DEAR)) as (address, process, lines):
            answers.append(httpx.post(f"{address}/v1/completions", json=body, timeout=60).json())
            assert waited(lambda: bool(list(folder.glob("*.prompt"))))
            process.kill()
            assert process.wait(30) == -signal.SIGKILL
            assert "Traceback" not in "".join(lines)
    first, second = answers
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, first["usage"]["prompt_tokens"] - 1]


def test_flags_reach_the_server(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nfrom-a-file\n", "utf-8")
    flags = ("--api-key", "one,two", "--api-key-file", keys, "-a", "alias", "-np", 2, "-c", 512, "-n", 5)
    with started("-m", coded_model(), *flags, "--slot-save-path", tmp_path) as (address, process, lines):
        assert any("KV cache: subkv" in line for line in lines)
        assert "2 slots of 256 tokens" in lines[-1]
        for key in ("one", "two", "from-a-file"):
            with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
                assert client.models.list().data[0].id == "alias"
                answer = client.chat.completions.create(model="x", **CHAT)
                assert answer.usage and answer.usage.completion_tokens == 5
        metrics = httpx.get(f"{address}/metrics", headers={"X-Api-Key": "one"}).text
        assert "llamacpp:tokens_predicted_total 15.0" in metrics
        sizes = {m[1]: float(m[2]) for m in re.finditer(r"^(subkv:\w+) (\S+)$", metrics, re.M)}
        assert sizes["subkv:kv_bytes"] > 0 and 0 < sizes["subkv:kv_bits_per_element"] < 16
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_faults_at_the_start(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases: list[tuple[list[Any], int, str]] = [
            (["-m", model, "--port", port], 1, f"--port: expected a free port, found {port} in use"),
            (["-m", tmp_path / "none.gguf", "--port", 0], 1, "-m: expected a GGUF file, found no file"),
            (["-m", model, "--port", 0, "--bases", model], 1, "--bases"),
            (["-m", model, "--port", 0, "--slot-save-path", tmp_path / "no"], 1, "--slot-save-path"),
            (["-m", model, "--port", 0, "--api-key-file", tmp_path / "no"], 1, "--api-key-file"),
            (["-m", model, "--port", 0, "-b", 1], 2, "-b: expected at least one token for each of 4 slots"),
            (["-m", model, "--port", 99999], 2, "--port"),
        ]
        for arguments, code, sentence in cases:
            done = CliRunner().invoke(main, list(map(str, arguments)))
            assert done.exit_code == code, done.output
            assert sentence in done.output and isinstance(done.exception, SystemExit)


def test_embeddings(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    with running(model, n_slots=1, n_ctx=256, embeddings=True, pooling_type=1, kv_cache="f16") as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            found = [item.embedding for item in client.embeddings.create(model="x", input=["one", "two", "one"]).data]
            listed = client.embeddings.create(model="x", input="one", encoding_format="float")
            with pytest.raises(openai.BadRequestError, match="input: expected texts of 1 to 256 tokens"):
                client.embeddings.create(model="x", input=["fine", "word " * 1000])
            with pytest.raises(openai.APIStatusError, match="--embeddings"):
                client.chat.completions.create(model="x", **CHAT)
        assert found[0] == pytest.approx(found[2], abs=1e-5) != pytest.approx(found[1], abs=1e-2)
        assert listed.data[0].embedding == pytest.approx(found[0], abs=1e-4)
        assert sum(x * x for x in found[0]) == pytest.approx(1, abs=1e-4)
        assert listed.usage.prompt_tokens > 0
    with running(model, n_slots=1, n_ctx=256, embeddings=True, kv_cache="f16") as served:
        answer = served.client.post("/v1/embeddings", json={"input": "x"})
        assert answer.status_code == 400 and "--pooling" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_demo_model_answers_as_the_class_does(demo_model: Path) -> None:
    from subkv.engine.llama import Llama

    bodies = [
        {"prompt": f"The capital of {country} is", "temperature": 0, "max_tokens": 3} for country in ("France", "Spain")
    ]
    with Llama(demo_model, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False) as llm:
        expected = [llm.create_completion(**body)["choices"][0] for body in bodies]
    assert "Paris" in expected[0]["text"]
    with running(demo_model, n_slots=2, n_ctx=512) as served:

        def ask(body: dict[str, Any]) -> Any:
            return served.client.post("/v1/completions", json=body).json()["choices"][0]

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(ask, bodies))
    assert found == expected


def test_flags_of_the_examples() -> None:
    """The recipe and the unit are not run here: what they call is there."""
    folder = REPO / "examples" / "server"
    recipe = (folder / "Containerfile").read_text("utf-8")
    words = json.loads(next(line for line in recipe.splitlines() if line.startswith("ENTRYPOINT")).partition(" ")[2])
    install = re.search(r"CMAKE_ARGS=(\S+) \S*pip install .*'\S+\[server\]'", recipe)
    documented = re.search(r"CMAKE_ARGS=(\S+) pip install '\.\[demo,server\]'", (REPO / "README.md").read_text("utf-8"))
    assert install and documented and install[1] == documented[1]
    unit = (folder / "subkv.service").read_text("utf-8")
    stop = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])  # type: ignore[index]
    assert stop > LAST_SECONDS and f"--stop-timeout {stop}" in recipe
    known = {flag for option in main.params for flag in (*option.opts, *option.secondary_opts)}
    for called in (words, re.search(r"ExecStart=(.*)", unit)[1].split()):  # type: ignore[index]
        assert [Path(called[0]).name, called[1]] == ["subkv", "serve"]
        assert {word for word in called if word.startswith("-")} <= known
