"""One llama-server process behind a UNIX socket: starts it, passes requests on, watches it, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from runtime.launch.start import Start
from runtime.serve import die_with_parent
from runtime.serve.cli import serve_start
from subkv.base.errors import SubkvError

Headers = list[tuple[bytes, bytes]]
Message = dict[str, Any]  # of ASGI: http.response.start, http.response.body

STALL = 600.0  # seconds without an answer of the task queue; docs/cluster.md names it
TERM = 40.0  # seconds between SIGTERM and SIGKILL; llama-server writes its store for 30 at most
POLL = 0.05
LOST = 2.0  # seconds in which a server whose connections break is seen to have ended
LONGEST = 100  # bytes of a UNIX socket's name; Linux takes 107, macOS 103
PREFIX = "subkv-"  # of folders with sockets
STALE = 60.0  # seconds; a younger folder may be of a server that does not listen yet
# of one connection, and what httpx sets itself
HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
# of the ingress: a key is checked once
REQUEST = HOP | {b"host", b"content-length", b"expect", b"authorization", b"x-api-key"}
# would make llama-server listen in another way, or ask for a key that the ingress has checked
ELSEWHERE = (
    "AIP_MODE",
    "LLAMA_API_KEY",
    "LLAMA_ARG_API_KEY_FILE",
    "LLAMA_ARG_API_PREFIX",
    "LLAMA_ARG_SSL_CERT_FILE",
    "LLAMA_ARG_SSL_KEY_FILE",
)


@dataclass(frozen=True)
class Request:
    """target: path and query as they were sent."""

    method: str
    target: bytes
    headers: Headers
    body: bytes


class LlamaServer:
    """A llama-server that is ready for requests. close() ends it; it also ends with the thread that started it."""

    def __init__(self, process: Process, folder: Path, stall: float) -> None:
        self.process = process
        self._folder = folder
        self._stall = stall
        self._probe: asyncio.Task[None] | None = None
        self._asked: float | None = None  # when the first probe without an answer was sent
        # no connection is used twice: the server may close an idle one while a request is on its way
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(_socket(folder)), limits=limits), timeout=None, trust_env=False
        )

    @staticmethod
    async def started(flags: Sequence[str], stall: float = STALL) -> LlamaServer:
        """A server with the flags of `subkv serve`, once /health is 200. Raises SubkvError and click's errors."""
        folder = _folder()
        server = None
        try:
            given = [*flags, "--host", str(_socket(folder)), "--metrics"]
            start = await asyncio.to_thread(serve_start, given)  # may derive bases
            server = LlamaServer(await _run(start), folder, stall)
            await server._ready()
        except BaseException:
            if server is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                await server.close(0)
            raise
        return server

    async def _ready(self) -> None:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await self._get("/health")) == 200:
                    return
            if self.process.returncode is not None:
                code = self.process.returncode
                raise SubkvError("flags", f"expected a llama-server that starts, found exit code {code}; see its log")
            await asyncio.sleep(POLL)

    async def _get(self, path: str) -> int:
        request = httpx.Request("GET", f"http://localhost{path}", headers={"Connection": "close"})
        return (await self._client.send(request)).status_code

    async def answer(self, asked: Request) -> AsyncGenerator[Message, None]:
        """The answer as it comes. Closing the generator closes the connection, which frees the slot.

        Raises httpx.TransportError where the server has gone.
        """
        headers = [(name, value) for name, value in asked.headers if name.lower() not in REQUEST]
        url = httpx.URL(scheme="http", host="localhost", raw_path=asked.target)
        request = httpx.Request(asked.method, url, headers=[*headers, (b"connection", b"close")], content=asked.body)
        try:
            response = await self._client.send(request, stream=True)
            try:
                kept = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in HOP]
                yield {"type": "http.response.start", "status": response.status_code, "headers": kept}
                async for piece in response.aiter_raw():
                    yield {"type": "http.response.body", "body": piece, "more_body": True}
                yield {"type": "http.response.body", "body": b"", "more_body": False}
            finally:
                await response.aclose()
        except httpx.TransportError:
            with contextlib.suppress(asyncio.TimeoutError):  # whoever waits for the end hears of it first
                await asyncio.wait_for(self.process.wait(), LOST)
            raise

    def check(self) -> None:
        """Call it every few seconds. Raises RuntimeError where the process ended or its task queue is stuck."""
        if self.process.returncode is not None:
            raise RuntimeError(f"llama-server ended with exit code {self.process.returncode}")
        now = asyncio.get_running_loop().time()
        if self._probe is None or self._probe.done():
            self._asked = now if self._asked is None else self._asked
            self._probe = asyncio.ensure_future(self._answered())
        if self._asked is not None and now - self._asked > self._stall:
            raise RuntimeError(f"llama-server has not answered GET /metrics for {now - self._asked:.0f} s")

    async def _answered(self) -> None:
        """Unlike /health, /metrics is answered by the task queue: not while a step of the engine does not end."""
        with contextlib.suppress(httpx.TransportError):
            await self._get("/metrics")
            self._asked = None

    async def close(self, seconds: float = TERM) -> None:
        """End the process by SIGTERM: slots that hold prompts are stored. After `seconds` by SIGKILL."""
        if self._probe is not None:
            self._probe.cancel()
        try:
            self._signal(signal.SIGTERM)
            await asyncio.wait_for(self.process.wait(), seconds)
        except asyncio.TimeoutError:
            pass
        finally:
            self._signal(signal.SIGKILL)
            await self.process.wait()
            self.forget()
        await self._client.aclose()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def forget(self) -> None:
        """Remove the folder of the socket."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _folder() -> Path:
    """A new folder that only this user can enter, with a name short enough for a socket."""
    found = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(_socket(found))) > LONGEST:
        found.rmdir()
        found = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    _remove_stale(found.parent)
    return found


def _remove_stale(parent: Path) -> None:
    """Remove the folders of replicas that were killed: nobody listens there any more."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if time.time() - folder.stat().st_mtime > STALE:
                try:
                    probe.connect(str(_socket(folder)))
                except ConnectionRefusedError:
                    shutil.rmtree(folder, ignore_errors=True)


def _socket(folder: Path) -> Path:
    return folder / "llama-server.sock"  # llama-server takes a --host with this ending for a UNIX socket


async def _run(start: Start) -> Process:
    """The process, tied to this thread. Its log goes where this process writes."""
    environment = {name: value for name, value in start.environment.items() if name not in ELSEWHERE}
    command = [
        sys.executable,
        "-I",
        "-S",
        die_with_parent.__file__,
        str(os.getpid()),
        str(start.path),
        *start.arguments,
    ]
    return await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, env=environment)
