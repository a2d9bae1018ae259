"""Work that can be interrupted: partial sums of a calibration on disk, and going on from them."""

from __future__ import annotations

import contextlib
import glob
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from subkv.base.errors import SubkvError
from subkv.base.files import remove
from subkv.base.progress import note
from subkv.format.calibration import Calibration, read_calibration, write_calibration

KEPT = "what has been done is kept: the same command goes on from there"
EVERY = 20.0  # seconds between checkpoints; writing one takes well below a second


class Stopping:
    """Ctrl-C inside the block sets `pressed` and says so; a second one is a KeyboardInterrupt.

    For work that wants to write down what is done first. Threads but the main one get no signals, and change nothing.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        note("stopping behind the tokens that are being read; Ctrl-C again stops at once")


class Keeper(Protocol):
    """What a calibration asks of whoever keeps what it has done."""

    def load(self, total: int) -> tuple[int, Calibration | None]:
        """How many of `total` batches are done, and their sums."""

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        """So many batches are done; sums None: cannot be gone on from here. May raise KeyboardInterrupt."""


class NoKeeper:
    """Everything is done at once or not at all."""

    def load(self, total: int) -> tuple[int, Calibration | None]:
        return 0, None

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        pass


class Checkpoints:
    """Partial sums as files NAME.DONE-of-TOTAL.part: each is a calibration, whole or not there; the last counts.

    From load() to the end of the block Ctrl-C waits for the batch that is running; then what is done is written, and
    KeyboardInterrupt raised. A second one is that at once.
    """

    def __init__(self, name: Path) -> None:
        self._name = name
        self._stopping = contextlib.ExitStack()
        self._written = time.monotonic()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.close()

    def _path(self, done: int, total: int) -> Path:
        return self._name.with_name(f"{self._name.name}.{done:06d}-of-{total:06d}.part")

    def _found(self) -> list[Path]:
        return sorted(self._name.parent.glob(f"{glob.escape(self._name.name)}.*.part"))

    def load(self, total: int) -> tuple[int, Calibration | None]:
        self._total = total
        self._stop = self._stopping.enter_context(Stopping())
        for path in reversed(self._found()):
            done = int(path.name.split(".")[-2].partition("-")[0])
            if path != self._path(done, total):
                continue
            try:
                return done, read_calibration(path)
            except SubkvError as error:
                note(f"note: {path} cannot be gone on from ({error}); what it held is done again")
        return 0, None

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        stop = self._stop.pressed
        if sums is not None and (stop or time.monotonic() - self._written > EVERY):
            write_calibration(self._path(done, self._total), sums())
            for path in self._found():
                if path != self._path(done, self._total):
                    remove(path)
            self._written = time.monotonic()
        if stop:
            if self._found():
                note(KEPT)
            raise KeyboardInterrupt

    def clear(self) -> None:
        """Remove all files: the whole is written."""
        for path in self._found():
            remove(path)
