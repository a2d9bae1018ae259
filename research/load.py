"""Load on llama-server, or another server of OpenAI's API, of this machine: errors, latencies, memory, as a table.

python -m research.load --url http://127.0.0.1:8080 -r 1000 -j 1000 -n 8 --pid PID
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import io
import ipaddress
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np

from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.base.progress import progress_bar

TIMEOUT_SECONDS = 3600


@dataclasses.dataclass(frozen=True)
class Reply:
    """status 0: no whole answer came. Seconds from the first byte sent to the last received."""

    status: int
    body: bytes
    seconds: float


class _Received:
    """Bytes in the place of a socket, for http.client to read an answer from."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


def parsed(data: bytes) -> tuple[int, bytes]:
    """Status and body of an answer; 0 where it is none, or not whole."""
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    if b"\r\n\r\n" not in data:
        return 0, b""
    try:
        response.begin()
        return response.status, response.read()
    except (http.client.HTTPException, ValueError):
        return 0, b""


async def request(host: str, port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
    """One request over a connection of its own."""
    start = time.perf_counter()
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    status, received = 0, b""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"{head}\r\n".encode() + data)
            status, received = parsed(await reader.read())
        finally:
            writer.close()
    return Reply(status, received, time.perf_counter() - start)


async def post(host: str, port: int, path: str, body: dict[str, Any]) -> Reply:
    return await request(host, port, "POST", path, body)


async def load(host: str, port: int, path: str, bodies: list[dict[str, Any]], n_parallel: int) -> list[Reply]:
    """All requests, at most n_parallel at a time; replies in the order of `bodies`."""
    places = asyncio.Semaphore(n_parallel)
    with progress_bar("requests", len(bodies), "req") as bar:

        async def one(body: dict[str, Any]) -> Reply:
            async with places:
                reply = await asyncio.wait_for(post(host, port, path, body), TIMEOUT_SECONDS)
            bar.update(1)
            return reply

        return await asyncio.gather(*(one(body) for body in bodies))


def local(url: str) -> tuple[str, int]:
    """Host and port. Raises UsageError about --url where that is not this machine."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    if not here:
        raise click.UsageError(f"--url: expected an address of this machine, found {url}")
    return host, port


def resident_mib(pid: int) -> float:
    """Resident memory of a process, in MiB. Raises OSError."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def row(replies: list[Reply], seconds: float, memory: tuple[float, float] | None) -> str:
    """The table: one line of numbers."""
    answered = [reply for reply in replies if reply.status == 200]
    counts = Counter(reply.status for reply in replies if reply.status != 200)
    errors = ", ".join(f"{n} × {status or 'no answer'}" for status, n in sorted(counts.items())) or "0"
    times = np.array([reply.seconds for reply in answered] or [np.nan])
    n_tokens = sum(json.loads(reply.body)["usage"]["completion_tokens"] for reply in answered)
    rss = f"{memory[0]:.0f} → {memory[1]:.0f}" if memory else ""
    return (
        "| requests | answered | errors | p50 s | p99 s | requests/s | tokens/s | RSS MiB |\n"
        "|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        f"| {len(replies)} | {len(answered)} | {errors} | {np.percentile(times, 50):.3f} | "
        f"{np.percentile(times, 99):.3f} | {len(answered) / seconds:.1f} | {n_tokens / seconds:.1f} | {rss} |"
    )


@command()
@click.option("--url", default="http://127.0.0.1:8080", help="a server of this machine")
@click.option("-r", "--requests", "n_requests", type=click.IntRange(1, 10000), default=1000)
@click.option("-j", "--parallel", "n_parallel", type=click.IntRange(1, 2000), default=1000, help="requests at a time")
@click.option("-n", "--n-predict", type=click.IntRange(1, 4096), default=8, help="tokens of an answer")
@click.option("-p", "--prompt", default="Request number {i}: what comes after {i}?", help="{i}: the request's number")
@click.option("--pid", type=int, help="the server's process, for its memory")
def main(url: str, n_requests: int, n_parallel: int, n_predict: int, prompt: str, pid: int | None) -> None:
    """Send chat requests to a server on the loopback interface and print one line of a table."""
    host, port = local(url)
    bodies = [
        {"messages": [{"role": "user", "content": prompt.replace("{i}", str(i))}], "max_tokens": n_predict, "seed": i}
        for i in range(n_requests)
    ]
    try:
        before = resident_mib(pid) if pid else 0.0
        start = time.perf_counter()
        replies = asyncio.run(load(host, port, "/v1/chat/completions", bodies, n_parallel))
        seconds = time.perf_counter() - start
        memory = (before, resident_mib(pid)) if pid else None
    except OSError as error:
        raise SubkvError("pid", f"cannot read the memory of process {pid}: {error.strerror}") from error
    click.echo(row(replies, seconds, memory))


if __name__ == "__main__":
    main()
