"""A busy server ends at SIGTERM, and one whose model cannot be loaded again sleeps on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import derived_numpy
import pytest
import stand_ins
import tiny
from servers import ORDINARY, Refused, Server, serving, wait_until

from subkv.native.bases import model_content, stored_path
from subkv.plan.pipeline import Options

Serve = Callable[..., Any]


@pytest.mark.parametrize("of", ["target", "draft"])
def test_bases_that_change_while_it_sleeps(of: str, words: Path, text: str, tmp_path: Path) -> None:
    """Without the requested cache, requests get an error and the server sleeps on. Stored prompts stay as they are.

    Stored bases that are gone are none: the server wakes with bases from the weights, which have no stored prompts.
    """
    draft = stand_ins.with_words(tmp_path / "draft.gguf", tiny.build(tmp_path / "tiny.gguf", seed=1))
    files = {"target": stored_bases(words), "draft": stored_bases(draft)}
    file = files[of]
    bases = file.read_bytes()
    arguments = ["-c", 1024, "-np", 1, "-ctk", "subkv", "-md", draft, "-ctkd", "subkv", "--sleep-idle-seconds", 1]
    store = {"SUBKV_STORE": str(tmp_path / "store")}
    with serving(words, *arguments, subkv="", folder=tmp_path, **store) as server:

        def asleep() -> None:
            server.wait("sleep", "/props", lambda props: props["is_sleeping"])

        before = server.complete(text[:600])
        asleep()
        file.write_bytes(bases[:-100] + b"?" * 60)
        with ThreadPoolExecutor(4) as pool:
            for answer in [pool.submit(server.complete, text[:600]) for _ in range(4)]:
                with pytest.raises(Refused, match="500: .*failed to reload model after sleeping"):
                    answer.result()
        assert server.request("GET", "/props")["is_sleeping"]
        file.write_bytes(bases)
        after = server.complete(text[:600])
        assert after["tokens"] == before["tokens"]
        assert after["timings"]["cache_n"] > before["timings"]["prompt_n"] - 64
        assert "bases: from the weights" not in server.log
        asleep()
        file.unlink()
        last = server.complete(text[:600])
        # a stored prompt has no cells of a draft model
        assert (last["timings"]["cache_n"] == 0) == (of == "target"), last["timings"]
        assert of == "target" or last["tokens"] == before["tokens"]
        assert "bases: from the weights" in server.log and ORDINARY not in server.log
    for path in files.values():
        path.unlink(missing_ok=True)


def stored_bases(model: Path) -> Path:
    """Bases in the cache folder, as `subkv convert` stores them."""
    path = stored_path(model, model_content(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    derived_numpy.sidecar(model, path, Options(kv_bits=6.0))
    return path


def test_a_routers_model_that_cannot_wake(words: Path, text: str, tmp_path: Path) -> None:
    """The router passes the error on, and the model's next request wakes it."""
    folder = tmp_path / "models"
    folder.mkdir()
    model = Path(shutil.copy(words, folder / "one.gguf"))
    arguments = ["--models-dir", folder, "-c", 1024, "-np", 1, "-ctk", "subkv", "--sleep-idle-seconds", 1]
    with serving(None, *arguments, subkv="", folder=tmp_path) as server:
        before = server.complete(text[:600], model="one")

        def status() -> str:
            return str(server.request("GET", "/models")["data"][0]["status"]["value"])

        for _ in range(2):
            wait_until("sleep", lambda: status() == "sleeping")
            model.unlink()
            for _ in range(2):
                with pytest.raises(Refused, match="failed to reload model after sleeping"):
                    server.complete(text[:600], model="one")
            shutil.copy(words, model)
            assert server.complete(text[:600], model="one")["tokens"] == before["tokens"]
        assert ORDINARY not in server.log


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("number", range(8))
def test_sigterm_ends_a_busy_server(serve: Serve, words: Path, number: int, stream: bool) -> None:
    """SIGTERM ends it at any time with 0; active and waiting requests get an error.

    With a tiny model it holds the queue's locks much of the time.
    """
    answers: list[str] = []

    def ask(server: Server) -> None:
        try:
            answers.append(str(server.complete("What is it?", 30000, stream=stream)))
        except Refused as refused:
            assert refused.status == 503
            answers.append(str(refused.body))

    with serve("-c", 32768, "-np", 1, model=words, coded=False) as server:
        threads = [threading.Thread(target=ask, args=[server]) for _ in range(2)]
        for thread in threads:
            thread.start()
        server.wait("work", "/slots", lambda slots: slots[0]["is_processing"])
        for _ in range(number):
            server.request("GET", "/slots")
        server.stop()
        for thread in threads:
            thread.join()
    assert [answer.count("the server is shutting down") for answer in answers] == [1, 1]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_second_signal_ends_it_at_once(serve: Serve, words: Path) -> None:
    with serve("-c", 256, "-np", 1, model=words, coded=False) as server:
        server.ended = True
        for sent in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.process.send_signal(sent)
        assert server.process.wait(60) == 1
        assert "Received second interrupt" in server.log
