"""A request at work: its place in the queue, its worker thread, and what comes out of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.serve import refusals
from runtime.serve.completion import RequestLlama
from runtime.serve.guard import Places
from runtime.serve.task import CancelledError

PING_SECONDS = 15.0

STARTED, END = object(), object()


class Run:
    """Calls `work` in a thread once there is a place.

    work returns the answer, or an iterator of chunks. The place is held until the thread has ended, whoever listens.
    """

    def __init__(
        self, places: Places, pool: ThreadPoolExecutor, llm: RequestLlama, work: Callable[[RequestLlama], Any]
    ) -> None:
        places.enter()
        self.llm = llm
        self._work = work
        self._pool = pool
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._working = False
        self.done = asyncio.create_task(self._go())

    async def _go(self) -> None:
        async with self._places.place():
            self._working = True
            await self._loop.run_in_executor(self._pool, self._in_thread)

    def _in_thread(self) -> None:
        def tell(event: Any) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

        try:
            result = self._work(self.llm)
            if isinstance(result, Iterator):
                tell(STARTED)
                for chunk in result:
                    tell(chunk)
                tell(END)
            else:
                tell(result)
        except Exception as error:
            tell(error)

    def cancel(self) -> None:
        """Nobody listens any more: leave the queue, or give the slot back."""
        if self._working:
            self.llm.cancel()
        else:
            self.done.cancel()

    async def event(self, receive: Receive) -> Any:
        """The answer, or STARTED. Raises what the work raised; CancelledError when the client has gone."""
        event = asyncio.ensure_future(self._events.get())
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                raise CancelledError
            return self._checked(event.result())
        except BaseException:
            self.cancel()
            raise
        finally:
            event.cancel()
            gone.cancel()

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """What follows STARTED; None after every PING_SECONDS without a chunk."""
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), PING_SECONDS)
            except asyncio.TimeoutError:
                yield None
                continue
            if self._checked(event) is END:
                return
            yield event

    @staticmethod
    def _checked(event: Any) -> Any:
        if isinstance(event, Exception):
            raise event
        return event


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events: objects as JSON, texts as they are, None as a sign of life; the run ends with it."""

    def __init__(self, run: Run, events: AsyncIterator[dict[str, Any] | str | None]) -> None:
        super().__init__(self._lines(events), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self.run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):  # the client does not read: nobody to tell
                await super().__call__(scope, receive, send)
        finally:
            self.run.cancel()

    @staticmethod
    async def _lines(events: AsyncIterator[dict[str, Any] | str | None]) -> AsyncIterator[str]:
        try:
            async for event in events:
                if event is None:
                    yield ": still at work\n\n"
                else:
                    yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
        except Exception as error:  # the status is sent already
            yield f"data: {json.dumps(refusals.body(refusals.refusal(error)))}\n\n"
