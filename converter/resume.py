"""Partial sums of interrupted calibrations on disk, from which a later run resumes."""

from __future__ import annotations

import contextlib
import glob
import time
from collections.abc import Callable
from pathlib import Path

from subkv.base.errors import SubkvError, is_unavailable
from subkv.base.files import check_owner, remove
from subkv.base.interrupts import Interrupt
from subkv.base.progress import note
from subkv.format.calibration import Calibration, read_calibration, write_calibration

SAVED = "progress is saved; the same command resumes"
EVERY = 20.0  # seconds between checkpoints, each of which takes well below a second


def interrupt() -> Interrupt:
    """For work that saves its progress at Ctrl-C."""
    return Interrupt(lambda: note("stopping after the current tokens; Ctrl-C again stops at once"))


class Checkpoints:
    """The statistics stage's progress, as files NAME.DONE-of-TOTAL.part. Each is a whole calibration; the last counts.

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
        """How many of `total` batches an earlier run has done, and their sums.

        Raises SubkvError if a file cannot be read.
        """
        self._total = total
        self._interrupt = self._interrupts.enter_context(interrupt())
        for path in reversed(self._files()):
            done = int(path.name.split(".")[-2].partition("-")[0])
            if path != self._path(done, total):
                continue
            try:
                check_owner(path, "progress")
                return done, read_calibration(path)
            except SubkvError as error:
                if is_unavailable(error):
                    raise
                note(f"note: {path} cannot be resumed ({error}); starting over")
        return 0, None

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        """Call it after every batch, without sums where no run can resume. Raises KeyboardInterrupt after Ctrl-C."""
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
