"""The gateway of a cluster: checks API keys, sizes and times of bodies; errors have OpenAI's format."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.sessions import session
from subkv.base.errors import SubkvError, system_reason

METHODS = ["GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE"]
BEARER = re.compile(rb"bearer +", re.IGNORECASE)
HEALTH = {"/health", "/v1/health"}
# files of llama-server's page, which asks its user for the key; no other route has these endings
PAGE = {".html", ".js", ".css", ".json", ".webmanifest", ".svg", ".png", ".ico", ".woff2"}
# status -> error type, as llama-server names them
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    503: "unavailable_error",
}


class ApiError(HTTPException):
    """An error response: one sentence, and the seconds after which to retry."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(status, message, None if retry_after is None else {"Retry-After": str(retry_after)})


def error_body(error: HTTPException) -> dict[str, Any]:
    """The JSON answer: {"error": {"message", "type", "code"}}."""
    kind = TYPES.get(error.status_code, "server_error")
    return {"error": {"message": error.detail, "type": kind, "code": error.status_code}}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error), error.status_code, error.headers)


def read_keys(path: Path | None) -> list[str]:
    """API keys of a file, one per line, comments dropped; [] without a file. Raises SubkvError about `api_key_file`."""
    if path is None:
        return []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SubkvError("api_key_file", f"cannot read {path}: {system_reason(error)}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise SubkvError("api_key_file", f"expected at least one key, found none in {path}")
    return keys


def _public(scope: Scope) -> bool:
    """Whether llama-server also answers this request without a key."""
    path = scope["path"]
    if scope["method"] == "OPTIONS" or path in HEALTH:  # browsers send OPTIONS without a key
        return True
    return scope["method"] == "GET" and (path == "/" or PurePosixPath(path).suffix in PAGE)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Guard:
    """ASGI middleware that checks keys and the sizes of bodies, and disconnects stalled clients.

    max_body in bytes; timeout in seconds, for the whole body of a request and for each piece of an answer.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], max_body: int, timeout: float) -> None:
        self.app = app
        # clients send characters beyond ASCII in either encoding
        self.keys = [key.encode(code, "replace") for key in keys for code in ("utf-8", "latin-1")]
        self.max_body = max_body
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if not _public(scope):
                self._check_key(headers)
            length = headers.get("content-length", "")
            self._check_size(int(length) if length.isdecimal() else 0)
        except ApiError as error:
            # The server reads and drops a body that the client is sending. With the connection closed at once, the
            # client might see a reset instead of the answer. After "expect" no body may follow.
            closing = {"Connection": "close"} if "expect" in headers else None
            await JSONResponse(error_body(error), error.status_code, closing)(scope, receive, send)
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

    def _check_key(self, headers: Headers) -> None:
        if not self.keys:
            return
        raw = dict(headers.raw)
        value = raw.get(b"authorization") or raw.get(b"x-api-key") or b""
        value = BEARER.sub(b"", value, count=1) if BEARER.match(value) else value
        equal = [hmac.compare_digest(value, key) for key in self.keys]  # compare with all keys: constant time
        if not any(equal):
            raise ApiError(401, "expected an API key of this server (Authorization: Bearer KEY), found none or another")

    def _check_size(self, n: int) -> None:
        if n > self.max_body:
            raise ApiError(413, f"expected at most {self.max_body} bytes of body, found {n}")


def gateway(forward: Callable[[str, bytes], Response], keys: Sequence[str], max_body: int, timeout: float) -> Starlette:
    """The application of an ingress: forward(session, body) answers requests that pass the checks.

    It checks the key and the declared size before it reads a body, and reads the body within the timeout.
    """

    async def handle(request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)  # the client is gone; the status is for logs
        return forward(session(request.headers.raw, body, request.scope.get("query_string", b"")), body)

    return Starlette(
        routes=[Route("/{path:path}", handle, methods=METHODS)],
        middleware=[Middleware(Guard, keys=keys, max_body=max_body, timeout=timeout)],
        exception_handlers={HTTPException: _refused},
    )
