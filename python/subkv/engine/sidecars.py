"""Bases for a model that contains none: its sidecar, or bases derived from the weights.

A sidecar beside the model comes first, then the one in the store (subkv.format.store). Both must contain the digest of
the model's content. A sidecar of another model is an error; skipping it would silently change the cache.
"""

from __future__ import annotations

import shlex
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import CacheError, SubkvError, concerning, is_unavailable, system_reason
from subkv.base.files import exists
from subkv.format import store
from subkv.format.metadata import VERSION, generator, read
from subkv.native.gguf import Gguf

_ENDING = ".weights.gguf"  # of sidecars in the store with bases from the weights


@dataclass(frozen=True)
class Sidecar:
    """A sidecar. note: one line for the user; unstored: the reason why it is not in the store, if it should be."""

    path: Path
    note: str
    unstored: str = ""


def command(model: Path) -> str:
    """The command that calibrates a model."""
    return f"subkv convert {shlex.quote(str(model))}"


def no_bases_note(model: Path) -> str:
    """A line for the user of an ordinary cache."""
    problem = store.why_unreadable()
    reason = f"the store cannot be read ({problem})" if problem else "none were prepared"
    return (
        f"cache: f16, because this model has no bases and {reason}; -ctk subkv is less than half as large, "
        f"and `{command(model)}` makes it smaller"
    )


def find_calibrated(model: Path) -> Sidecar | None:
    """The sidecar that `convert` has written for a model, if any. Raises CacheError about `bases`, ModelFileError."""
    path = store.sidecar_path(model)
    is_beside = _exists(path)
    if not is_beside and (store.why_unreadable() or not store.folder().is_dir()):
        return None
    entry = _entry(model)
    if not is_beside:
        path = entry.sidecar
        if not _exists(path):
            return None
    store.check(path, entry.content)
    n_tokens = read(path)["calibration"]["tokens"]
    day = time.strftime("%Y-%m-%d", time.localtime(path.stat().st_mtime))
    source = f"calibrated on {n_tokens} tokens" if n_tokens else "derived without a calibration"
    return Sidecar(path, f"bases: {source} for this model, {day}, {bits(path)} ({path})")


def from_weights(model: Path, keep: bool) -> Sidecar:
    """Bases from the weights. keep: look them up in the store, and store them there.

    Raises CacheError about `kv_cache` if they cannot be derived.
    """
    entry, path, unstored = _entry(model), None, ""
    if keep:
        unstored = store.why_unreadable()
        path = None if unstored else entry.named(_ENDING)
    try:
        usable = path is not None and _usable(path, entry.content)
    except CacheError as error:  # the file may be sound, and must not be replaced
        path, usable, unstored = None, False, error.reason
    if path is None or not usable:
        path, unstored = _derive(model, path, entry, unstored)
    note = f", not stored ({unstored})" if unstored else ""
    line = f"bases: from the weights, {_quality(path)}{note}; -ctk f16 uses none; {_gain(model)}"
    return Sidecar(path, line, unstored)


def _entry(model: Path) -> store.Entry:
    with Gguf(model) as base:
        return store.entry(base)


def preview(model: Path) -> tuple[Sidecar, bool]:
    """The sidecar that -ctk subkv would use for a model without bases, and whether it exists; writes nothing.

    Bases from the weights are derived for this process only, unless they are stored. Raises as find_calibrated() and
    from_weights().
    """
    sidecar = find_calibrated(model)
    if sidecar is not None:
        return sidecar, True
    entry = _entry(model)
    path = None if store.why_unreadable() else entry.named(_ENDING)
    if path is not None and _usable(path, entry.content):
        note = f"bases: from the weights, {_quality(path)}, stored by an earlier -ctk subkv ({path})"
        return Sidecar(path, f"{note}; {_gain(model)}"), True
    path = from_weights(model, keep=False).path
    note = f"bases: none yet; -ctk subkv derives these from the weights, {_quality(path)}"
    return Sidecar(path, f"{note}; {_gain(model)}"), False


def _quality(path: Path) -> str:
    return f"{bits(path)}, predicted as good as q8_0"


def _gain(model: Path) -> str:
    return f"`{command(model)}`: smaller at the same quality"


def bits(path: Path) -> str:
    """The bits per element of a layout, as text. Raises CacheError about `path`."""
    description = read(path)
    return f"{description['bits_per_element']:.2f} bits per element at {description['bpe_context']} tokens"


def _exists(path: Path) -> bool:
    """Raises CacheError about `bases` if the system cannot tell."""
    try:
        return exists(path)
    except OSError as error:
        raise CacheError("bases", f"cannot read {path}: {system_reason(error)}") from error


def _usable(path: Path, content: str) -> bool:
    """Whether bases in the store can be used: they exist, and this version has derived them from this model.

    Raises CacheError about `bases` if the file cannot be read.
    """
    if not _exists(path):
        return False
    try:
        with Gguf(path, split=False) as file:
            if file.get("subkv.version") != VERSION:
                return False
        store.check(path, content)
        return bool(read(path)["generator"] == generator())
    except SubkvError as error:
        if is_unavailable(error):
            raise CacheError("bases", error.reason) from error
        return False


class _Temporary:
    """Sidecars of this process if the store cannot be used, by the model's content. They are removed at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def path(self, entry: store.Entry) -> Path:
        with self._lock:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="subkv-")
        return Path(self._folder.name) / f"{entry.content}.gguf"


_temporary = _Temporary()


def _derive(model: Path, path: Path | None, entry: store.Entry, unstored: str) -> tuple[Path, str]:
    """Derive bases; returns their path, and `unstored` or the reason why they could not be stored.

    path: in the store; None: temporary.
    """
    from subkv.plan import datafree  # the engine's only call of the planner (see pyproject.toml)

    try:
        if path is not None:
            try:
                entry.prepare()
                with concerning(output="store"):
                    datafree.sidecar(model, path)
                return path, ""
            except SubkvError as error:
                if error.key not in ("XDG_CACHE_HOME", "store"):
                    raise
                unstored = error.reason
        path = _temporary.path(entry)
        if not path.exists():
            datafree.sidecar(model, path)
    except SubkvError as error:
        if isinstance(error, CacheError):  # a model that cannot have bases
            raise
        reason = f"there are no bases for {model}, and they cannot be derived from its weights: {error}"
        raise CacheError("kv_cache", f"{reason}; choose f16") from error
    return path, unstored
