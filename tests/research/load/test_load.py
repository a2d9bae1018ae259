"""research.load and soak on llama-server: counts, times and measurements."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from research import load as loading
from research import soak
from research.load import Reply, load, local, parsed, row
from subkv.base import progress

Serve = Callable[..., Any]
TEXT = "/v1/completions"


def test_the_load_program(serve: Serve) -> None:
    with serve("-np", 2, "-c", 2048) as server:
        options = ["--url", f"http://127.0.0.1:{server.port}", "-r", "6", "-j", "3", "-n", "5"]
        done = CliRunner().invoke(loading.main, [*options, "--pid", str(server.process.pid)])
    assert done.exit_code == 0, done.output
    cells = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert cells[:3] == ["6", "6", "0"]
    seconds, rates = cells[3:5], cells[5:7]
    assert all(float(cell) >= 0 for cell in seconds)  # a quick machine answers in less than the last printed digit
    assert all(float(cell) > 0 for cell in rates)
    assert re.fullmatch(r"[1-9]\d* → [1-9]\d*", cells[7])


def test_the_load_program_shows_progress(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with serve("-np", 2, "-c", 2048) as server:
        bodies = [{"prompt": "x", "max_tokens": 2}] * 6
        replies = asyncio.run(load("127.0.0.1", server.port, TEXT, bodies, 2))
    assert [reply.status for reply in replies] == [200] * 6
    assert "requests:" in screen.getvalue() and "/6 [" in screen.getvalue()


@pytest.mark.slow
def test_a_thousand_requests_at_once(serve: Serve) -> None:
    """On four slots: each gets the answer that it gets alone."""
    prompts = [f"{word} {word}" for word in ("one", "two", "three", "four", "five")]

    def body(prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": 4, "temperature": 0}

    with serve("-np", 4, "-c", 2048) as server:
        alone = [server.request("POST", TEXT, body(prompt))["choices"][0]["text"] for prompt in prompts]
        bodies = [body(prompts[i % len(prompts)]) for i in range(1000)]
        replies = asyncio.run(load("127.0.0.1", server.port, TEXT, bodies, 1000))
        assert [reply.status for reply in replies] == [200] * 1000
        for i, reply in enumerate(replies):
            assert json.loads(reply.body)["choices"][0]["text"] == alone[i % len(alone)]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads a process's memory in /proc")
def test_a_soak_of_seconds(serve: Serve, tmp_path: Path) -> None:
    with serve("-np", 2, "-c", 2048, "--metrics", "--slot-save-path", tmp_path) as server:
        options = ["--url", f"http://127.0.0.1:{server.port}", "--pid", str(server.process.pid)]
        options += ["--minutes", "0.05", "--every", "0.2", "-n", "4", "-j", "1", "-np", "2"]
        done = CliRunner().invoke(soak.main, options)
    assert done.exit_code == 0, done.output
    assert "faults: none" in done.output
    for kind in ("short", "conversation", "gone", "slow", "slots", "monitor", "refused"):
        assert re.search(rf"[1-9]\d* {kind}", done.output), done.output
    for name in ("RSS MiB", "open files", "threads", "first quarter", "last quarter"):
        assert re.search(rf"^\| {name} \| [1-9]", done.output, re.MULTILINE), done.output


def test_growth_of_a_soak() -> None:
    samples = [(360.0 * k, 100.0 + k, 20, 5) for k in range(11)]  # an hour
    assert [tuple(round(x, 6) for x in column) for column in soak.growth(samples)] == [
        (103.0, 110.0, 10.0),
        (20.0, 20.0, 0.0),
        (5.0, 5.0, 0.0),
    ]
    replies = [(float(k), Reply(200 if k % 10 else 500, b"", 1.0 if k < 50 else 2.0)) for k in range(100)]
    assert soak.quarters(replies, 100.0) == [(22, 1.0, 1.0), (23, 2.0, 2.0)]


def test_incomplete_answers_are_counted() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    counted = b"HTTP/1.1 503 No\r\nContent-Length: 3\r\n\r\nabc"
    assert parsed(chunked) == (200, b"ab") and parsed(counted) == (503, b"abc")
    for data in (b"", b"nonsense\r\n\r\n", counted[:-1], chunked[:-9], b"HTTP/1.1 200 OK\r\nContent-Le"):
        assert parsed(data) == (0, b""), data
    replies = [Reply(200, b'{"usage": {"completion_tokens": 8}}', 1.0), Reply(503, b"", 1.0), Reply(0, b"", 1.0)]
    assert "| 3 | 1 | 1 × no answer, 1 × 503 | 1.000 | 1.000 | 0.5 | 4.0 |  |" in row(replies, 2.0, None)


def test_only_this_machine_is_loaded() -> None:
    assert local("http://localhost") == ("localhost", 80) and local("http://[::1]:8") == ("::1", 8)
    for url in ("http://example.org", "http://192.168.0.1:8080", "nonsense"):
        with pytest.raises(click.UsageError, match="--url: expected an address of this machine"):
            local(url)
