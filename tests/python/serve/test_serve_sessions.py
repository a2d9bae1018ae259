"""What a cluster needs that is not Ray's: whose turn a request is, requests as values, how many replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.serve.sessions import Load, QueuedTokens, door, messages, scope_of, session
from runtime.serve.settings import Limits

SYSTEM, FIRST = {"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}
MORE = [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Go on"}]
SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}


def of(body: Any, *headers: tuple[bytes, bytes]) -> str:
    return session(headers, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_turns_of_a_conversation_stay_together() -> None:
    first = of({"messages": [SYSTEM, FIRST]})
    assert first and first == of({"messages": [SYSTEM, FIRST, *MORE], "temperature": 0})
    assert first != of({"messages": [SYSTEM, {"role": "user", "content": "Good day"}]})
    assert first != of({"messages": [{"role": "system", "content": "You do not."}, FIRST]})
    assert first != of({"messages": [SYSTEM, FIRST]}, (b"authorization", b"Bearer another"))
    long = "An opening. " * 100
    assert of({"prompt": long}) == of({"prompt": long + "More"}) != of({"prompt": "Another. " + long})
    assert of({"prompt": list(range(600))}) == of({"prompt": list(range(700))})
    assert of({"input": [FIRST], "instructions": "a"}) != of({"input": [FIRST], "instructions": "b"})


def test_a_name_wins() -> None:
    named = of({"messages": [SYSTEM, FIRST]}, (b"X-Session-Id", b"7"))
    assert named == of({"messages": [FIRST]}, (b"x-session-id", b"7")) == of(b"", (b"x-session-id", b"7"))
    assert named != of(b"", (b"x-session-id", b"8"))
    assert named != of(b"", (b"x-session-id", b"7"), (b"x-api-key", b"secret"))  # names are each owner's own
    assert len(of(b"", (b"x-session-id", b"7" * 100_000))) == 32


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"[" * 100_000, b"[1]", b"7", b"{}", b'{"messages": 3}', b'{"messages": []}', b'{"prompt": ""}'],
)
def test_what_is_no_conversation_goes_anywhere(body: bytes) -> None:
    assert of(body) == ""


def test_strange_messages() -> None:
    assert of({"messages": [{"role": ["user"], "content": {"a": [1, None]}}]})
    assert of({"messages": ["text", 3]}) and of({"prompt": "\ud800"})


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


async def collected(batches: AsyncIterator[list[Message]]) -> list[Message]:
    return [message async for batch in batches for message in batch]


def test_an_answer_as_messages() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(200):  # more than may wait
            await send({"type": "http.response.body", "body": asked["body"] + b"%d" % i, "more_body": i < 199})

    got = run(lambda: collected(messages(app, scope_of(SCOPE | {"app": object()}), b"x")))
    assert [message["type"] for message in got] == ["http.response.start"] + 200 * ["http.response.body"]
    assert got[-1]["body"] == b"x199" and not got[-1]["more_body"]


def test_what_an_application_raises() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run(lambda: collected(messages(app, SCOPE, b"")))


@pytest.mark.parametrize("waits", ["for the client", "for a reader", "for ever"])
def test_who_stops_reading_has_gone(waits: str) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while waits == "for a reader":
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            if waits == "for ever":
                await asyncio.Event().wait()
            seen.append((await receive())["type"])
        finally:
            seen.append("ended")

    async def work() -> None:
        batches = messages(app, SCOPE, b"")
        await batches.__anext__()
        await batches.aclose()  # type: ignore[attr-defined]

    run(work)
    assert seen[-1] == "ended"


@pytest.mark.parametrize(
    ("headers", "most", "status", "n_read"),
    [
        ({}, 100, 401, 0),
        ({"Authorization": "Bearer wrong"}, 100, 401, 0),
        ({"X-Api-Key": "secret", "Content-Length": "101"}, 100, 413, 0),
        ({"X-Api-Key": "secret"}, 15, 413, 2),  # its length is not told
        ({"X-Api-Key": "secret"}, 100, 408, 3),
    ],
)
def test_who_comes_in(headers: dict[str, str], most: int, status: int, n_read: int) -> None:
    """A stranger's body is not read, nobody's for longer than the limit, or further."""
    pieces = []

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(3):
            pieces.append(b"0123456789")
            yield pieces[-1]
        await asyncio.Event().wait()

    app = door(lambda key, asked: pytest.fail("it went on"), ["secret"], Limits(max_body=most, timeout=0.2))

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/v1/completions", content=slowly(), headers=headers)

    answer = run(work)
    assert answer.status_code == status and len(pieces) == n_read
    assert answer.json()["error"]["code"] == status


def test_what_comes_in() -> None:
    went_on = []

    def forward(key: str, asked: bytes) -> Response:
        went_on.append((key, asked))
        return Response(b"an answer")

    app = door(forward, ["secret"], Limits())

    async def work() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            named = {"x-session-id": "7", "Authorization": "Bearer secret"}
            return [await client.post("/v1/completions", content=b"{}", headers=named), await client.get("/health")]

    assert [answer.content for answer in run(work)] == [b"an answer"] * 2
    key = session([(b"x-session-id", b"7"), (b"authorization", b"Bearer secret")], b"")
    assert went_on == [(key, b"{}"), ("", b"")]


def test_tokens_that_wait() -> None:
    load = Load()
    with load.waiting(bytes(4000)) as begun, load.waiting(bytes(400)):
        assert load.n_tokens == 1100
        begun()
        begun()
        assert load.n_tokens == 100
    assert load.n_tokens == 0
    with pytest.raises(KeyError), load.waiting(bytes(40)):
        raise KeyError
    assert load.n_tokens == 0


def test_replicas_for_tokens_and_requests() -> None:
    def wanted(n_requests: float, **told: float) -> float:
        metrics = {"queued_tokens": told} if told else None
        return QueuedTokens(8000, 4)(SimpleNamespace(aggregated_metrics=metrics, total_num_requests=n_requests))[0]

    assert wanted(0) == 0 and wanted(1) == 1 and wanted(4) == 1 and wanted(9) == 3
    assert wanted(1, a=8000, b=100) == 2 and wanted(1, a=31_000, b=20_000) == 7
    assert wanted(40, a=1) == 10


def test_the_example_names_what_there_is() -> None:
    pytest.importorskip("ray.serve")
    yaml = pytest.importorskip("yaml")
    from ray.serve.schema import ServeDeploySchema

    from runtime.serve.cluster import Arguments, build

    config = yaml.safe_load((Path(__file__).parents[3] / "examples/cluster.yaml").read_text("utf-8"))
    ServeDeploySchema.model_validate(config)
    args = config["applications"][0]["args"]
    assert Arguments.of(args).max_replicas == 8
    assert build(args) is not None
