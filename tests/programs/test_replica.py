"""The llama-server of a replica: its socket, its streams, its health, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("httpx", reason="needs the extra `cluster`")

from cluster.replica import MAX_SOCKET_NAME, LlamaServer, Request
from program_paths import program

from subkv.base.errors import SubkvError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="UNIX sockets")

SECONDS = 60.0
REPO = Path(__file__).resolve().parents[2]
# starts a server, prints its process id, and stays
OTHER = """
import asyncio, sys
from cluster.replica import LlamaServer

async def main():
    server = await LlamaServer.started(sys.argv[1:])
    print(server.process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def flags(model: Path) -> list[str]:
    program("llama-server")
    return ["-m", str(model), "-c", "2048", "-np", "1", "-t", "1", "--no-ui"]


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, 3 * SECONDS)

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def running(flags: list[str], **more: Any) -> AsyncIterator[LlamaServer]:
    server = await LlamaServer.started(flags, **more)
    try:
        yield server
    finally:
        await server.close()


def completion(n: int, prompt: Any = "One, two, three", **more: Any) -> Request:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, **more}
    return Request("POST", b"/completion", [(b"Content-Type", b"application/json")], json.dumps(body).encode())


async def complete(server: LlamaServer, request: Request) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    messages = [message async for message in server.answer(request)]
    assert [message["type"] for message in messages[1:]] == ["http.response.body"] * (len(messages) - 1)
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return messages[0]["status"], json.loads(b"".join(message["body"] for message in messages[1:]))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + SECONDS
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


def has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_answers_use_a_private_socket(flags: list[str]) -> None:
    async def work() -> None:
        async with running(flags) as server:
            folder = server._folder
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (path,) = folder.iterdir()
            assert path.is_socket() and len(str(path)) <= MAX_SOCKET_NAME
            health = await complete(server, Request("GET", b"/health?a=%20b", [(b"Host", b"elsewhere")], b""))
            assert health == (200, {"status": "ok"})
            status, answer = await complete(server, completion(8))
            assert status == 200 and answer["tokens_predicted"] == 8
            status, answer = await complete(server, completion(8, temperature="hot"))
            assert status == 400 and answer["error"]["type"] == "invalid_request_error"
            assert (await complete(server, Request("GET", b"/nothing", [], b"")))[0] == 404
            parts = [message async for message in server.answer(Request("HEAD", b"/health", [], b""))]
            assert parts[0]["status"] == 200 and not parts[-1]["body"]
        assert not folder.exists() and server.process.returncode == 0

    run(work())


def test_a_stream_is_passed_on_in_pieces(flags: list[str]) -> None:
    """The first event arrives before later ones are generated."""

    async def work() -> None:
        async with running(flags) as server:
            messages = server.answer(completion(1500, stream=True))
            start = await anext(messages)
            assert (b"content-type", b"text/event-stream") in start["headers"]
            assert b"transfer-encoding" not in dict(start["headers"])
            first = (await anext(messages))["body"]
            _, slots = await complete(server, Request("GET", b"/slots", [], b""))
            assert slots[0]["is_processing"]
            text = first + b"".join([message["body"] async for message in messages])
            last = json.loads(text.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
            assert last["stop"] and last["tokens_predicted"] == 1500

    run(work())


@pytest.mark.parametrize("stream", [True, False], ids=["a stream", "an answer"])
def test_a_disconnect_frees_the_slot(flags: list[str], stream: bool) -> None:
    async def work() -> None:
        async with running(flags) as server:

            async def busy() -> bool:
                return bool((await complete(server, Request("GET", b"/slots", [], b"")))[1][0]["is_processing"])

            async def idle() -> bool:
                return not await busy()

            async def read() -> None:
                async with contextlib.aclosing(server.answer(completion(-1, stream=stream))) as messages:
                    async for _ in messages:
                        pass

            # without an end: the context shifts
            reading = asyncio.ensure_future(read())
            await until(busy)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            await until(idle)

    run(work())


def test_a_server_that_does_not_start(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one sentence, and no process or file remains."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SubkvError, match="flags: expected a llama-server that starts, found exit code 1; see its log"):
        run(LlamaServer.started([*flags, "--no-such-option"]))
    with pytest.raises(click.ClickException, match="-m: expected a GGUF file, found no file"):
        run(LlamaServer.started(["-m", str(tmp_path / "nothing.gguf")]))
    assert not list(tmp_path.iterdir())


def test_a_long_name_of_the_temporary_folder(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))

    async def work() -> None:
        async with running(flags) as server:
            assert (await complete(server, completion(1)))[0] == 200

    run(work())
    assert not list(folder.iterdir())


def test_folders_of_replicas_that_were_killed(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are removed if no process listens; those of running replicas stay."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr("tempfile.tempdir", short)
        folders = [Path(short, f"subkv-{name}") for name in ("killed", "young", "at-work", "empty")]
        sockets = [socket.socket(socket.AF_UNIX) for _ in folders]
        for folder, sock in zip(folders, sockets, strict=True):
            folder.mkdir()
            if folder.name != "subkv-empty":
                sock.bind(str(folder / "llama-server.sock"))
            if folder.name != "subkv-young":
                os.utime(folder, (0, 0))
        sockets[2].listen()

        async def work() -> None:
            async with running(flags):
                assert [folder.exists() for folder in folders] == [False, True, True, True]

        run(work())
        for sock in sockets:
            sock.close()


def test_keys_and_addresses_of_the_environment_are_not_the_server_s(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    monkeypatch.setenv("LLAMA_ARG_API_PREFIX", "/prefix")
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")

    async def work() -> None:
        async with running(flags) as server:
            assert (await complete(server, completion(1)))[0] == 200

    run(work())


def test_a_server_that_ended_is_unhealthy(flags: list[str]) -> None:
    async def work() -> None:
        async with running(flags) as server:
            server.check()
            streaming = server.answer(completion(-1, stream=True))
            await anext(streaming)
            server.process.kill()
            with pytest.raises(Exception, match="peer closed|incomplete|disconnected|reset"):
                async for _ in streaming:
                    pass
            assert server.process.returncode == -signal.SIGKILL  # known before the stream ends
            with pytest.raises(RuntimeError, match="llama-server ended with exit code -9"):
                server.check()

    run(work())


def test_a_server_that_is_stuck_is_unhealthy(flags: list[str]) -> None:
    """It is healthy again after it answers; a stuck server is stopped by SIGKILL."""

    async def work() -> None:
        server = await LlamaServer.started(flags, stall=1.0)

        async def healthy() -> bool:
            try:
                server.check()
            except RuntimeError as error:
                assert "llama-server has not answered GET /metrics for" in str(error)
                return False
            return True

        async def stuck() -> bool:
            return not await healthy()

        try:
            server.check()
            server.process.send_signal(signal.SIGSTOP)
            await until(stuck)
            server.process.send_signal(signal.SIGCONT)
            await until(healthy)
            server.process.send_signal(signal.SIGSTOP)
        finally:
            await server.close(0.5)
        assert server.process.returncode == -signal.SIGKILL

    run(work())


def test_slots_are_stored_at_the_end(flags: list[str], tmp_path: Path) -> None:
    tokens = [20 + i % 230 for i in range(700)]

    async def turn() -> Any:
        async with running([*flags, "--store", str(tmp_path / "store")]) as server:
            return (await complete(server, completion(8, tokens, return_tokens=True)))[1]

    first, again = run(turn()), run(turn())
    assert first["timings"]["cache_n"] == 0 and again["timings"]["cache_n"] >= 400
    assert again["tokens"] == first["tokens"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_a_server_ends_with_its_replica(flags: list[str]) -> None:
    """Even if the replica is killed."""
    path = os.pathsep.join([str(REPO), str(REPO / "examples"), os.environ.get("PYTHONPATH", "")])
    replica = subprocess.Popen(
        [sys.executable, "-c", OTHER, *flags], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert replica.stdout is not None
        pid = int(replica.stdout.readline())
        assert not has_exited(pid)
    finally:
        replica.kill()
        replica.wait()

    async def ended() -> bool:
        return has_exited(pid)

    run(until(ended))
