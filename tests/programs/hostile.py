"""A real llama-server, and a client with a deadline for every exchange."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subkv.native import library

SECONDS = 60.0
"""Deadline of an exchange. Answers take milliseconds."""
N_STARTING = 600
LARGEST = 3 << 30
"""Limit of the peak memory of a server with a tiny model, in bytes."""
ADDRESS_SPACE = 24 << 30
"""Limit of its address space in bytes: a larger allocation fails and does not harm other processes."""


class Failed(AssertionError):
    """The server ended, or did not answer before the deadline."""


@dataclass(frozen=True)
class Answer:
    """Status and body of an answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


def binary() -> Path | None:
    """llama-server next to the libraries, or in the folder of programs next to theirs; None if it is not built."""
    folder = library.lib_dir()
    name = "llama-server.exe" if os.name == "nt" else "llama-server"
    return next((path for path in (folder / name, folder.parent / "bin" / name) if path.is_file()), None)


def receive(sock: socket.socket, deadline: float) -> bytes:
    """All bytes until the other side closes the connection. Raises Failed at the deadline (time.monotonic())."""
    pieces = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Failed(f"the answer did not end in time; {sum(map(len, pieces))} bytes received")
        sock.settimeout(left)
        try:
            piece = sock.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            return b"".join(pieces)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


def parse(data: bytes) -> Answer:
    """Parse an HTTP answer. Raises Failed if it is invalid."""
    status_line = re.match(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", data)
    if not status_line:
        raise Failed(f"expected an HTTP answer, found {data[:100]!r}")
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            n = int(size, 16)
            body, rest = body + rest[:n], rest[n + 2 :]
            if n == 0:
                break
    return Answer(int(status_line[1]), body)


class Server:
    """llama-server in a new process on loopback. `with` waits until it is ready, and kills it at the end."""

    def __init__(self, model: Path, folder: Path, *options: str, env: dict[str, str] | None = None) -> None:
        path = binary()
        assert path is not None
        self.log = folder / "llama-server.log"
        self.command = [str(path), "-m", str(model), "--port", "0", "--host", "127.0.0.1", "-t", "1", *options]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "SUBKV"))}
        self.env = inherited | (env or {})
        self.address = ("127.0.0.1", 0)

    def __enter__(self) -> Server:
        import resource  # not on Windows

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env, preexec_fn=limited
            )
        for _ in range(N_STARTING):
            listening = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log_tail())
            if listening:
                self.address = ("127.0.0.1", int(listening[1]))
                if self.ask("GET", "/health").status == 200:
                    return self
            self.alive()
            time.sleep(0.1)
        self.__exit__()
        raise Failed(f"it did not start: {self.log_tail()}")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def log_tail(self, n: int = 4000) -> str:
        """The end of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - n))
            return log.read().decode("utf-8", "replace")

    def alive(self) -> None:
        """Raises Failed if the process has ended."""
        if self.process.poll() is not None:
            raise Failed(f"llama-server ended with {self.process.returncode}: {self.log_tail()}")

    def peak(self) -> int:
        """Peak memory so far, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        line = re.search(r"VmHWM:\s*(\d+) kB", status)
        assert line
        return int(line[1]) << 10

    def connect(self, seconds: float = SECONDS) -> socket.socket:
        return socket.create_connection(self.address, timeout=seconds)

    def send(self, method: str, path: str, content: bytes = b"", headers: str = "") -> socket.socket:
        """Sends a request; returns its connection."""
        sock = self.connect()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        with contextlib.suppress(ConnectionError):  # refused before it was read; the answer has the reason
            sock.sendall(head.encode() + b"\r\n" + content)
        return sock

    def ask(
        self, method: str, path: str, content: bytes | Any = b"", headers: str = "", seconds: float = SECONDS
    ) -> Answer:
        """One request and its answer. content: bytes, or an object to send as JSON. Raises Failed."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        deadline = time.monotonic() + seconds
        try:
            with self.send(method, path, data, headers) as sock:
                return parse(receive(sock, deadline))
        except OSError as error:
            self.alive()
            raise Failed(f"no connection: {error}") from error
        except Failed:
            time.sleep(0.5)  # a process may outlive its connections
            self.alive()
            raise

    def check_health(self) -> None:
        """Raises AssertionError unless it is healthy, answers a short request, and is within LARGEST."""
        self.alive()
        health = self.ask("GET", "/health")
        assert health.status == 200, health.text
        answer = self.ask(
            "POST", "/completion", {"prompt": "the", "n_predict": 2, "temperature": 0, "ignore_eos": True}
        )
        assert answer.status == 200, answer.text
        assert json.loads(answer.body)["tokens_predicted"] == 2
        assert self.peak() <= LARGEST, f"it took {self.peak() >> 20} MiB"
