"""A server in a thread of the test's process, on a free port."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
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

SYSTEM = "You are a clerk who answers in few words and never lies about what was said before. " * 4
# models and caches whose memory can be cut in different ways
KINDS = [
    ("llama", "f16"),
    ("llama", "q8_0"),
    ("llama", "subkv"),
    ("gemma2", "subkv"),
    ("gemma2", "f16"),
    ("lfm2", "subkv"),
    ("lfm2", "f16"),
]


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


def waited(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


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
    listening: socket.socket | None = None,
    **kwargs: Any,
) -> Iterator[Served]:
    kwargs = {"n_batch": 256, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | kwargs
    llm = SlotsLlama(model, n_slots=n_slots, n_ctx=n_ctx, embedding=embeddings, **kwargs)
    with llm, listening or socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # so that who does not read is soon noticed
        if listening is None:
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


def model_of(arch: str, cache: str, coded_model: Callable[..., Path], tiny_model: Callable[..., Path]) -> Path:
    return coded_model() if (arch, cache) == ("llama", "subkv") else tiny_model(arch)


def dearly(served: Served) -> Served:
    """With the fixture `dear`: a token costs a second to evaluate, and nothing to restore."""
    prefixes = served.service.engine.recall.prefixes
    prefixes.evaluating.seconds = 1.0
    for pace in (prefixes.setting, *prefixes.reading.values()):
        pace.seconds = 0.0
    return served


def ask(served: Served, prompt: str, n: int = 8, key: str | None = None) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not evaluated."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0}
    answer = served.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == found["timings"]["cache_n"]
    return found["choices"][0]["text"], cached
