"""Hours of mixed clients on a llama-server of this machine: what grows, and whether answers get slower, as two tables.

subkv serve --slot-save-path DIR --metrics -np 4 &
python -m research.soak --url http://127.0.0.1:8080 --pid PID --minutes 120
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from research.load import Reply, local, request, resident_mib
from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.base.progress import progress_bar

LIMIT_SECONDS = 300.0  # of one request
# what comes of each kind, of others 200; conversations fill their slot
EXPECTED = {"refused": {400}, "conversation": {200, 400}}
MONITORED = ("/health", "/slots", "/props", "/v1/models", "/metrics")


@dataclasses.dataclass
class Soak:
    """What happened until now. samples: (seconds, RSS MiB, files, threads); replies: (seconds of the end, reply)."""

    host: str
    port: int
    n_predict: int
    n_slots: int
    end: float
    start: float = dataclasses.field(default_factory=time.monotonic)
    samples: list[tuple[float, float, int, int]] = dataclasses.field(default_factory=list)
    replies: list[tuple[float, Reply]] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)

    def now(self) -> float:
        return time.monotonic() - self.start

    async def ask(self, kind: str, path: str, body: dict[str, Any] | None) -> Reply:
        """body None: a GET."""
        method = "GET" if body is None else "POST"
        reply = await asyncio.wait_for(request(self.host, self.port, method, path, body), LIMIT_SECONDS)
        self.counts[kind] += 1
        if reply.status not in EXPECTED.get(kind, {200}):
            self.faults[f"{kind}: {reply.status or 'no answer'}"] += 1
        return reply

    def chat(self, text: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        return {"messages": text, "max_tokens": self.n_predict, **more}

    #
    # clients: what one does again and again
    #

    async def short(self, i: int) -> None:
        """A question. Only these are timed: what they ask does not change."""
        body = self.chat([{"role": "user", "content": f"What comes after {i % 100}?"}], seed=i)
        self.replies.append((self.now(), await self.ask("short", "/v1/chat/completions", body)))

    async def conversation(self, i: int) -> None:
        """Turns on the same beginning, so that prefixes are found and restored; every conversation is another one."""
        messages = [
            {"role": "user", "content": f"Conversation {i}. " + "Some more of the story. " * random.randint(1, 40)}
        ]
        for turn in range(4):
            reply = await self.ask("conversation", "/v1/chat/completions", self.chat(messages))
            if reply.status != 200:
                return
            answer = json.loads(reply.body)["choices"][0]["message"]["content"] or "."
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"And then, {turn}?"}]

    async def disconnecting(self, i: int) -> None:
        """Leaves in the middle of an answer, or before it."""
        await self.stream("gone", i, n_pieces=random.randint(0, 3), pause=0.0)

    async def slow(self, i: int) -> None:
        """Reads an answer in small pieces, with pauses."""
        await self.stream("slow", i, n_pieces=10_000, pause=0.05)

    async def stream(self, kind: str, i: int, n_pieces: int, pause: float) -> None:
        body = json.dumps(self.chat([{"role": "user", "content": f"Tell a tale of {i}."}], stream=True)).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            for _ in range(n_pieces):
                if not await asyncio.wait_for(reader.read(64), LIMIT_SECONDS):
                    break
                await asyncio.sleep(pause)
            self.counts[kind] += 1
        finally:
            writer.close()

    async def slots(self, i: int) -> None:
        """Saves a slot, empties it, restores it, each once it is not at work."""
        slot = i % self.n_slots
        for action in ("save", "erase", "restore"):
            await self.ask("slots", f"/slots/{slot}?action={action}", {"filename": f"soak-{slot}"})
        await asyncio.sleep(1)

    async def monitor(self, i: int) -> None:
        """What watches a server."""
        await self.ask("monitor", MONITORED[i % len(MONITORED)], None)
        await asyncio.sleep(0.2)

    async def refused(self, i: int) -> None:
        """What cannot be."""
        bad: list[dict[str, Any]] = [{"grammar": "root ::= ("}, {"temperature": "warm"}, {"n": -1}]
        await self.ask("refused", "/completion", {"prompt": "a", "n_predict": 1, **bad[i % 3]})
        await asyncio.sleep(1)

    async def again(self, client: Callable[[int], Awaitable[None]], first: int, step: int) -> None:
        for i in itertools.count(first, step):
            if time.monotonic() > self.end:
                return
            try:
                await client(i)
            except (OSError, asyncio.TimeoutError) as error:
                self.faults[f"{client.__name__}: {type(error).__name__}"] += 1
                await asyncio.sleep(1)

    async def watch(self, pid: int, every: float) -> None:
        """Samples the process."""
        with progress_bar("soak", int(self.end - time.monotonic()), "s") as bar:
            while time.monotonic() < self.end:
                n_threads = len(os.listdir(f"/proc/{pid}/task"))
                self.samples.append((self.now(), resident_mib(pid), len(os.listdir(f"/proc/{pid}/fd")), n_threads))
                await asyncio.sleep(every)
                bar.update(int(every))

    async def run(self, pid: int, every: float, n_each: int) -> None:
        clients = [self.short, self.conversation, self.disconnecting, self.slow]
        tasks = [self.again(client, k, n_each) for client in clients for k in range(n_each)]
        if self.n_slots:
            tasks.append(self.again(self.slots, 0, 1))
        tasks += [self.again(client, 0, 1) for client in (self.refused, self.monitor)]
        await asyncio.gather(self.watch(pid, every), *tasks)


def growth(samples: list[tuple[float, float, int, int]]) -> list[tuple[float, float, float]]:
    """(first, last, slope per hour) of every column, from a quarter of the time on: before that caches fill."""
    table = np.array(samples, dtype=np.float64)
    later = table[table[:, 0] >= table[-1, 0] / 4]
    hours = later[:, 0] / 3600
    return [
        (float(later[0, k]), float(later[-1, k]), float(np.polyfit(hours, later[:, k], 1)[0]) if len(later) > 1 else 0)
        for k in range(1, table.shape[1])
    ]


def quarters(replies: list[tuple[float, Reply]], seconds: float) -> list[tuple[int, float, float]]:
    """(answers, p50, p99 in seconds) of the first and of the last quarter."""
    found = []
    for first, last in ((0.0, seconds / 4), (3 * seconds / 4, float("inf"))):
        times = [reply.seconds for end, reply in replies if first <= end < last and reply.status == 200]
        p50, p99 = np.percentile(times, [50, 99]) if times else (np.nan, np.nan)
        found.append((len(times), float(p50), float(p99)))
    return found


def tables(soak: Soak, seconds: float) -> str:
    requests = ", ".join(f"{n} {kind}" for kind, n in sorted(soak.counts.items()))
    faults = ", ".join(f"{n} × {kind}" for kind, n in sorted(soak.faults.items())) or "none"
    lines = [f"{seconds / 60:.0f} minutes: {requests}; faults: {faults}", ""]
    lines += ["| process | after a quarter | at the end | slope per hour |", "|---|---:|---:|---:|"]
    for name, (first, last, slope) in zip(("RSS MiB", "open files", "threads"), growth(soak.samples), strict=True):
        lines.append(f"| {name} | {first:.0f} | {last:.0f} | {slope:+.1f} |")
    lines += ["", "| short requests | answered | p50 s | p99 s |", "|---|---:|---:|---:|"]
    for name, (n, p50, p99) in zip(("first quarter", "last quarter"), quarters(soak.replies, seconds), strict=True):
        lines.append(f"| {name} | {n} | {p50:.2f} | {p99:.2f} |")
    return "\n".join(lines)


@command()
@click.option("--url", default="http://127.0.0.1:8080", help="a server of this machine")
@click.option("--pid", type=int, required=True, help="the server's process")
@click.option("--minutes", type=click.FloatRange(0.05, 1440), default=120.0)
@click.option("-j", "--parallel", "n_each", type=click.IntRange(1, 64), default=2, help="clients of each kind")
@click.option("-n", "--n-predict", type=click.IntRange(1, 4096), default=16, help="tokens of an answer")
@click.option("-np", "--slots", "n_slots", type=click.IntRange(0, 64), default=0, help="slots to save and restore")
@click.option("--every", type=click.FloatRange(0.1, 600), default=10.0, help="seconds between samples")
def main(url: str, pid: int, minutes: float, n_each: int, n_predict: int, n_slots: int, every: float) -> None:
    """Ask a server on the loopback interface in many ways, politely or not, and print what grew.

    Clients that leave, read slowly, go on with conversations, ask for what cannot be, watch (the server needs
    --metrics), and (--slots, for a server with --slot-save-path) save and restore slots. Exits with 1 where an answer
    was not what it had to be.
    """
    host, port = local(url)
    if not Path(f"/proc/{pid}/task").exists():
        raise SubkvError("pid", f"expected a process of this machine, found none with number {pid}")
    soak = Soak(host, port, n_predict, n_slots, time.monotonic() + 60 * minutes)
    with contextlib.suppress(FileNotFoundError):  # the server ended: what was seen until then
        asyncio.run(soak.run(pid, every, n_each))
    click.echo(tables(soak, min(soak.now(), 60 * minutes)))  # slow clients end later
    if not Path(f"/proc/{pid}/task").exists():
        raise SubkvError("pid", "expected the server to go on, found that it has ended")
    if soak.faults:
        raise SubkvError("url", "expected every answer to be what it had to be, found the faults above")


if __name__ == "__main__":
    main()
