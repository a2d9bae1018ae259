"""Ctrl-C as a request to stop at the next safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class Interrupt:
    """Inside the block the first Ctrl-C only sets `pressed` and calls on_press; a second one raises KeyboardInterrupt.

    Python delivers signals to the main thread only: in other threads, Ctrl-C keeps its effect. Blocks may follow one
    another; each starts with `pressed` False.
    """

    def __init__(self, on_press: Callable[[], None] = lambda: None) -> None:
        self.pressed = False
        self._on_press = on_press
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self.pressed = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _press(self, number: int, frame: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._on_press()
