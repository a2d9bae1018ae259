"""A line on stderr for every request, when it has ended."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

import click
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.serve.guard import HEALTH

MOST_PATH = 256  # characters


class RequestLog:
    """ASGI middleware. form: one of settings.LOG_FORMATS; questions about health are not written."""

    def __init__(self, app: ASGIApp, form: str) -> None:
        self.app = app
        self.form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.form == "none" or scope["path"] in HEALTH:
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0  # 0: the client had gone

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = status or 500  # as the server will say
            raise
        finally:
            click.echo(self._line(scope, status, 1e3 * (time.perf_counter() - start)), err=True)

    def _line(self, scope: Scope, status: int, ms: float) -> str:
        # as sent, percent signs and all: nothing in it can begin a line of its own
        path = scope["raw_path"][:MOST_PATH].decode("ascii", "backslashreplace")
        fields: dict[str, Any] = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "client": scope["client"][0] if scope.get("client") else "-",
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round(ms),
        }
        if found := [llm.timings() for llm in scope.get("llms", ()) if llm.tasks]:  # of service.Service.run
            fields |= {key: found[0][key] for key in ("cache_n", "prompt_n")}
            fields["predicted_n"] = sum(timings["predicted_n"] for timings in found)
        if self.form == "json":
            return json.dumps(fields)
        return " ".join(f"{value}" if key in _BARE else f"{key}={value}" for key, value in fields.items())


_BARE = {"time", "client", "method", "path", "status"}
