"""Calls of what may never answer: another machine's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import TypeVar

T = TypeVar("T")

N_LATE = 4  # late calls that may hang at a time: each holds a thread
PAUSE_SECONDS = 10.0  # that nothing is asked after a call that came too late


class Deadline:
    """Runs calls in threads of their own and waits `seconds` for each. Several threads may use it."""

    def __init__(self, seconds: float, pause: float = PAUSE_SECONDS) -> None:
        self.seconds, self.pause = seconds, pause
        self._lock = threading.Lock()
        self._hanging = 0
        self._closed_until = 0.0

    def call(self, work: Callable[[], T]) -> T:
        """What work() returns. Raises FileNotFoundError as it does, OSError for all else, also where it is late.

        After a late call everything is refused at once for a while, and as long as N_LATE of them hang.
        """
        with self._lock:
            if self._hanging >= N_LATE or time.monotonic() < self._closed_until:
                raise OSError("it did not answer in time a moment ago")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            with self._lock:
                self._hanging -= late.is_set()

        late = threading.Event()
        try:
            threading.Thread(target=run, name="store", daemon=True).start()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        try:
            return future.result(self.seconds)
        except LateError as error:
            if future.done():  # its own timeout
                raise OSError(f"{type(error).__name__}: {error}") from error
            with self._lock:
                self._closed_until = time.monotonic() + self.pause
                if not future.done():
                    late.set()
                    self._hanging += 1
            raise OSError(f"expected an answer within {self.seconds:g} s, found none") from None
        except OSError:
            raise
        except Exception as error:  # of a plugin's own kind
            raise OSError(f"{type(error).__name__}: {error}") from error
