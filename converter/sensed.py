"""Running sensing.py for `convert MODEL`: on which text, for how long, and going on after an interrupt."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from converter import builtin
from converter.corpus import Text, cut
from converter.correcting import PLANNED
from converter.decoded import SCORED, Unpredictable
from converter.effort import WHOLE, Effort
from converter.resume import EVERY, KEPT, Stopping
from converter.sense import ahead, n_measured, sense
from converter.sensing import n_trials
from converter.session import Session
from converter.trials import VERSION, Found
from subkv.base.errors import SubkvError
from subkv.base.files import atomic_file
from subkv.base.progress import duration, expect, note
from subkv.format.calibration import Calibration, TextSource
from subkv.native.gguf import Gguf

SHORT = 512  # tokens of most of builtin.MEASURED: many kinds, rather than long ones
CHUNKS, LONG = 5, 1088  # of other text, and tokens of each: n_measured of them are measured


@dataclass(frozen=True)
class Measuring:
    """texts None: the built-in ones. n_ctx: most tokens of a chunk. n_recent: of the exact window. minutes None: no
    limit. kept: file of interrupted work. short: as of CalibrationRequest. effort: of the model."""

    texts: Sequence[Text] | None
    n_ctx: int
    n_threads: int
    n_recent: int
    minutes: float | None
    kept: Path
    short: bool = True
    effort: Effort = WHOLE

    @property
    def lengths(self) -> list[int]:
        """Most tokens of every chunk."""
        least = 2 * self.n_recent + 4 * SCORED
        short, long, far = (min(max(n, least), self.n_ctx) for n in (SHORT, LONG, self.effort.far))
        if self.texts is not None:
            return [long] * max(CHUNKS, len(self.texts))
        if not self.short:
            return [long] * builtin.MEASURED
        return [short] * (builtin.MEASURED - len(builtin.LONGER)) + [far] * len(builtin.LONGER)


def sensed(model: Path, calibration: Calibration, how: Measuring) -> tuple[Calibration, bool]:
    """The calibration with sensitivities, and whether there was time for all; what is not complete is kept.

    Raises SubkvError where there can be none, and KeyboardInterrupt after what is done was written.
    """
    with Gguf(model) as base, Session(model, max(how.lengths), how.n_threads, calibration.n_skip) as session:
        chunks, texts = _chunks(session, how)
        lengths = [len(chunk) for chunk in chunks]
        measured = texts[: n_measured(lengths)]
        found = _earlier(how.kept, calibration, measured, lengths) or Found.none(calibration)
        _foretell(session, how, len(calibration.layers), found)
        with Stopping() as stopping:
            keep = Keeping(how.kept, stopping, lengths)
            try:
                result = sense(
                    session,
                    base,
                    calibration,
                    chunks,
                    how.n_recent,
                    how.n_threads,
                    how.minutes,
                    found,
                    keep,
                    True,
                    texts,
                    how.kept.parent,
                    how.effort,
                )
            except SubkvError as error:
                if stopping.pressed:
                    keep(found)
                if isinstance(error, Unpredictable):
                    minutes = math.inf if how.minutes is None else how.minutes
                    _write(how.kept, found, lengths, minutes, error.reason)
                raise
            keep(found)
        n = n_trials(len(calibration.layers), how.effort)
        complete = len(found.trials) >= n and len(found.done) >= n_measured(lengths)
        if not complete:
            _write(how.kept, found, lengths, how.minutes or 0.0)
            note(f"there was time for {len(found.trials)} of {n} sensitivities")
        return result, complete


def _chunks(session: Session, how: Measuring) -> tuple[list[tuple[int, ...]], list[TextSource]]:
    """Those to measure on, then those of other text; and the texts of those whose cells the statistics have not seen.

    Raises SubkvError about `files`.
    """
    if how.texts is not None:
        long = how.lengths[0]
        found = cut(session, how.texts, long, len(how.lengths))
        if len(found) < 2:
            raise SubkvError("files", f"they need at least 2 chunks of {long} tokens, found 1")
        return found, []
    blocks = builtin.read(session.template)
    order = sorted(range(builtin.MEASURED), key=lambda i: i in builtin.LONGER)
    chunks = [
        chunk
        for i, n in zip(order, how.lengths, strict=True)
        for chunk in cut(session, [blocks[i]], n, 1, whole=i not in builtin.LONGER)
    ]
    return chunks, [blocks[i].source for i in order] if how.short else []


@contextlib.contextmanager
def _opened(kept: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    """What _write() wrote. Raises ValueError for what another version did, and what numpy does for a damaged file."""
    with np.load(kept, allow_pickle=False) as arrays:
        version = int(arrays["version"]) if "version" in arrays else "none"
        if version != VERSION:
            raise ValueError(f"expected measurements of version {VERSION}, found {version}")
        yield arrays


def _earlier(kept: Path, calibration: Calibration, texts: Sequence[TextSource], lengths: Sequence[int]) -> Found | None:
    """What an earlier run has measured. texts: as of Sensing; lengths: of its chunks."""
    try:
        with _opened(kept) as arrays:
            if "lengths" not in arrays or arrays["lengths"].tolist() != list(lengths):
                raise ValueError(f"expected chunks of {', '.join(map(str, lengths))} tokens, found others")
            found = Found.of(arrays, calibration)
        if not {*found.done, *found.stretches, *(trial.chunk for trial in found.trials)} <= set(range(len(lengths))):
            raise ValueError(f"expected numbers of {len(lengths)} chunks, found others")
        found.enter(calibration, texts)
        return found
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile raise about a damaged file whatever they stumble over
        note(f"note: {kept} cannot be gone on from ({error}); what it held is measured again")
        return None


def seconds(how: Measuring, n_layer: int, speed: float, found: Found | None = None) -> float:
    """That sensed() will take at so many tokens per second, after what is found. Also makes it the bar's guess."""
    tokens = ahead(how.lengths, n_layer, found, how.effort)
    left = min(tokens / speed + n_layer / PLANNED, 60 * how.minutes if how.minutes is not None else math.inf)
    expect("sensitivities", left)
    return left


def _foretell(session: Session, how: Measuring, n_layer: int, found: Found) -> None:
    """Says what the run will take, unless that is a moment."""
    trials = len(found.trials)
    left = seconds(how, n_layer, session.speed(), found)
    if trials:
        note(f"going on after {trials} of {n_trials(n_layer, how.effort)} sensitivities")
    if left > 10:
        note(f"measuring sensitivities takes {duration(left)}")


class Keeping:
    """Called as tokens are decoded: writes what is found from time to time, and when the user wants to stop."""

    def __init__(self, path: Path, stopping: Stopping, lengths: Sequence[int]) -> None:
        self._path, self._stopping, self._lengths = path, stopping, lengths
        self._written = time.monotonic()

    def __call__(self, found: Found) -> None:
        stop = self._stopping.pressed
        if stop or time.monotonic() - self._written > EVERY:
            try:
                _write(self._path, found, self._lengths)
                if stop:
                    note(KEPT)
            except SubkvError as error:
                if not stop:
                    raise
                note(f"what has been done is not kept: {error.reason}")
            self._written = time.monotonic()
        if stop:
            raise KeyboardInterrupt


def _write(path: Path, found: Found, lengths: Sequence[int], minutes: float = 0.0, refused: str = "") -> None:
    """lengths: of the chunks. minutes: that there was no more time than; 0: interrupted. refused: why there can be no
    sensitivities."""
    with atomic_file(path) as handle:
        values = {"minutes": minutes, "refused": refused, "lengths": lengths, "version": VERSION}
        arrays = {name: np.array(value) for name, value in values.items()}
        np.savez(handle, allow_pickle=False, **arrays, **found.arrays())


def stopped_at(kept: Path) -> float | None:
    """The minutes that were not enough for all sensitivities; 0: of an interrupted run; None: there is nothing left."""
    try:
        with _opened(kept) as arrays:
            return float(arrays["minutes"])
    except FileNotFoundError:
        return None
    except Exception:  # damaged, or of another version: as in _earlier, which says so
        return 0.0


def refused(kept: Path, minutes: float | None) -> str:
    """Why an earlier run with this much time or more found that there can be no sensitivities; empty: none did."""
    try:
        with _opened(kept) as arrays:
            enough = (math.inf if minutes is None else minutes) <= float(arrays["minutes"])
            return str(arrays["refused"]) if enough else ""
    except Exception:  # no such file, or none to go on from: as in stopped_at
        return ""
