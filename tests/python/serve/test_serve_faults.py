"""What clients do wrong: clear refusals, no crash, no slot lost, no stream mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from serving import Served, running, waited

from runtime.serve import soak
from runtime.serve.guard import Guard
from runtime.serve.load import Reply, load, row
from subkv.base import progress

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MIB = 1024 * 1024


def connect(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect((parts.hostname, parts.port))
    return sock


def begin(served: Served, **body: Any) -> socket.socket:
    """A request for a stream, sent and not read."""
    sock = connect(served)
    data = json.dumps({"prompt": "endless", "temperature": 0, "stream": True, "max_tokens": 10**6} | body).encode()
    sock.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (TEXT.encode(), len(data))
        + data
    )
    return sock


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"", 400),
        (CHAT, b"[]", 400),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
        (CHAT, b"[" * 200000, 400),
        (CHAT, b'{"messages": 5}', 400),
        (TEXT, b'{"prompt": "x", "temperature": NaN}', 400),
        (TEXT, b'{"prompt": "x", "temperature": 1e999}', 400),
        (TEXT, b'{"prompt": {"a": 1}}', 400),
        (TEXT, b'{"promt": "misspelt"}', 400),
        ("/completion", b'{"promt": "misspelt"}', 400),
        ("/tokenize", b'{"content": 1}', 400),
        ("/detokenize", b'{"tokens": [99999999]}', 400),
        ("/slots/9?action=erase", b"", 404),
        ("/slots/0?action=dance", b"", 400),
        ("/nowhere", b"{}", 404),
        ("/health", b"{}", 405),
    ],
)
def test_nonsense_is_refused_in_openai_shape(served: Served, path: str, content: bytes, status: int) -> None:
    answer = served.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and error["message"] and error["type"]


@pytest.mark.parametrize(
    ("kind", "content", "sentence"),
    [
        (
            "application/json",
            b'{"prompt": "x"',
            "expected JSON, found an error at character 14: Expecting ',' delimiter",
        ),
        ("text/plain", b'{"prompt": "x"}', "expected Content-Type application/json, found 'text/plain'"),
        ("application/json", b'{"promt": "x"}', "prompt: Field required"),
    ],
)
def test_what_is_wrong_is_named(served: Served, kind: str, content: bytes, sentence: str) -> None:
    answer = served.client.post(TEXT, content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == sentence


def test_lone_surrogates_are_text_with_replacements(served: Served) -> None:
    content = b'{"prompt": "half \\ud83d of a pair", "max_tokens": 4, "temperature": 0}'
    answer = served.client.post(TEXT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def test_a_hundred_mebibytes_are_refused_unread(served: Served) -> None:
    with connect(served) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (100 * MIB)
        )
        assert b" 413 " in sock.recv(4096)
    with connect(served) as sock, contextlib.suppress(OSError):  # no length given: refused when it is too long
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(20):
            sock.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
        assert b" 413 " in sock.recv(4096)
    assert served.client.get("/health").status_code == 200


def test_a_million_messages(served: Served) -> None:
    content = b'{"messages": [' + b",".join([b"{}"] * 10**6) + b"]}"
    answer = served.client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "8192 messages" in answer.json()["error"]["message"]


def test_keys(tiny_model: Callable[..., Path]) -> None:
    with running(tiny_model("llama"), n_slots=1, n_ctx=256, keys=("first", "second")) as served:
        assert served.client.get("/v1/models").status_code == 200
        url = served.url
        from httpx import get

        assert get(f"{url}/health").status_code == 200
        assert get(f"{url}/v1/models", headers={"X-Api-Key": "second"}).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}):
            for path in ("/v1/models", "/metrics", "/slots", "/nowhere"):
                answer = get(url + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"


@pytest.fixture(scope="module")
def one_slot(tiny_model: Callable[..., Path]) -> Iterator[Served]:
    """A slot with room for a long answer, a queue of two, a second of patience with clients."""
    limits = {"n_queue": 2, "timeout": 1.0}
    with running(tiny_model("llama", n_ctx_train=32768), n_slots=1, n_ctx=32768, limits=limits) as made:
        yield made


def test_a_client_that_leaves_frees_its_slot(one_slot: Served) -> None:
    with begin(one_slot) as sock:
        assert b"200 OK" in sock.recv(1000)
        assert not one_slot.client.get("/slots").json()[0]["n_tokens"] > 30000
    assert one_slot.idle()
    assert one_slot.client.get("/slots").json()[0]["n_tokens"] < 30000  # not because the context was full


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read(one_slot: Served, stream: bool) -> None:
    engine = one_slot.service.engine
    with begin(one_slot, stream=stream, prompt=[1 + i % 200 for i in range(30000)]):
        assert waited(lambda: engine.n_busy == 1 and len(engine.slots[0].tokens) > 0)
        assert engine.slots[0].task.reading
    assert one_slot.idle()
    assert 0 < one_slot.client.get("/slots").json()[0]["n_tokens"] < 30000
    answer = one_slot.client.post(TEXT, json={"prompt": "others", "max_tokens": 3})
    assert answer.status_code == 200


def test_a_client_that_resets_while_it_waits_for_a_whole_answer(one_slot: Served) -> None:
    with begin(one_slot, stream=False) as sock:
        assert waited(lambda: one_slot.service.engine.n_busy == 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert one_slot.idle()
    assert one_slot.client.get("/slots").json()[0]["n_tokens"] < 30000


def test_a_client_that_never_reads_frees_its_slot(one_slot: Served) -> None:
    with begin(one_slot, logprobs=100):
        assert waited(lambda: one_slot.service.engine.n_busy == 1)
        assert one_slot.idle(40)
        assert one_slot.client.get("/slots").json()[0]["n_tokens"] < 30000
        answer = one_slot.client.post(TEXT, json={"prompt": "others", "max_tokens": 3})
        assert answer.status_code == 200


def test_a_body_that_never_ends(one_slot: Served) -> None:
    with connect(one_slot) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in sock.recv(4096)


def test_a_full_queue_sends_clients_away(one_slot: Served) -> None:
    places = one_slot.service.places
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(begin(one_slot))
        assert waited(lambda: places.n_working == 1)
        waiting = [stack.enter_context(begin(one_slot)) for _ in range(2)]
        assert waited(lambda: places.n_waiting == 2)
        answer = one_slot.client.post(TEXT, json={"prompt": "one more"})
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert "2 requests are waiting" in answer.json()["error"]["message"]
        metrics = one_slot.client.get("/metrics").text
        assert "llamacpp:requests_deferred 2.0" in metrics and "llamacpp:requests_processing 1.0" in metrics
        waiting[0].close()  # who leaves the queue makes room in it
        assert waited(lambda: places.n_waiting == 1)
        first.close()
        assert b"200 OK" in waiting[1].recv(1000)  # the next one's turn
    assert waited(lambda: places.n_waiting == places.n_working == 0)
    assert one_slot.idle()


def test_writes_that_block_end_the_answer() -> None:
    """The guard's part alone: a `send` that never returns."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def blocked(_: Any) -> None:
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request"}

    guard = Guard(app, [], MIB, 0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(guard({"type": "http", "path": "/", "headers": []}, receive, blocked))


def test_the_load_program_shows_how_far_it_is(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    parts = urlsplit(served.url)
    replies = asyncio.run(load(parts.hostname, parts.port, TEXT, [{"prompt": "x", "max_tokens": 2}] * 6, 2))
    assert [reply.status for reply in replies] == [200] * 6
    assert "requests:" in screen.getvalue() and "/6 [" in screen.getvalue()


def test_a_thousand_requests_at_once(coded_model: Callable[..., Path]) -> None:
    n = 1000
    prompts = [f"{word} {word}" for word in ("one", "two", "three", "four", "five")]
    with running(coded_model(), n_slots=4, n_ctx=1024, limits={"n_queue": 600}) as served:

        def body(prompt: str) -> dict[str, Any]:
            return {"prompt": prompt, "max_tokens": 4, "temperature": 0}

        alone = [served.client.post(TEXT, json=body(prompt)).json()["choices"][0]["text"] for prompt in prompts]
        assert len(set(alone)) == len(alone)
        bodies = [body(prompts[i % len(prompts)]) for i in range(n)]
        parts = urlsplit(served.url)
        replies = asyncio.run(load(parts.hostname, parts.port, TEXT, bodies, n))
        assert {reply.status for reply in replies} <= {200, 503}
        for i, reply in enumerate(replies):
            if reply.status == 200:
                assert json.loads(reply.body)["choices"][0]["text"] == alone[i % len(alone)]
        assert sum(reply.status == 200 for reply in replies) >= 600
        assert f"| {n} | " in row(replies, 1.0, None)
        assert served.idle()


def test_a_soak_of_seconds(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    with running(coded_model(), n_slots=2, n_ctx=1024, folder=tmp_path) as served:
        asked = ["--url", served.url, "--pid", str(os.getpid()), "--minutes", "0.05", "--every", "0.2", "-n", "4"]
        done = CliRunner().invoke(soak.main, [*asked, "-j", "1", "-np", "2"])
        assert done.exit_code == 0, done.output
        assert "faults: none" in done.output
        for kind in ("short", "conversation", "gone", "slow", "slots", "refused"):
            assert re.search(rf"[1-9]\d* {kind}", done.output), done.output
        for name in ("RSS MiB", "open files", "threads", "first quarter", "last quarter"):
            assert re.search(rf"^\| {name} \| [1-9]", done.output, re.MULTILINE), done.output


def test_what_a_soak_sees() -> None:
    samples = [(360.0 * k, 100.0 + k, 20, 5) for k in range(11)]  # an hour
    assert [tuple(round(x, 6) for x in column) for column in soak.growth(samples)] == [
        (103.0, 110.0, 10.0),
        (20.0, 20.0, 0.0),
        (5.0, 5.0, 0.0),
    ]
    replies = [(float(k), Reply(200 if k % 10 else 500, b"", 1.0 if k < 50 else 2.0)) for k in range(100)]
    assert soak.quarters(replies, 100.0) == [(22, 1.0, 1.0), (23, 2.0, 2.0)]
