"""The parts of a cluster that Ray does not provide: sessions of requests, API keys, number of replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from each import each

pytest.importorskip("starlette", reason="needs the extra `cluster`")

from cluster.gateway import gateway, read_keys
from cluster.sessions import Load, QueuedTokens, session
from starlette.responses import Response

from subkv.base.errors import SubkvError

LIMITS = (1000, 600.0)  # of a body: bytes, seconds
SYSTEM, FIRST = {"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}
MORE = [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Go on"}]


def of(body: Any, *headers: tuple[bytes, bytes], query: bytes = b"") -> str:
    return session(headers, body if isinstance(body, bytes) else json.dumps(body).encode(), query)


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
    assert of({"messages": [FIRST], "system": "a"}) != of({"messages": [FIRST], "system": "b"})


def test_a_name_wins() -> None:
    named = of({"messages": [SYSTEM, FIRST]}, (b"X-Session-Id", b"7"))
    assert named == of({"messages": [FIRST]}, (b"x-session-id", b"7")) == of(b"", (b"x-session-id", b"7"))
    assert named != of(b"", (b"x-session-id", b"8"))
    assert named != of(b"", (b"x-session-id", b"7"), (b"x-api-key", b"secret"))  # names are each owner's own
    assert len(of(b"", (b"x-session-id", b"7" * 100_000))) == 32


def test_a_stream_resumes_on_its_replica() -> None:
    """llama-server's page names a conversation in the header of its request, then in the query."""
    began = of({"messages": [FIRST]}, (b"X-Conversation-Id", b"7::model"))
    assert began == of(b"", query=b"conv_id=7%3A%3Amodel&from=100") != of(b"", query=b"conv_id=8")
    assert of(b"", query=b"conv_id=\xff%ff&=&&") and not of(b"", query=b"from=100")


@each(
    "body",
    [b"", b"\xff\xfe", b"[" * 100_000, b"[1]", b"7", b"{}", b'{"messages": 3}', b'{"messages": []}', b'{"prompt": ""}'],
)
def test_requests_without_a_conversation_have_no_session(body: bytes) -> None:
    assert of(body) == ""


def test_strange_messages() -> None:
    assert of({"messages": [{"role": ["user"], "content": {"a": [1, None]}}]})
    assert of({"messages": ["text", 3]}) and of({"prompt": "\ud800"})


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


@each(
    ("headers", "most", "status", "n_read"),
    [
        ({}, 100, 401, 0),
        ({"Authorization": "Bearer wrong"}, 100, 401, 0),
        ({"X-Api-Key": "secret", "Content-Length": "101"}, 100, 413, 0),
        ({"X-Api-Key": "secret"}, 15, 413, 2),  # without Content-Length
        ({"X-Api-Key": "secret"}, 100, 408, 3),
    ],
)
def test_limits_of_requests(headers: dict[str, str], most: int, status: int, n_read: int) -> None:
    """Without a key the body is not read; with a key it is read up to the limits of time and size."""
    pieces = []

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(3):
            pieces.append(b"0123456789")
            yield pieces[-1]
        await asyncio.Event().wait()

    app = gateway(lambda key, payload: pytest.fail("it went on"), ["secret"], most, 0.2)

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/v1/completions", content=slowly(), headers=headers)

    answer = run(work)
    assert answer.status_code == status and len(pieces) == n_read
    assert answer.json()["error"]["code"] == status


def test_requests_are_forwarded() -> None:
    forwarded = []

    def forward(key: str, payload: bytes) -> Response:
        forwarded.append((key, payload))
        return Response(b"an answer")

    app = gateway(forward, ["secret"], *LIMITS)

    async def work() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            named = {"x-session-id": "7", "Authorization": "Bearer secret"}
            return [await client.post("/v1/completions", content=b"{}", headers=named), await client.get("/health")]

    assert [answer.content for answer in run(work)] == [b"an answer"] * 2
    key = session([(b"x-session-id", b"7"), (b"authorization", b"Bearer secret")], b"")
    assert forwarded == [(key, b"{}"), ("", b"")]


@each(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/_app/immutable/entry/start.DkT3.js", 200),
        ("GET", "/v1/health", 200),
        ("OPTIONS", "/v1/chat/completions", 200),
        ("POST", "/", 401),
        ("POST", "/bundle.js", 401),
        ("GET", "/slots", 401),
        ("GET", "/v1/models", 401),
        ("GET", "/v1/stream?conv_id=a.js", 401),
    ],
)
def test_routes_without_a_key(method: str, path: str, status: int) -> None:
    """As in llama-server: the page, /health and preflight requests of browsers."""
    app = gateway(lambda key, payload: Response(b"an answer"), ["secret"], *LIMITS)

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path)

    assert run(work).status_code == status


@pytest.mark.parametrize(
    ("text", "keys"), [(b"one\n\n# a comment\n two \n", ["one", "two"]), (b"# none\n", None), (b"\xff", None)]
)
def test_files_of_keys(tmp_path: Path, text: bytes, keys: list[str] | None) -> None:
    path = tmp_path / "keys"
    with pytest.raises(SubkvError, match="api_key_file: cannot read"):
        read_keys(path)
    path.write_bytes(text)
    if keys is not None:
        assert read_keys(path) == keys
    else:
        with pytest.raises(SubkvError, match="api_key_file: "):
            read_keys(path)
    assert read_keys(None) == []


def test_tokens_that_wait() -> None:
    load = Load()
    with load.waiting(bytes(4000)) as received, load.waiting(bytes(400)):
        for piece in (b"", b":\n\n"):  # a stream's comment keeps the connection alive
            received(piece)
            assert load.n_tokens == 1100
        received(b"data: {}")
        received(b"data: {}")
        assert load.n_tokens == 100
    assert load.n_tokens == 0
    with pytest.raises(KeyError), load.waiting(bytes(40)):
        raise KeyError
    assert load.n_tokens == 0


def test_replicas_for_tokens_and_requests() -> None:
    def n_replicas(n_requests: float, **loads: float) -> float:
        metrics = {"queued_tokens": loads} if loads else None
        return QueuedTokens(8000, 4)(SimpleNamespace(aggregated_metrics=metrics, total_num_requests=n_requests))[0]

    assert n_replicas(0) == 0 and n_replicas(1) == 1 and n_replicas(4) == 1 and n_replicas(9) == 3
    assert n_replicas(1, a=8000, b=100) == 2 and n_replicas(1, a=31_000, b=20_000) == 7
    assert n_replicas(40, a=1) == 10


def test_the_example_names_existing_options() -> None:
    pytest.importorskip("ray.serve")
    yaml = pytest.importorskip("yaml")
    from cluster.deployment import Arguments, build
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load((Path(__file__).parents[2] / "examples/cluster/cluster.yaml").read_text("utf-8"))
    ServeDeploySchema.model_validate(config)
    args = config["applications"][0]["args"]
    assert Arguments.of(args).max_replicas == 8
    assert build(args) is not None
