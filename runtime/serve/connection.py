"""Connections that neither fill the server up nor stay for ever without a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's, with a deadline for the headers of a request, counted from when the server begins to wait for them.

    Where there are limit_concurrency of them, the one that has waited longest makes room for a new one.
    """

    def __init__(self, *args: Any, header_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.header_seconds = header_seconds
        self.waits_until: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch()
        limit = self.config.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            others = [other for other in self.connections if isinstance(other, Connection)]
            waiting = [(other.waits_until.when(), other) for other in others if other.waits_until is not None]
            _, oldest = min(waiting, key=lambda pair: pair[0])  # at least this one
            if oldest is not self:
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Between requests the deadline runs; bytes that come do not move it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self.waits_until is None and not self.transport.is_closing():
            self.waits_until = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _unwatch(self) -> None:
        if self.waits_until is not None:
            self.waits_until.cancel()
            self.waits_until = None
