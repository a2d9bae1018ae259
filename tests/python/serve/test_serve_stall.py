"""An engine that makes no progress: /health says so, callers hear of it, and a signal ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
from serving import Served, running

TEXT = "/v1/completions"
STUCK = """
import ctypes, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from runtime.serve import batching, server

def sleep(*_):
    ctypes.CDLL(None).sleep(1000)

server.LAST_SECONDS = 2
batching.decode_batch = sleep
from runtime.serve.cli import main
main(["-m", {model!r}, "--port", "0", "-np", "1", "-c", "256", "-t", "1"])
"""
ORDERLY = """
import faulthandler, sys
sys.path[:0] = {paths!r}
from runtime.serve import batching

told = []
faulthandler.dump_traceback_later = lambda *_, **__: told.append("armed")
faulthandler.cancel_dump_traceback_later = lambda: told.append("cancelled")
close = batching.Engine.close
batching.Engine.close = lambda engine: (close(engine), told.append("closed"))
from runtime.serve.cli import main
try:
    main(["-m", {model!r}, "--port", "0", "-np", "1", "-c", "256", "-t", "1"])
finally:
    sys.exit(0 if told[0] == "armed" and told[-2:] == ["closed", "cancelled"] else str(told))
"""


def address_of(stderr: IO[str]) -> str:
    line = ""
    while "listening on " not in line:
        line = stderr.readline()
        assert line, "it did not start"
    return line.split("listening on ")[1].strip()


@contextlib.contextmanager
def started(script: str, model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A script that serves the model, in a process of its own, and its address; killed at the end."""
    here = Path(__file__).resolve()
    script = script.format(paths=[str(here.parents[3]), str(here.parent)], model=str(model))
    with subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUTF8": "1"}
    ) as process:
        try:
            assert process.stderr
            yield process, address_of(process.stderr)
        finally:
            process.kill()


def health(served: Served, status: int) -> dict[str, str]:
    end = time.monotonic() + 30
    while (answer := served.client.get("/health")).status_code != status:
        assert time.monotonic() < end
        time.sleep(0.05)
    found: dict[str, str] = answer.json()
    return found


def test_a_step_that_does_not_end(tiny_model: Callable[..., Path]) -> None:
    with running(tiny_model("llama"), n_slots=1, n_ctx=256, limits={"stall_timeout": 0.5}) as served:
        engine = served.service.engine
        go_on = threading.Event()
        answers = []

        def ask() -> None:
            answers.append(served.client.post(TEXT, json={"prompt": "x", "max_tokens": 4}))

        try:
            job = engine.call(lambda: go_on.wait(60))
            thread = threading.Thread(target=ask)
            thread.start()
            error = health(served, 503)["error"]
            assert "no progress" in error["message"] and "--stall-timeout" in error["message"]
            thread.join(30)
            assert answers[0].status_code == 503 and "no progress" in answers[0].json()["error"]["message"]
            assert served.client.post(TEXT, json={"prompt": "x"}).status_code == 503  # nor does anybody else wait
            assert "no progress" in str(job.exception(30))
        finally:
            go_on.set()
        assert health(served, 200) == {"status": "ok"}
        assert served.client.post(TEXT, json={"prompt": "x", "max_tokens": 4}).status_code == 200
        assert served.idle()


def test_an_engine_that_ended_is_no_health(tiny_model: Callable[..., Path]) -> None:
    with running(tiny_model("llama"), n_slots=1, n_ctx=256) as served:
        served.service.engine.stop()
        assert "ended" in health(served, 503)["error"]["message"]


def test_a_signal_ends_a_process_whose_engine_is_stuck(tiny_model: Callable[..., Path]) -> None:
    with started(STUCK, tiny_model("llama")) as (process, url):

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(url + TEXT, json={"prompt": "x"}, timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        end = time.monotonic() + 30
        while not httpx.get(f"{url}/slots").json()[0]["is_processing"]:
            assert time.monotonic() < end
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
        thread.join(60)


def test_an_orderly_end_leaves_no_deadline(tiny_model: Callable[..., Path]) -> None:
    """The thread that ends a process whose engine is stuck must not end one that goes on after the server."""
    with started(ORDERLY, tiny_model("llama")) as (process, url):
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.stderr
        said = process.stderr.read()
        assert process.wait(60) == 0, said
