"""One llama-server process behind a UNIX socket: starts it, forwards requests, checks it, ends it."""

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

from cluster import die_with_parent
from runtime.launch.start import Start
from runtime.serve.cli import serve_start
from subkv.base.errors import SubkvError

Headers = list[tuple[bytes, bytes]]
Message = dict[str, Any]  # of ASGI: http.response.start, http.response.body

STALL = 600.0  # seconds without an answer of the task queue (README.md)
TERM = 40.0  # seconds between SIGTERM and SIGKILL; llama-server writes its store for 30 at most
POLL = 0.05
LOST = 2.0  # seconds to wait for the end of a server after its connections break
MAX_SOCKET_NAME = 100  # bytes; Linux allows 107, macOS 103
PREFIX = "subkv-"  # of names of folders with sockets
STALE = 60.0  # seconds; the server of a newer folder may not listen yet
# headers of one connection, and those that httpx sets
HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
# request headers that end at the ingress, which checks the key
REQUEST = HOP | {b"host", b"content-length", b"expect", b"authorization", b"x-api-key"}
# variables that would change how llama-server listens, or make it check the key again
REMOVED = (
    "AIP_MODE",
    "LLAMA_API_KEY",
    "LLAMA_ARG_API_KEY_FILE",
    "LLAMA_ARG_API_PREFIX",
    "LLAMA_ARG_SSL_CERT_FILE",
    "LLAMA_ARG_SSL_KEY_FILE",
)


@dataclass(frozen=True)
class Request:
    """target: path and query as sent."""

    method: str
    target: bytes
    headers: Headers
    body: bytes


class LlamaServer:
    """A llama-server that is ready for requests. It ends by close(), or with the thread that started it."""

    def __init__(self, process: Process, folder: Path, stall: float) -> None:
        self.process = process
        self._folder = folder
        self._stall = stall
        self._probe: asyncio.Task[None] | None = None
        self._probe_sent: float | None = None  # time of the first unanswered probe
        # connections are not reused: the server may close an idle one while a request is being sent
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(_socket(folder)), limits=limits), timeout=None, trust_env=False
        )

    @staticmethod
    async def started(flags: Sequence[str], stall: float = STALL) -> LlamaServer:
        """Start a server with the flags of `subkv serve` and wait for /health. Raises SubkvError and click's errors."""
        folder = _folder()
        server = None
        try:
            arguments = [*flags, "--host", str(_socket(folder)), "--metrics"]
            start = await asyncio.to_thread(serve_start, arguments)  # may derive bases
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

    async def answer(self, request: Request) -> AsyncGenerator[Message, None]:
        """Stream the answer. Closing the generator closes the connection, which frees the slot.

        Raises httpx.TransportError if the server has ended.
        """
        headers = [(name, value) for name, value in request.headers if name.lower() not in REQUEST]
        url = httpx.URL(scheme="http", host="localhost", raw_path=request.target)
        headers.append((b"connection", b"close"))
        forwarded = httpx.Request(request.method, url, headers=headers, content=request.body)
        try:
            response = await self._client.send(forwarded, stream=True)
            try:
                headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in HOP]
                yield {"type": "http.response.start", "status": response.status_code, "headers": headers}
                async for piece in response.aiter_raw():
                    yield {"type": "http.response.body", "body": piece, "more_body": True}
                yield {"type": "http.response.body", "body": b"", "more_body": False}
            finally:
                await response.aclose()
        except httpx.TransportError:
            with contextlib.suppress(asyncio.TimeoutError):  # tasks that wait for the process's end run first
                await asyncio.wait_for(self.process.wait(), LOST)
            raise

    def check(self) -> None:
        """Call it every few seconds. Raises RuntimeError if the process ended or its task queue is stuck."""
        if self.process.returncode is not None:
            raise RuntimeError(f"llama-server ended with exit code {self.process.returncode}")
        now = asyncio.get_running_loop().time()
        if self._probe is None or self._probe.done():
            self._probe_sent = now if self._probe_sent is None else self._probe_sent
            self._probe = asyncio.ensure_future(self._answered())
        if self._probe_sent is not None and now - self._probe_sent > self._stall:
            raise RuntimeError(f"llama-server has not answered GET /metrics for {now - self._probe_sent:.0f} s")

    async def _answered(self) -> None:
        """The task queue answers /metrics (unlike /health), so a step of the engine that hangs delays the answer."""
        with contextlib.suppress(httpx.TransportError):
            await self._get("/metrics")
            self._probe_sent = None

    async def close(self, seconds: float = TERM) -> None:
        """End the process by SIGTERM, so that it stores the prompts of its slots; after `seconds` by SIGKILL."""
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
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(os.fsencode(_socket(folder))) > MAX_SOCKET_NAME:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    _remove_stale(folder.parent)
    return folder


def _remove_stale(parent: Path) -> None:
    """Remove the folders of killed replicas: no process listens on their sockets."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if time.time() - folder.stat().st_mtime > STALE:
                try:
                    probe.connect(str(_socket(folder)))
                except ConnectionRefusedError:
                    shutil.rmtree(folder, ignore_errors=True)


def _socket(folder: Path) -> Path:
    return folder / "llama-server.sock"  # llama-server treats a --host with this ending as a UNIX socket


async def _run(start: Start) -> Process:
    """Start the process; it ends with this thread. Its log goes to this process's stderr."""
    environment = {name: value for name, value in start.environment.items() if name not in REMOVED}
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
