"""A request at work: its place in the queue, its worker thread, and what comes out of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.serve import refusals
from runtime.serve.completion import RequestLlama
from runtime.serve.guard import Places, disconnected
from runtime.serve.task import CancelledError

PING_SECONDS = 15.0

STARTED, END = object(), object()


class Run:
    """Calls `work` for each of `llms`, the choices of a request, in a thread of its own once there is a place.

    work returns the answer, or an iterator of chunks. A place is held until its thread has ended, whoever listens.
    """

    def __init__(
        self,
        places: Places,
        pool: ThreadPoolExecutor,
        llms: Sequence[RequestLlama],
        work: Callable[[RequestLlama], Any],
    ) -> None:
        places.enter(len(llms))
        self.llms = llms
        self._work = work
        self._pool = pool
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._working = [False] * len(llms)
        self._tasks = [asyncio.create_task(self._go(i)) for i in range(len(llms))]

    async def _go(self, i: int) -> None:
        llm = self.llms[i]
        async with self._places.place(-1 if llm.choice else llm.asked.id_slot):
            self._working[i] = True
            await self._loop.run_in_executor(self._pool, self._in_thread, i)

    def _in_thread(self, i: int) -> None:
        def tell(event: Any) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (i, event))

        try:
            result = self._work(self.llms[i])
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
        """Nobody listens any more: leave the queue, or give the slots back."""
        for llm, working, task in zip(self.llms, self._working, self._tasks, strict=True):
            if working:
                llm.cancel()
            else:
                task.cancel()

    async def answers(self, receive: Receive) -> list[Any]:
        """One of each, in their order, or STARTED alone once the first of several streams is.

        Raises what the work raised; CancelledError when the client has gone.
        """
        answers: dict[int, Any] = {}
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            while len(answers) < len(self.llms):
                i, found = await self._unless(gone)
                if found is STARTED:
                    return [STARTED]
                answers[i] = found
        except BaseException:
            self.cancel()
            raise
        finally:
            gone.cancel()
        return [answers[i] for i in sorted(answers)]

    async def _unless(self, gone: asyncio.Future[Any]) -> tuple[int, Any]:
        """The next event. Raises CancelledError when `gone` is done first."""
        event: asyncio.Future[Any] = asyncio.ensure_future(self._events.get())
        try:
            await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                raise CancelledError
            i, found = event.result()
            return i, self._checked(found)
        finally:
            event.cancel()

    async def event(self, receive: Receive) -> Any:
        """The only answer, or STARTED."""
        return (await self.answers(receive))[0]

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """What follows STARTED, of all choices as it comes; None after every PING_SECONDS without a chunk."""
        n_ended = 0
        while n_ended < len(self.llms):
            try:
                _, event = await asyncio.wait_for(self._events.get(), PING_SECONDS)
            except asyncio.TimeoutError:
                yield None
                continue
            if self._checked(event) is END:
                n_ended += 1
            elif event is not STARTED:
                yield event

    @staticmethod
    def _checked(event: Any) -> Any:
        if isinstance(event, Exception):
            raise event
        return event


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
                    if isinstance(event, dict) and "type" in event:  # of a response
                        yield f"event: {event['type']}\n"
                    yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
        except Exception as error:  # the status is sent already
            yield f"data: {json.dumps(refusals.body(refusals.refusal(error)))}\n\n"
