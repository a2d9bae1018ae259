"""A server in a thread of the test's process, on a free port."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from runtime.serve.app import create_app
from runtime.serve.batching import Engine
from runtime.serve.grammars import MIB, Grammars
from runtime.serve.guard import Hosts
from runtime.serve.recall import prefixes_of
from runtime.serve.server import Server, configuration
from runtime.serve.service import Service
from runtime.serve.settings import Limits, Remembering
from runtime.serve.slots_llama import SlotsLlama


@dataclasses.dataclass
class Served:
    """A running server: its address, a client, and the service behind it."""

    url: str
    client: Any
    service: Any

    def idle(self, seconds: float = 20.0) -> bool:
        """Whether every slot becomes idle within that time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not any(slot["is_processing"] for slot in self.client.get("/slots").json()):
                return True
            time.sleep(0.05)
        return False


@contextlib.contextmanager
def running(
    model: Path,
    n_slots: int = 4,
    n_ctx: int = 2048,
    keys: tuple[str, ...] = (),
    name: str = "tiny",
    folder: Path | None = None,
    embeddings: bool = False,
    limits: dict[str, Any] | None = None,
    hosts: tuple[str, ...] = (),
    log: str = "none",
    remembering: Remembering | None = None,
    **kwargs: Any,
) -> Iterator[Served]:
    kwargs = {"n_batch": 256, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | kwargs
    llm = SlotsLlama(model, n_slots=n_slots, n_ctx=n_ctx, embedding=embeddings, **kwargs)
    with llm, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # so that who does not read is soon noticed
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        bounds = Limits(**(limits or {}))
        grammars = Grammars(llm.model_path, llm.n_vocab(), bounds.grammar_timeout, bounds.grammar_memory * MIB)
        prefixes = None if remembering is None else prefixes_of(llm, remembering)
        engine = Engine(llm, bounds.stall_timeout, grammars, prefixes=prefixes)
        shared = remembering is not None and remembering.shared_cache
        service = Service(engine, name, bounds, embeddings, folder, shared)
        config = configuration(create_app(service, list(keys), Hosts(hosts), hosts, log), bounds)
        config.timeout_graceful_shutdown = 2
        server = Server(config, service.engine)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
            with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
                yield Served(url, client, service)
        finally:
            server.should_exit = True
            thread.join()
