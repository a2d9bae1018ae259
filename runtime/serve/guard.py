"""What stands between the network and the routes: keys, body sizes, timeouts and the queue."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serve.refusals import ApiError, body

PUBLIC = ("/health", "/v1/health")


class Guard:
    """ASGI middleware: refuses strangers and oversized bodies, ends clients that neither send nor read.

    max_body in bytes; timeout in seconds, for the whole of a request's body and for each piece of an answer.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body: int, timeout: float) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.max_body = max_body
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_key(scope["path"], headers)
            length = headers.get("content-length", "")
            self._check_size(int(length) if length.isdecimal() else 0)
        except ApiError as error:
            answer = JSONResponse(body(error), error.status_code, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        n_body, complete = 0, False
        deadline = anyio.current_time() + self.timeout

        async def limited_receive() -> Message:
            nonlocal n_body, complete
            if complete:
                return await receive()
            try:
                with anyio.fail_after(deadline - anyio.current_time()):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"expected the body within {self.timeout:g} s") from None
            n_body += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            self._check_size(n_body)
            return message

        async def limited_send(message: Message) -> None:
            with anyio.fail_after(self.timeout):
                await send(message)

        await self.app(scope, limited_receive, limited_send)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self.keys or path in PUBLIC:
            return
        given = headers.get("authorization") or headers.get("x-api-key") or ""
        given = given.removeprefix("Bearer ")
        equal = [hmac.compare_digest(given.encode(), key) for key in self.keys]  # all of them: time tells nothing
        if not any(equal):
            raise ApiError(401, "expected an API key of this server (Authorization: Bearer KEY), found none or another")

    def _check_size(self, n: int) -> None:
        if n > self.max_body:
            raise ApiError(413, f"expected at most {self.max_body} bytes of body, found {n}")


class Places:
    """As many requests at work as there are slots, a bounded number waiting, the rest sent away."""

    def __init__(self, n_slots: int, n_waiting: int) -> None:
        self.n_waiting = 0
        self.n_working = 0
        self._n_slots = n_slots
        self._limit = n_waiting
        self._free = asyncio.Semaphore(n_slots)

    def enter(self) -> None:
        """Join the queue; place() leaves it. Raises ApiError when it is full."""
        if self.n_waiting + self.n_working >= self._n_slots + self._limit:
            raise ApiError(503, f"{self._limit} requests are waiting (--queue); come again later", retry_after=1)
        self.n_waiting += 1

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Who has entered works here, in the order of arrival."""
        try:
            await self._free.acquire()
        finally:
            self.n_waiting -= 1
        self.n_working += 1
        try:
            yield
        finally:
            self.n_working -= 1
            self._free.release()
