"""The calibration of a model in the store: statistics, then sensitivities; each is measured unless it is stored.

The file's name is a hash of the model and the settings. So the same command resumes an interrupted run, and a later
command with another budget plans again in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from converter.corpus import Text
from converter.request import CalibrationRequest
from converter.resume import Checkpoints
from converter.sensitivity_stage import PLANNED, expected_seconds, outcome, with_sensitivities
from converter.sensitivity_trials import scope_of
from converter.source import Source
from converter.statistics_stage import collect_statistics
from subkv.base.errors import SubkvError, concerning, is_unavailable
from subkv.base.files import check_owner, check_writable, remove, remove_stale
from subkv.base.locks import exclusive
from subkv.base.progress import note, overall
from subkv.format import store
from subkv.format.calibration import Calibration, read_calibration, write_calibration

HASHED = 1e9  # bytes per second: the progress bar's first estimate


@contextlib.contextmanager
def calibrated(source: Source, request: CalibrationRequest) -> Iterator[Path]:
    """The calibration's file, complete as far as the request allows.

    Until the block ends no other process calibrates the model, and one bar shows the progress. Raises SubkvError.
    """
    scope = scope_of(source.n_bytes)
    head_size = source.head_size if scope.long_statistics else 0
    request = replace(request, short=not source.has_learned, head_size=head_size, scope=scope)
    if source.n_ctx_train and request.corpus.n_ctx > source.n_ctx_train:
        note(f"chunks of {source.n_ctx_train} tokens (trained context) instead of {request.corpus.n_ctx}")
        request = replace(request, corpus=replace(request.corpus, n_ctx=source.n_ctx_train))
    texts, entry = request.texts(), source.entry
    entry.prepare()
    request = _with_saved(request, texts, entry)
    path = _path(request, texts, entry)
    with concerning(output="XDG_CACHE_HOME"):
        check_writable(path)
    with concerning(lock="model"), exclusive(entry.lock, f"prepare {source.path.name}"):
        n_layer, reading = source.n_layer or 1, source.n_bytes / HASHED
        with overall({"loading": reading, "hashing": reading, "bases": n_layer / PLANNED}):
            remove_stale(path.parent)
            later = functools.partial(expected_seconds, request, n_layer)
            statistics = _stored(path, source) or _measured(source, request, texts, path, later)
            checkpoint = _add_sensitivities(source, request, texts, statistics, path)
            del statistics
            source.unload()
            _remove_others(entry, {path, checkpoint})
            yield path


def _path(request: CalibrationRequest, texts: list[Text] | None, entry: store.Entry) -> Path:
    return entry.work(f".{request.key(texts)}.calib.safetensors")


def _with_saved(request: CalibrationRequest, texts: list[Text] | None, entry: store.Entry) -> CalibrationRequest:
    """The request for the work of an earlier run without a limit, if this one is limited to statistics.

    Statistics alone have more tokens, and a limit must not add work.
    """
    resumed = replace(request, resumes=True)
    path = _path(resumed, texts, entry)
    if request.minutes == 0 and any(path.parent.glob(f"{path.name}*")):
        return resumed
    return request


def _checkpoint(path: Path, n_recent: int) -> Path:
    """File of incomplete sensitivities with this exact window."""
    return path.with_name(f"{path.name}.{n_recent}.sensing.npz")


def _stored(path: Path, source: Source) -> Calibration | None:
    """The calibration of an earlier run; None if there is none, it is damaged, or the model has other bytes.

    The store identifies models by a hash of samples, so the hash of all bytes is compared here. Raises SubkvError if
    the file cannot be read.
    """
    if not path.exists():
        return None
    try:
        check_owner(path, "calibration")
        calibration = read_calibration(path)
    except SubkvError as error:
        if is_unavailable(error):
            raise
        note(f"note: {path} cannot be used ({error}); calibrating again")
        return None
    if source.sha256 != calibration.model_sha256:
        note(f"note: {path} is of a file with other bytes than {source.path}; calibrating again")
        return None
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    note(f"calibrated on {calibration.tokens} tokens by an earlier run, {day}")
    return calibration


def _measured(
    source: Source, request: CalibrationRequest, texts: list[Text] | None, path: Path, later: Callable[[float], float]
) -> Calibration:
    """Measure statistics and write them to `path`. later: as in collect_statistics()."""
    for outdated in path.parent.glob(f"{path.name}.*.sensing.npz"):  # of other statistics
        remove(outdated)
    with concerning(output="XDG_CACHE_HOME"), Checkpoints(path) as checkpoints:
        statistics, notes = collect_statistics(
            source,
            request.observed,
            texts,
            request.n_sink,
            checkpoints=checkpoints,
            later=later,
            separate=request.separate,
        )
    for line in notes:
        note(line)
    with concerning(output="XDG_CACHE_HOME"):
        write_calibration(path, statistics)
    checkpoints.clear()
    return statistics


def _add_sensitivities(
    source: Source, request: CalibrationRequest, texts: list[Text] | None, calibration: Calibration, path: Path
) -> Path:
    """Add sensitivities to `path`, unless it has them for this window or an earlier run used the same time limit.

    If they cannot be measured, the reason is logged. Returns the file of incomplete ones.
    """
    stored = calibration.sensitivity
    is_stored = stored is not None and stored.n_recent <= request.n_recent
    if stored is not None and is_stored:
        request = replace(request, n_recent=stored.n_recent)
    checkpoint = _checkpoint(path, request.n_recent)
    earlier = outcome(checkpoint)
    if is_stored:
        if earlier is None:
            return checkpoint
        if request.minutes is not None and request.minutes <= earlier[0]:
            note("using the sensitivities that an earlier run had time for; a larger --minutes continues them")
            return checkpoint
    if request.minutes == 0 and (earlier is None or earlier[1]):
        return checkpoint
    further = "further " if stored else ""
    if earlier is not None:
        minutes, reason = earlier
        if reason and (math.inf if request.minutes is None else request.minutes) <= minutes:
            note(f"no {further}sensitivities, as an earlier run found: {reason}")
            return checkpoint
    try:
        result, complete = with_sensitivities(source, calibration, request, texts, checkpoint)
    except SubkvError as error:
        if is_unavailable(error):
            raise
        note(f"no {further}sensitivities: {error.reason}")
        return checkpoint
    with concerning(output="XDG_CACHE_HOME"):
        write_calibration(path, result)
    if complete:
        remove(checkpoint)
    return checkpoint


def _remove_others(entry: store.Entry, needed: set[Path]) -> None:
    """Remove this model's calibrations with other settings, complete or not."""
    pattern = entry.work(".*.calib.safetensors*")
    for other in pattern.parent.glob(pattern.name):
        if other not in needed:
            remove(other)
