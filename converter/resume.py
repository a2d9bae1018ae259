"""Work that can be interrupted: a calibration's partial sums on disk, from which a later run resumes."""

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

SAVED = "progress is saved; run the same command again to resume"
EVERY = 20.0  # seconds between checkpoints; writing one takes well below a second


class Interrupt:
    """The first Ctrl-C inside the block only sets `pressed` and is reported; the second one raises KeyboardInterrupt.

    For work that saves its progress first. Only the main thread gets signals; in others this does nothing.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
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
        note("stopping after the current tokens; Ctrl-C again stops at once")


class CheckpointStore(Protocol):
    """Where the statistics stage saves its progress."""

    def load(self, total: int) -> tuple[int, Calibration | None]:
        """How many of `total` batches are done, and their sums."""

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        """So many batches are done; sums None: no run can resume here. May raise KeyboardInterrupt."""


class NoCheckpoints:
    """Saves nothing."""

    def load(self, total: int) -> tuple[int, Calibration | None]:
        return 0, None

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        pass


class Checkpoints:
    """Partial sums as files NAME.DONE-of-TOTAL.part: each is a calibration, complete or absent; the last one counts.

    From load() to the end of the block, Ctrl-C waits for the current batch, saves the sums and raises
    KeyboardInterrupt. A second Ctrl-C raises it at once.
    """

    def __init__(self, name: Path) -> None:
        self._name = name
        self._interrupts = contextlib.ExitStack()
        self._written = time.monotonic()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._interrupts.close()

    def _path(self, done: int, total: int) -> Path:
        return self._name.with_name(f"{self._name.name}.{done:06d}-of-{total:06d}.part")

    def _files(self) -> list[Path]:
        return sorted(self._name.parent.glob(f"{glob.escape(self._name.name)}.*.part"))

    def load(self, total: int) -> tuple[int, Calibration | None]:
        self._total = total
        self._interrupt = self._interrupts.enter_context(Interrupt())
        for path in reversed(self._files()):
            done = int(path.name.split(".")[-2].partition("-")[0])
            if path != self._path(done, total):
                continue
            try:
                return done, read_calibration(path)
            except SubkvError as error:
                note(f"note: {path} cannot be resumed ({error}); starting over")
        return 0, None

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        stop = self._interrupt.pressed
        if sums is not None and (stop or time.monotonic() - self._written > EVERY):
            write_calibration(self._path(done, self._total), sums())
            for path in self._files():
                if path != self._path(done, self._total):
                    remove(path)
            self._written = time.monotonic()
        if stop:
            if self._files():
                note(SAVED)
            raise KeyboardInterrupt

    def clear(self) -> None:
        """Remove all files, after the whole calibration is written."""
        for path in self._files():
            remove(path)
