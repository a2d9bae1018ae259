"""uvicorn's server with deadlines for connections, and an end that every stream takes part in."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import socket
from types import FrameType
from typing import Any

import uvicorn

from runtime.serve.batching import Engine
from runtime.serve.connection import Connection
from runtime.serve.settings import Limits

GRACE_SECONDS = 5  # for answers under way when the server is told to end
LAST_SECONDS = 3 * GRACE_SECONDS  # for everything else: then the process ends where it stands


def configuration(app: Any, limits: Limits) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, header_seconds=limits.header_timeout),  # type: ignore[arg-type]
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=2 * GRACE_SECONDS,
        backlog=limits.n_connections,
        limit_concurrency=limits.n_connections,
    )


class Server(uvicorn.Server):
    """After the signal, answers have GRACE_SECONDS; then the engine ends them, and their streams say why.

    After LAST_SECONDS the process ends with code 1, whatever it does: the thread that sees to it needs nothing of
    Python. Files appear complete or not at all, so nothing half-written is left under a name that is read.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self.engine.stop)
        await super().shutdown(sockets)
        timer.cancel()
