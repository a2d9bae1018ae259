"""Bases for a model that has none: derived from its weights, and stored where the search finds them."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import CacheError, SubkvError, concerning, system_reason
from subkv.base.folders import PLUGIN_ONLY
from subkv.format import store
from subkv.format.metadata import read
from subkv.native.bases import EMBEDDED, NAMED, NONE, WEIGHTS, FoundBases, find_bases, model_content, stored_path
from subkv.native.gguf import Gguf
from subkv.native.library import BUDGET


@dataclass(frozen=True)
class Sidecar:
    """A sidecar. note: one line for the user; unstored: the reason why it is not in the store, if it should be.

    budget: of its layout, in bits per element. gain: how the user gets better bases.
    """

    path: Path
    note: str
    unstored: str = ""
    budget: float = 0.0
    gain: str = ""


def usable(found: FoundBases) -> bool:
    """Whether a search has found bases. Raises CacheError about `bases` if they cannot be used, about `kv_bits` if they
    have no such plan. Damaged ones from the weights are not usable: they take seconds to derive.
    """
    if found.source == WEIGHTS:
        if found.failure.kind == BUDGET:
            raise CacheError("kv_bits", found.failure.sentence(found.failure.key))
        return found.is_usable
    if found.source == NONE or found.is_usable:
        return found.source != NONE
    if found.source in (NAMED, EMBEDDED):
        raise CacheError("bases", found.failure.without_remedy(), found.failure.remedy)
    remedy = "make it readable" if found.is_unavailable else "convert the model again"
    raise CacheError("bases", found.failure.without_remedy(), f"{remedy}, or ignore it with --no-sidecar")


def from_weights(model: Path, found: FoundBases | None, kv_bits: float | None = None) -> Sidecar:
    """Bases from the weights. found: by a search up to WEIGHTS; None: they are for this process only.

    Raises CacheError about `kv_cache` if they cannot be derived, about `kv_bits` as find_bases().
    """
    unstored = (
        found.failure.sentence() if found is not None and found.is_unavailable else ""
    )  # the file must not be replaced
    if found is not None and not unstored and not usable(found):
        unstored = _store(model)
        found = find_bases(model, None, WEIGHTS, kv_bits)
        if not unstored:
            usable(found)  # raises about kv_bits
    if found is not None and found.path is not None and found.note and not unstored:
        return Sidecar(found.path, found.note, budget=found.budget, gain=_gain(model))
    made = _of_this_process(model, kv_bits)
    note = f", not stored ({unstored})" if unstored else ""
    return Sidecar(made.path, f"bases: {made.note}{note}", unstored, made.budget, _gain(model))


def preview(model: Path, kv_bits: float | None = None) -> tuple[Sidecar, bool]:
    """The sidecar that -ctk subkv would use for a model without bases, and whether it exists; writes nothing.

    Bases from the weights are derived for this process only, unless they are stored. Raises as usable() and
    from_weights().
    """
    found = find_bases(model, None, WEIGHTS, kv_bits)
    if usable(found) and found.path is not None:
        more = f"; stored by an earlier -ctk subkv; {_gain(model)}" if found.source == WEIGHTS else ""
        return Sidecar(found.path, f"{found.note}{more}", budget=found.budget), True
    made = _of_this_process(model, kv_bits)
    note = f"bases: none yet; -ctk subkv derives these {made.note}; {_gain(model)}"
    return Sidecar(made.path, note, budget=made.budget), False


def _of_this_process(model: Path, kv_bits: float | None) -> Sidecar:
    """Bases from the weights that are not stored. note: their source, size and quality. Raises as from_weights()."""
    try:
        path = _temporary.derived(model)
    except OSError as error:  # no folder for temporary files
        raise _not_derived(model, system_reason(error)) from error
    except SubkvError as error:
        if error.key != "output":
            raise
        raise _not_derived(model, error.reason) from error
    found = find_bases(path, path, NAMED, kv_bits)
    quality = ", predicted as good as q8_0" if found.budget == read(path)["budget"] else ""
    return Sidecar(path, f"from the weights, {found.size}{quality}", budget=found.budget)


def _gain(model: Path) -> str:
    return f"`subkv convert {shlex.quote(str(model))}`: smaller at the same quality"


class _Temporary:
    """Sidecars of this process if the store cannot be used, by the model's content. They are removed at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._process = 0  # which made the folder; a forked one has its own

    def derived(self, model: Path) -> Path:
        with self._lock:
            if self._folder is None or self._process != os.getpid() or not self._folder.is_dir():
                self._folder, self._process = Path(tempfile.mkdtemp(prefix="subkv-")), os.getpid()
                atexit.register(self._remove, self._folder, self._process)
            path = self._folder / f"{model_content(model)}.gguf"
        if not path.exists():
            _derive(model, path)
        return path

    @staticmethod
    def _remove(folder: Path, process: int) -> None:
        if os.getpid() == process:  # exit functions are inherited by forked processes
            shutil.rmtree(folder, ignore_errors=True)


_temporary = _Temporary()


def _store(model: Path) -> str:
    """Derive bases and store them; returns the reason why they could not be stored, else ""."""
    try:
        path = stored_path(model, model_content(model), WEIGHTS)
        store.prepare(path.parent)
        with concerning(output="store"):
            _derive(model, path)
        return ""
    except SubkvError as error:
        if error.key not in ("XDG_CACHE_HOME", "store"):
            raise
        return error.reason


def _sliding_layers(model: Path) -> frozenset[int]:
    """Layers that stay ordinary. With the plug-in alone they are unknown, and their bases are not used."""
    with Gguf(model, split=False) as file:
        slides = file.get(f"{file.get('general.architecture')}.attention.sliding_window")
    if PLUGIN_ONLY or not slides:
        return frozenset()
    from subkv.engine.sliding import sliding_layers  # our libllama, which package subkv-plugin does not have

    return sliding_layers(model)


def _derive(model: Path, path: Path) -> None:
    from subkv.plan import datafree  # the engine's only call of the planner (see pyproject.toml)

    try:
        datafree.sidecar(model, path, sliding=_sliding_layers(model))
    except SubkvError as error:
        if isinstance(error, CacheError) or error.key == "output":  # a model that cannot have bases; the file
            raise
        raise _not_derived(model, str(error)) from error
    except (OSError, MemoryError) as error:
        raise _not_derived(model, system_reason(error)) from error


def _not_derived(model: Path, reason: str) -> CacheError:
    why = f"there are no bases for {model}, and they cannot be derived from its weights: {reason}"
    return CacheError("kv_cache", why, "choose f16")
