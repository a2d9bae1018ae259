"""uvicorn's server with an end that every stream takes part in."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from runtime.serve.batching import Engine

GRACE_SECONDS = 5  # for answers under way when the server is told to end


class Server(uvicorn.Server):
    """After the signal, answers have GRACE_SECONDS; then the engine ends them, and their streams say why."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self.engine.stop)
        await super().shutdown(sockets)
        timer.cancel()
