"""Sees work that makes no progress."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Watchdog:
    """Watches steps of one thread. limit: seconds for a step; on_stall: called once, in another thread, beyond them."""

    def __init__(self, limit: float, on_stall: Callable[[str], None]) -> None:
        self.limit = limit
        self._on_stall = on_stall
        self._began: float | None = None
        self._told: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The thread that is watched works here."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    @property
    def stalled(self) -> str | None:
        """What is wrong, a sentence; None: nothing."""
        began = self._began
        seconds = 0.0 if began is None else time.monotonic() - began
        if seconds <= self.limit:
            return None
        return f"the engine has made no progress for {seconds:.0f} s (--stall-timeout {self.limit:g})"

    def _watch(self) -> None:
        while not self._closed.wait(min(self.limit / 4, 1.0)):
            began, reason = self._began, self.stalled
            if reason and began != self._told:
                self._told = began
                self._on_stall(reason)
