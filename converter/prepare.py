"""Everything that bases need of a model, as one calibration file in the store: statistics, then sensitivities.

What is done is kept under the model's content and the settings, whatever interrupts it: the same command goes on where
it was, and a later one that asks for other bits plans anew in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from converter import builtin
from converter.corpus import HELD_OUT, Corpus, Text
from converter.correcting import PLANNED
from converter.effort import effort
from converter.observe import calibrate_file
from converter.resume import Checkpoints
from converter.sensed import Measuring, refused, seconds, sensed, stopped_at
from subkv.base.errors import SubkvError, concerning
from subkv.base.files import check_writable, remove, remove_stale
from subkv.base.locks import exclusive
from subkv.base.progress import note, overall
from subkv.format import store
from subkv.format.calibration import Calibration, read_calibration, write_calibration
from subkv.format.metadata import generator
from subkv.native.gguf import Gguf, sha256
from subkv.plan.pipeline import TOKENS_PER_RANK
from subkv.plan.positions import can_spread, head_size

HASHED = 1e9  # bytes per second: a first guess, which the bar corrects as it goes


@dataclass(frozen=True)
class CalibrationRequest:
    """What to prepare. corpus without files: the built-in text. n_sink: first positions left out.

    n_recent: of the exact window. minutes: time that sensitivities may take; 0: there are none; None: all they need.
    short: chunks of the built-in text may be shorter than asked for, as what they show holds at all positions.
    head_size: for which they must be long enough all the same; 0: what sensitivities add is waited for, or not known.
    """

    corpus: Corpus
    n_sink: int
    n_recent: int
    minutes: float | None = None
    short: bool = True
    head_size: int = 0

    def texts(self) -> list[Text] | None:
        """None: the built-in ones. Raises SubkvError as read_text does."""
        return self.corpus.read() or None

    @property
    def spared(self) -> bool:
        """Whether statistics leave out what sensitivities are measured on, as its cells enter them there."""
        return self.short and self.minutes != 0 and not self.corpus.files and self.corpus.chunks is None

    @property
    def observed(self) -> Corpus:
        """What the statistics are of: as asked for, or blocks of the built-in text, builtin.TOKENS if `spared`."""
        if self.corpus.files or self.corpus.chunks is not None:
            return self.corpus
        if not self.spared:
            return replace(self.corpus, chunks=max(builtin.TOKENS // self.corpus.n_ctx, builtin.BLOCKS))
        # one block of all is held out, and every one gives its first n_sink positions away
        least = TOKENS_PER_RANK * self.head_size // (builtin.BLOCKS - 1) + self.n_sink + 1
        n_ctx = min(max(builtin.TOKENS // builtin.BLOCKS, least), self.corpus.n_ctx)
        return replace(self.corpus, n_ctx=n_ctx, chunks=max(builtin.TOKENS // n_ctx, builtin.BLOCKS))

    def key(self, texts: list[Text] | None) -> str:
        """Changes with whatever changes the statistics, the model and its chat template aside."""
        observed = self.observed
        settings = [generator(), self.corpus.n_ctx, observed.n_ctx, observed.chunks, self.spared, self.n_sink, HELD_OUT]
        digest = hashlib.sha256(repr(settings).encode())
        for text in texts or builtin.read():
            digest.update(repr((text.source.name, len(text.data), text.special)).encode())
            digest.update(text.data)
        return digest.hexdigest()[:8]


@contextlib.contextmanager
def prepared(model: Path, request: CalibrationRequest) -> Iterator[Path]:
    """The calibration of a GGUF, made here as far as it is not there yet. Until the block ends nobody else prepares it.

    One bar for all that is done in the block, too. Raises SubkvError.
    """
    with Gguf(model) as base:
        entry, files, size = store.entry(base), base.files, base.n_bytes
        arch = base.get("general.architecture")
        layers, trained = (base.get(f"{arch}.{key}") for key in ("block_count", "context_length"))
        own = effort(size)
        request = replace(request, short=can_spread(base), head_size=(head_size(base) or 0) if own.statistics else 0)
    if trained and request.corpus.n_ctx > trained:
        note(f"chunks of {trained} tokens, which the model was trained with, instead of {request.corpus.n_ctx}")
        request = replace(request, corpus=replace(request.corpus, n_ctx=trained))
    texts = request.texts()
    entry.prepare()
    path = entry.work(f".{request.key(texts)}.calib.safetensors")
    with concerning(output="XDG_CACHE_HOME"):
        check_writable(path)
    with concerning(lock="model"), exclusive(entry.lock, f"prepare {model.name}"):
        expected = {"loading": size / HASHED, "hashing": size / HASHED, "bases": (layers or 1) / PLANNED}
        with overall(expected):
            remove_stale(store.folder())
            corpus, kept = request.corpus, _kept(path, request.n_recent)
            how = Measuring(
                texts, corpus.n_ctx, corpus.n_threads, request.n_recent, request.minutes, kept, request.short, own
            )
            then = functools.partial(seconds, how, layers or 1)
            calibration = _earlier(path, files) or _measured(model, request, texts, path, then)
            kept = _sense(model, how, calibration, path)
            _remove_others(entry, {path, kept})
            yield path


def _kept(path: Path, n_recent: int) -> Path:
    """Where sensitivities with this exact window are while they are not complete."""
    return path.with_name(f"{path.name}.{n_recent}.sensing.npz")


def _earlier(path: Path, files: Sequence[Path]) -> Calibration | None:
    """A calibration that an earlier run has finished; a damaged one, or one of other files than these, is made again.

    The model's name in the store is a digest of samples, so its whole bytes are compared here.
    """
    if not path.exists():
        return None
    try:
        found = read_calibration(path)
    except SubkvError as error:
        note(f"note: {path} is made again: {error}")
        return None
    if sha256(files, progress=True) != found.model_sha256:
        note(f"note: {path} is made again: it is of a file with other bytes than {files[0]}")
        return None
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    note(f"calibrated on {found.tokens} tokens by an earlier run, {day}")
    return found


def _measured(
    model: Path, request: CalibrationRequest, texts: list[Text] | None, path: Path, then: Callable[[float], float]
) -> Calibration:
    """Statistics of the model, written to `path`. then: as calibrate_file."""
    for other in path.parent.glob(f"{path.name}.*.sensing.npz"):  # of other statistics
        remove(other)
    with concerning(output="XDG_CACHE_HOME"), Checkpoints(path) as checkpoints:
        found, notes = calibrate_file(
            model, request.observed, texts, request.n_sink, keeper=checkpoints, then=then, spared=request.spared
        )
    for line in notes:
        note(line)
    with concerning(output="XDG_CACHE_HOME"):
        write_calibration(path, found)
    checkpoints.clear()
    return found


def _sense(model: Path, how: Measuring, calibration: Calibration, path: Path) -> Path:
    """Add sensitivities to `path` unless it has them for this window, or there is no time for more of them.

    Where they cannot be measured a note says why. Returns where those that are not complete are kept.
    """
    known = calibration.sensitivity
    if known is not None and known.n_recent <= how.n_recent:
        how = replace(how, n_recent=known.n_recent, kept=_kept(path, known.n_recent))
        limit = stopped_at(how.kept)
        if limit is None:
            return how.kept
        if how.minutes is not None and how.minutes <= limit:
            note("sensitivities are those that an earlier run had time for; more --minutes, or none given, goes on")
            return how.kept
    if how.minutes == 0:
        return how.kept
    further = "further " if known else ""
    if reason := refused(how.kept, how.minutes):
        note(f"no {further}sensitivities, as an earlier run found: {reason}")
        return how.kept
    try:
        found, complete = sensed(model, calibration, how)
    except SubkvError as error:
        note(f"no {further}sensitivities: {error.reason}")
        return how.kept
    with concerning(output="XDG_CACHE_HOME"):
        write_calibration(path, found)
    if complete:
        remove(how.kept)
    return how.kept


def _remove_others(entry: store.Entry, needed: set[Path]) -> None:
    """Calibrations of this model under other settings, whole or not: one is kept."""
    for other in store.folder().glob(entry.work(".*.calib.safetensors*").name):
        if other not in needed:
            remove(other)
