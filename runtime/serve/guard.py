"""What stands between the network and the routes: names, keys, body sizes, timeouts and the queue."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serve.page_routes import PATHS
from runtime.serve.refusals import ApiError, body

HEALTH = {"/health", "/v1/health"}
PUBLIC = PATHS | HEALTH
BEARER = re.compile(rb"bearer +", re.IGNORECASE)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Hosts:
    """The names that a server answers to beside localhost and loopback addresses.

    A page of somebody else reaches a server on this machine through the user's browser: under a name of its own that it
    lets point here (DNS rebinding), or by a request whose answer it need not read.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = {name.lower().strip("[]") for name in names}

    def check(self, headers: Headers) -> None:
        """Refuse a request for another name, or from a page of another origin. Raises ApiError."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(f"//{host}")
        if not (name in self.names or name == "localhost" or _loopback(name)):
            raise ApiError(403, f"expected a Host of this machine, found {host!r:.80}; others need --allow-host")
        if origin is None or origin.partition("://")[2].lower() == host.lower() or _name(origin) in self.names:
            return
        raise ApiError(403, f"expected a page of this server, found Origin {origin!r:.80}; others need --allow-host")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_json(scope: Scope, headers: Headers) -> None:
    """A body that curl calls a form, or calls nothing, is JSON. Not a page's: browsers ask before they send JSON."""
    kind = headers.get("content-type", "").partition(";")[0]
    if kind in ("", "application/x-www-form-urlencoded") and "origin" not in headers:
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", b"application/json")]


def _space(key: str, shared: bool) -> str:
    """What stands for a key where things are remembered: it is written to files, and takes long to guess from."""
    return "" if shared else hashlib.pbkdf2_hmac("sha256", key.encode(), b"subkv prefixes", 100_000).hex()


class Guard:
    """ASGI middleware: refuses strangers and oversized bodies, ends clients that neither send nor read.

    max_body in bytes; timeout in seconds, for the whole of a request's body and for each piece of an answer. hosts
    None: requests for any name are answered. shared: what is remembered for one key serves them all.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        max_body: int,
        timeout: float,
        hosts: Hosts | None = None,
        shared: bool = False,
    ) -> None:
        self.app = app
        self.hosts = hosts
        # clients send what is not ASCII as either
        self.keys = [key.encode(code, "replace") for key in keys for code in ("utf-8", "latin-1")]
        self._spaces = [space for key in keys for space in [_space(key, shared)] * 2]
        self.max_body = max_body
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self.hosts is not None:
                self.hosts.check(headers)
            scope["space"] = self._check_key(scope["path"], headers)
            length = headers.get("content-length", "")
            self._check_size(int(length) if length.isdecimal() else 0)
            _name_json(scope, headers)
        except ApiError as error:
            # a body that is on its way is read and dropped (Connection has a deadline for that): closed before, the
            # client may be told of a reset where it would read the answer. Who asks before a body may send none now
            answer = JSONResponse(
                body(error), error.status_code, {"Connection": "close"} if "expect" in headers else None
            )
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

    def _check_key(self, path: str, headers: Headers) -> str:
        """Whose request it is. Raises ApiError."""
        if not self.keys or path in PUBLIC:
            return ""
        raw = dict(headers.raw)
        given = raw.get(b"authorization") or raw.get(b"x-api-key") or b""
        given = BEARER.sub(b"", given, count=1) if BEARER.match(given) else given
        equal = [hmac.compare_digest(given, key) for key in self.keys]  # all of them: time tells nothing
        if not any(equal):
            raise ApiError(401, "expected an API key of this server (Authorization: Bearer KEY), found none or another")
        return self._spaces[equal.index(True)]

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
        self._of_slots = [asyncio.Lock() for _ in range(n_slots)]

    def enter(self, n: int = 1) -> None:
        """Join the queue n times; each place() leaves it once. Raises ApiError when it is full."""
        if self.n_waiting + self.n_working + n > self._n_slots + self._limit:
            raise ApiError(503, f"{self._limit} requests are waiting (--queue); come again later", retry_after=1)
        self.n_waiting += n

    @contextlib.asynccontextmanager
    async def place(self, slot: int = -1) -> AsyncIterator[None]:
        """Who has entered works here, in the order of arrival; of those for one slot one at a time."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                if slot >= 0:
                    await stack.enter_async_context(self._of_slots[slot])
                await self._free.acquire()
            finally:
                self.n_waiting -= 1
            self.n_working += 1
            try:
                yield
            finally:
                self.n_working -= 1
                self._free.release()
