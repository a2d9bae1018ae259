"""Everything that bases need of a model, as one calibration file in the store: statistics, then sensitivities.

What is done is kept under the model's content and the settings, whatever interrupts it: the same command goes on where
it was, and a later one that asks for other bits plans anew in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from converter import builtin
from converter.corpus import HELD_OUT, Corpus, Text
from converter.observe import calibrate_file
from converter.resume import Checkpoints
from converter.sensed import Measuring, seconds, sensed
from subkv.base.errors import SubkvError, concerning
from subkv.base.files import check_writable
from subkv.base.locks import exclusive
from subkv.base.progress import note, overall
from subkv.format import store
from subkv.format.calibration import Calibration, read_calibration, write_calibration
from subkv.format.metadata import generator
from subkv.native.gguf import Gguf

HASHED, PLANNED = 1e9, 4.0  # bytes per second; layers per second: first guesses, which the bar corrects as it goes


@dataclass(frozen=True)
class Wish:
    """What to prepare. corpus without files: the built-in text. n_sink: first positions left out.

    n_recent: of the exact window. minutes: time that sensitivities may take; None: what they need.
    """

    corpus: Corpus
    n_sink: int
    n_recent: int
    minutes: float | None = None

    def texts(self) -> list[Text] | None:
        """None: the built-in ones. Raises SubkvError as read_text does."""
        return self.corpus.read() or None

    @property
    def chunks(self) -> int | None:
        """Most chunks of tokens."""
        if self.corpus.files or self.corpus.chunks is not None:
            return self.corpus.chunks
        return max(builtin.TOKENS // self.corpus.n_ctx, 1)

    def key(self, texts: list[Text] | None) -> str:
        """Changes with whatever changes the statistics, the model and its chat template aside."""
        settings = [generator(), self.corpus.n_ctx, self.chunks, self.n_sink, HELD_OUT]
        digest = hashlib.sha256(repr(settings).encode())
        for text in texts or builtin.read():
            digest.update(text.data)
        return digest.hexdigest()[:8]


@contextlib.contextmanager
def prepared(model: Path, wish: Wish) -> Iterator[Path]:
    """The calibration of a GGUF, made here as far as it is not there yet. Until the block ends nobody else prepares it.

    One bar for all that is done in the block, too. Raises SubkvError.
    """
    with Gguf(model) as base:
        entry = store.entry(base)
        size = sum(file.stat().st_size for file in base.files)
        arch = base.get("general.architecture")
        layers, trained = (base.get(f"{arch}.{key}") for key in ("block_count", "context_length"))
    if trained and wish.corpus.n_ctx > trained:
        note(f"chunks of {trained} tokens, which the model was trained with, instead of {wish.corpus.n_ctx}")
        wish = replace(wish, corpus=replace(wish.corpus, n_ctx=trained))
    texts = wish.texts()
    entry.prepare()
    path = entry.work(f".{wish.key(texts)}.calib.safetensors")
    with concerning(output="XDG_CACHE_HOME"):
        check_writable(path)
    with concerning(lock="model"), exclusive(entry.lock, f"prepare {model.name}"):
        expected = {"loading": size / HASHED, "hashing": size / HASHED, "bases": (layers or 1) / PLANNED}
        with overall(expected):
            corpus, kept = wish.corpus, path.with_name(f"{path.name}.{wish.n_recent}.sensing.npz")
            how = Measuring(texts, corpus.n_ctx, corpus.n_threads, wish.n_recent, wish.minutes, kept)
            then = functools.partial(seconds, how, layers or 1)
            calibration = _earlier(path) or _measured(model, wish, texts, path, then)
            _sense(model, how, calibration, path)
            _remove_others(entry, path)
            yield path


def _earlier(path: Path) -> Calibration | None:
    """A calibration that an earlier run has finished; a damaged one is made again."""
    if not path.exists():
        return None
    try:
        found = read_calibration(path)
    except SubkvError as error:
        note(f"note: {path} is made again: {error}")
        return None
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    note(f"calibrated on {found.tokens} tokens by an earlier run, {day}")
    return found


def _measured(
    model: Path, wish: Wish, texts: list[Text] | None, path: Path, then: Callable[[float], float]
) -> Calibration:
    """Statistics of the model, written to `path`. then: as calibrate_file."""
    with concerning(output="XDG_CACHE_HOME"), Checkpoints(path) as checkpoints:
        found, notes = calibrate_file(
            model, replace(wish.corpus, chunks=wish.chunks), texts, wish.n_sink, keeper=checkpoints, then=then
        )
    for line in notes:
        note(line)
    with concerning(output="XDG_CACHE_HOME"):
        write_calibration(path, found)
    checkpoints.clear()
    return found


def _sense(model: Path, how: Measuring, calibration: Calibration, path: Path) -> None:
    """Add sensitivities to `path` unless it has them for this window."""
    known = calibration.sensitivity
    if known is not None and known.n_recent <= how.n_recent:
        return
    with concerning(output="XDG_CACHE_HOME"):
        found = sensed(model, calibration, how)
        if found is not None:
            write_calibration(path, found)
            how.kept.unlink(missing_ok=True)


def _remove_others(entry: store.Entry, path: Path) -> None:
    """Calibrations of this model under other settings, whole or not: one is kept."""
    for other in store.folder().glob(entry.work(".*.calib.safetensors*").name):
        if not other.name.startswith(path.name):
            other.unlink(missing_ok=True)
