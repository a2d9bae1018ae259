"""What a cluster's ingress and replicas need that is not Ray's: whose turn a request is, and requests as values."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Scope

from runtime.serve.guard import Guard
from runtime.serve.refusals import refused
from runtime.serve.settings import Limits

SESSION = "x-session-id"
OWNERS = ("authorization", "x-api-key")
N_OPENING = 512  # characters of a prompt without turns that tell conversations apart
N_WAITING = 64  # messages that an answer may be ahead of its reader
BYTES_PER_TOKEN = 4  # of a body, about
METHODS = ["GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE"]
# what of a request's scope goes to another process
FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")


def session(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """What a conversation's requests have in common and others' have not; "": nothing is known.

    x-session-id where the client gives one; else a hash of the key, the system prompt and the first turn.
    """
    found = {name.decode("latin-1").lower(): value for name, value in headers}
    owner = b"\0".join(found.get(name, b"") for name in OWNERS)
    if given := found.get(SESSION):
        return _digest(owner, b"id", given)
    opening = _opening(body)
    return _digest(owner, b"opening", opening.encode("utf-8", "replace")) if opening else ""


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _opening(body: bytes) -> str:
    """How the conversation of a request's body begins; the route answers what is no request."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    turns = asked.get("messages") or asked.get("input") or asked.get("prompt") or asked.get("content")
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        users = [i for i, turn in enumerate(turns) if turn.get("role") == "user"]
        turns = turns[: users[0] + 1] if users else turns[:1]
        return json.dumps([asked.get("instructions"), [[turn.get("role"), turn.get("content")] for turn in turns]])
    return json.dumps(turns[:N_OPENING]) if isinstance(turns, (str, list)) and turns else ""


def door(forward: Callable[[str, bytes], Response], keys: Sequence[str], limits: Limits) -> Starlette:
    """The application of an ingress: forward(session, body) makes the answer to a request that may come in.

    Keys are checked, and a body's size where it is told, before anything of it is read; all of it is there in time.
    """

    async def enter(request: Request) -> Response:
        try:
            asked = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)  # as proxies log it; nobody reads it
        return forward(session(request.headers.raw, asked), asked)

    guard = Middleware(Guard, keys=keys, max_body=limits.max_body, timeout=limits.timeout, shared=True)
    return Starlette(
        routes=[Route("/{path:path}", enter, methods=METHODS)],
        middleware=[guard],
        exception_handlers={HTTPException: refused},
    )


class Load:
    """The requests of a replica that have had nothing of their answer yet, in tokens to be read."""

    def __init__(self) -> None:
        self.n_tokens = 0

    @contextlib.contextmanager
    def waiting(self, body: bytes) -> Iterator[Callable[[], None]]:
        """Counts until the block ends or what it is given is called."""
        n = len(body) // BYTES_PER_TOKEN
        self.n_tokens += n

        def begun() -> None:
            nonlocal n
            self.n_tokens -= n
            n = 0

        try:
            yield begun
        finally:
            begun()


def scope_of(scope: Scope) -> Scope:
    """What a replica needs of a request's scope, as plain values."""
    return {name: scope[name] for name in FIELDS if name in scope}


async def messages(app: ASGIApp, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
    """An application's answer to a request, as the messages that were ready together.

    Whoever stops reading has gone, for the application, and what it waits for is cancelled.
    """
    ready: asyncio.Queue[Message] = asyncio.Queue(N_WAITING)
    gone, given = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    about = {"version": "3.0", "spec_version": "2.3"}
    asked: Scope = {**scope, "asgi": about, "root_path": "", "extensions": {}}
    work = asyncio.ensure_future(app(asked, receive, ready.put))
    try:
        while not (work.done() and ready.empty()):
            if ready.empty():
                first = asyncio.ensure_future(ready.get())
                await asyncio.wait({first, work}, return_when=asyncio.FIRST_COMPLETED)
                if not first.done():
                    first.cancel()
                    continue
                batch = [first.result()]
            else:
                batch = [ready.get_nowait()]
            while not ready.empty():
                batch.append(ready.get_nowait())
            yield batch
        work.result()
    finally:
        gone.set()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work


class QueuedTokens:
    """How many replicas there should be, for Ray's autoscaler, which adds bounds and delays (AutoscalingPolicy).

    tokens: of prompts that wait, for each replica; requests: at work, for each. Neither is to be exceeded.
    """

    def __init__(self, tokens: float, requests: float) -> None:
        self.tokens, self.requests = tokens, requests

    def __call__(self, now: Any) -> tuple[float, dict[str, Any]]:
        """now: ray.serve.config.AutoscalingContext."""
        told = (now.aggregated_metrics or {}).get("queued_tokens", {})
        return math.ceil(max(sum(told.values()) / self.tokens, now.total_num_requests / self.requests)), {}
