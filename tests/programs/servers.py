"""llama-server of this build in a new process on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from program_paths import program

START = 60  # seconds
ANSWER = 300
CODED, ORDINARY = "subkv: coded K/V cache", "subkv: ordinary"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


def assert_same(one: Any, other: Any, tie: float = 0.02) -> None:
    """Two answers are equal up to the first token where `one` has two nearly equal probabilities; both need n_probs=2.

    Other sequences in a batch and between the cells of a unified cache change the order of sums, with f16 just as much.
    Probabilities are compared if `other` has them (a drafted token has none).
    """
    others = other.get("completion_probabilities", [])
    for i, (step, token) in enumerate(zip(one["completion_probabilities"], other["tokens"], strict=True)):
        if step["id"] != token:
            first, second = (top["logprob"] for top in step["top_logprobs"])
            assert first - second < tie, (one["tokens"], other["tokens"], step["top_logprobs"])
            return
        if others:
            assert abs(step["logprob"] - others[i]["logprob"]) < tie, (i, step, others[i])


def wait_until(goal: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + START
    while not condition():
        assert time.monotonic() < end, f"waited for: {goal}"
        time.sleep(0.05)


class Server:
    """Process, port and log of one server. `ended`: stop() or kill() was called."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.ended = False
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON or text of an answer. Raises Refused for any status but 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text
        if response.status != 200:
            raise Refused(response.status, answer)
        return answer

    def complete(self, prompt: str | list[int], n: int = 16, **more: Any) -> Any:
        """A greedy completion of exactly n tokens."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True, **more}
        return self.request("POST", "/completion", body)

    def together(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Completions that are requested at the same time."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.request("POST", "/tokenize", {"content": text})["tokens"]
        return ids

    def wait(self, goal: str, path: str, condition: Any) -> Any:
        """The answer of `path` once `condition(answer)` is true."""
        answer: Any = None

        def is_met() -> bool:
            nonlocal answer
            answer = self.request("GET", path)
            return bool(condition(answer))

        wait_until(goal, is_met)
        return answer

    def stop(self) -> None:
        """Send SIGTERM; the exit code must be 0."""
        assert self.process.poll() is None, self.log[-3000:]
        self.ended = True
        self.process.terminate()
        assert self.process.wait(START) == 0, self.log[-3000:]

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process.poll() is None, self.log[-3000:]
        self.ended = True
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(
    model: Path | None, *arguments: Any, subkv: str, folder: Path, by: Sequence[Any] = (), **more: str
) -> Iterator[Server]:
    """A server with these arguments. subkv: the variable SUBKV; more: other variables; by: the command that starts it,
    default: that of this build. It must exit with 0."""
    port = free_port()
    log = folder / f"server-{port}.log"
    options = ["-m", model] if model else []
    command = [
        *(by or [program("llama-server")]),
        *options,
        "--port",
        port,
        "-t",
        1,
        "-tb",
        1,
        "--no-ui",
        "--offline",
        *arguments,
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "SUBKV"))}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=out, env={**env, "SUBKV": subkv, **more}
        )
    server = Server(process, port, log)
    try:
        end = time.monotonic() + START
        while True:
            assert process.poll() is None, server.log[-3000:]
            if "listening on http" in server.log:  # the port may belong to another program
                with contextlib.suppress(OSError, Refused):
                    server.request("GET", "/health")
                    break
            assert time.monotonic() < end, server.log[-3000:]
            time.sleep(0.02)
        yield server
        if not server.ended:
            server.stop()
    finally:
        process.kill()
        process.wait()
