"""Refusals in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtime.serve.sampling import SamplingError
from subkv.base.errors import StateError

# status -> error type, as llama-server names them
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(HTTPException):
    """An answer other than 200: one sentence, the field it concerns, and when to come again (seconds)."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str | None = None,
        retry_after: int | None = None,
        **numbers: int,
    ) -> None:
        super().__init__(status, message, None if retry_after is None else {"Retry-After": str(retry_after)})
        self.param = param
        self.kind = kind
        self.numbers = numbers


def bad_field(param: str, reason: str) -> ApiError:
    """400, and the reason names the field."""
    return ApiError(400, f"{param}: {reason}", param)


def refusal(error: Exception) -> HTTPException:
    """The answer to what went wrong: the client's fault, or ours."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, (StateError, SamplingError)):
        return ApiError(400, str(error), error.key or None)
    return ApiError(500, str(error) or type(error).__name__)


def body(error: HTTPException) -> dict[str, Any]:
    """The JSON answer: {"error": {"message", "type", "param", "code"}} and the error's own numbers."""
    kind = getattr(error, "kind", None) or TYPES.get(error.status_code, "server_error")
    fields = {"message": error.detail, "type": kind, "param": getattr(error, "param", None), "code": error.status_code}
    return {"error": fields | getattr(error, "numbers", {})}


async def refused(request: Request, error: Exception) -> Response:
    """What an application answers to what it raises."""
    found = refusal(error)
    if type(found) is HTTPException and found.status_code in (404, 405):  # Starlette's, of two words
        methods = (found.headers or {}).get("Allow", "another method")
        expected = "a path that this server has" if found.status_code == 404 else methods
        what = f"expected {expected}, found {request.method} {request.url.path:.80}"
        found = ApiError(found.status_code, what)
    return JSONResponse(body(found), found.status_code, found.headers)
