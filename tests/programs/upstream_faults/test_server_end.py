"""A busy server ends at SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Refused, Server

Serve = Callable[..., Any]


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
