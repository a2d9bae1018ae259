"""Running sensing.py for `convert MODEL`: on which text, for how long, and going on after an interrupt."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converter import builtin
from converter.corpus import Text, cut
from converter.lockstep import corrected
from converter.resume import EVERY, Stopping
from converter.sensing import SCORED, Found, Sensing
from converter.session import Session
from subkv.base.errors import SubkvError
from subkv.base.files import atomic_file
from subkv.base.progress import duration, expect, note, progress_bar
from subkv.format.calibration import Calibration
from subkv.native.gguf import Gguf

N_CTX = 1088  # tokens of a chunk
CHUNKS = 3  # that are measured; one more corrects predictions


@dataclass(frozen=True)
class Measuring:
    """texts None: the built-in ones. n_ctx: most tokens of a chunk. n_recent: of the exact window. minutes None: all
    that there is to measure. kept: file of what is done while it runs."""

    texts: Sequence[Text] | None
    n_ctx: int
    n_threads: int
    n_recent: int
    minutes: float | None
    kept: Path


def sensed(model: Path, calibration: Calibration, how: Measuring) -> Calibration | None:
    """The calibration with sensitivities; None, and a note that says why, where there can be none.

    Raises SubkvError, and KeyboardInterrupt after what is done was written.
    """
    n_ctx, least = min(N_CTX, how.n_ctx), how.n_recent + calibration.n_skip + 2 * SCORED + 1
    if n_ctx < least:
        note(f"no sensitivities: they need chunks of at least {least} tokens, found -c {n_ctx}")
        return None
    with Gguf(model) as base:
        with Session(model, n_ctx, how.n_threads, calibration.n_skip) as session:
            try:
                *chunks, last = _chunks(session, how.texts, n_ctx)
            except SubkvError as error:
                if error.key != "files":
                    raise
                note(f"no sensitivities: {error.reason}")
                return None
            if not chunks:
                note(f"no sensitivities: they need at least 2 chunks of {n_ctx} tokens, found 1")
                return None
            sensing = Sensing(session, base, calibration, chunks, how.n_recent, _earlier(how.kept, calibration))
            _run(session, sensing, how)
            try:
                found = sensing.result()
            except SubkvError as error:
                note(f"no sensitivities: {error.reason}")
                return None
        return corrected(model, base, found, last, how.n_threads)


def _chunks(session: Session, texts: Sequence[Text] | None, n_ctx: int) -> list[tuple[int, ...]]:
    """CHUNKS to measure on, and one of other text. Raises SubkvError about `files`."""
    if texts is not None:
        return cut(session, texts, n_ctx, max(CHUNKS + 1, len(texts)))
    blocks = builtin.read(session.template)
    chosen = [*blocks[:CHUNKS], blocks[-1]]
    return cut(session, chosen, n_ctx, len(chosen))


def _earlier(kept: Path, calibration: Calibration) -> Found | None:
    """What an earlier run has measured."""
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            return Found.of(arrays, calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        note(f"note: {kept} cannot be gone on from ({error}); what it held is measured again")
        return None


def _run(session: Session, sensing: Sensing, how: Measuring) -> None:
    """All steps, or those that there is time for: at least one trial. Keeps what is done."""
    done = len(sensing.found.trials)
    seconds = sensing.tokens / session.speed() * (1 - done / len(sensing.plan()))
    if how.minutes is not None:
        seconds = min(seconds, 60 * how.minutes)
    expect("sensitivities", seconds)
    if done:
        note(f"going on after {done} of {len(sensing.plan())} sensitivities")
    if seconds > 10:
        note(f"measuring sensitivities takes {duration(seconds)}")
    start = written = time.monotonic()
    save: Callable[[], None] = lambda: _save(how.kept, sensing.found)  # noqa: E731
    with progress_bar("sensitivities", sensing.tokens, "tok") as bar, Stopping() as stopping:
        for tokens in sensing.steps():
            bar.update(tokens)
            now = time.monotonic()
            if stopping.pressed or now - written > EVERY:
                save()
                written = now
            if stopping.pressed:
                raise KeyboardInterrupt
            if how.minutes is not None and now - start > 60 * how.minutes and sensing.found.factors():
                break
    save()


def _save(kept: Path, found: Found) -> None:
    with atomic_file(kept) as handle:
        np.savez(handle, allow_pickle=False, **found.arrays())
