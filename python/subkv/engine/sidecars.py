"""The bases of a model that brings none: a sidecar that is found by itself, or one made of the weights alone.

A sidecar beside the model comes first, then the one in the store (subkv.format.store). Both have to say that they are
of this model's content; one that does not is refused, never skipped: another cache than expected is no small surprise.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.format import store
from subkv.format.layout import Layout
from subkv.format.metadata import generator
from subkv.native.gguf import Gguf

_ENDING = ".weights.gguf"  # in the store: of bases made of the weights alone
_LEAST_BITS = 6.25  # of them; the default budget was 4.75 once


@dataclass(frozen=True)
class Sidecar:
    """A sidecar, and one line that says what is in use."""

    path: Path
    note: str


def command(model: Path) -> str:
    """What a user types to calibrate a model."""
    return f"subkv convert {shlex.quote(str(model))}"


def no_bases_note(model: Path) -> str:
    """What the user of an ordinary cache may want to know."""
    why = store.why_unreadable()
    prepared = f"none can be looked for ({why})" if why else "none were prepared"
    return (
        f"cache: f16, as this model carries no bases and {prepared}; -ctk subkv is less than half as large at "
        f"once, and `{command(model)}` makes it smaller"
    )


def find_calibrated(model: Path) -> Sidecar | None:
    """The sidecar of a model that `convert` has prepared. Raises CacheError about `bases`, ModelFileError."""
    near = store.sidecar_path(model)
    beside = os.path.exists(near)
    if not beside and (store.why_unreadable() or not store.folder().is_dir()):
        return None
    with Gguf(model) as base:
        entry = store.entry(base)
    path = near if beside else entry.sidecar
    if not path.exists():
        return None
    store.check(path, entry.content)
    with Layout(path) as layout:
        n_tokens = layout.description["calibration"]["tokens"]
    day = time.strftime("%Y-%m-%d", time.localtime(path.stat().st_mtime))
    made = f"calibrated on {n_tokens} tokens" if n_tokens else "made without a calibration"
    return Sidecar(path, f"bases: {made} for this model, {day}, {bits(path)} ({path})")


def from_weights(model: Path, keep: bool) -> Sidecar:
    """Bases made of the weights alone, now or by an earlier call. keep: look in the store, and put them there.

    Raises CacheError about `kv_cache` where they cannot be made.
    """
    with Gguf(model) as base:
        entry = store.entry(base)
    why = store.why_unreadable() if keep else ""
    path, kept = entry.named(_ENDING) if keep and not why else None, f", not kept ({why})" if why else ""
    if path is None or not _usable(path, entry.content):
        path, kept = _make(model, path, entry, kept)
    return Sidecar(
        path, f"bases: from the weights alone, {_quality(path)}{kept}; -ctk f16: without bases; {_gain(model)}"
    )


def preview(model: Path) -> tuple[Sidecar, bool]:
    """What -ctk subkv takes for a model that carries no bases, and whether it is there already; nothing is written.

    Bases of the weights that nobody has made yet are made for this process alone. Raises as find_calibrated() and
    from_weights() do.
    """
    found = find_calibrated(model)
    if found is not None:
        return found, True
    with Gguf(model) as base:
        entry = store.entry(base)
    path = None if store.why_unreadable() else entry.named(_ENDING)
    if path is not None and _usable(path, entry.content):
        note = f"bases: from the weights alone, {_quality(path)}, made by an earlier -ctk subkv ({path})"
        return Sidecar(path, f"{note}; {_gain(model)}"), True
    path = from_weights(model, keep=False).path
    note = f"bases: none yet; -ctk subkv makes these, from the weights alone, {_quality(path)}"
    return Sidecar(path, f"{note}; {_gain(model)}"), False


def _quality(from_weights: Path) -> str:
    return f"{bits(from_weights)}, predicted as good as q8_0"


def _gain(model: Path) -> str:
    return f"`{command(model)}`: smaller at the same quality"


def bits(path: Path) -> str:
    """The bits per element of a layout, for people. Raises CacheError about `path`."""
    with Layout(path) as layout:
        read = layout.description
    return f"{read['bits_per_element']:.2f} bits per element at {read['bpe_context']} tokens"


def _usable(path: Path, content: str) -> bool:
    """Whether they can be used as they are; what another version made is made again."""
    if not path.exists():
        return False
    try:
        store.check(path, content)
        with Layout(path) as layout:
            read = layout.description
            return bool(read["generator"] == generator() and read["bits_per_element"] >= _LEAST_BITS)
    except SubkvError:
        return False


class _Temporary:
    """Sidecars of this process alone, by the model's content: for stores that cannot be written. Removed at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def path(self, entry: store.Entry) -> Path:
        with self._lock:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="subkv-")
        return Path(self._folder.name) / f"{entry.content}.gguf"


_temporary = _Temporary()


def _make(model: Path, path: Path | None, entry: store.Entry, why: str) -> tuple[Path, str]:
    """Make them; their path, and why they are not in the store if they should be. path: in the store; None: not."""
    from subkv.plan import datafree  # the one place where the engine asks the planner: pyproject.toml says so

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
                why = f", not kept ({error.reason})"
        path = _temporary.path(entry)
        if not path.exists():
            datafree.sidecar(model, path)
    except SubkvError as error:
        if isinstance(error, CacheError):  # a kind of model that no bases help
            raise
        reason = f"expected bases, found none for {model} and cannot make them of its weights: {error}"
        raise CacheError("kv_cache", f"{reason}; choose f16") from error
    return path, why
