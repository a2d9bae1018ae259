"""What a program's environment says of its KV cache, and the bases that the library in it will find."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from runtime import options
from runtime.launch.arguments import is_gguf
from subkv.base.command import group
from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.format.window import MAX_RECENT, MAX_SINK, Window
from subkv.native.library import LIB_PATH
from subkv.native.places import mtmd_variable

CACHE = "SUBKV"  # off, auto, or the file with the bases
AUTO, OFF = "auto", "off"
# runtime/native reads these; Window's fields and the option --adapt
NUMBERS = {"n_sink": "SUBKV_SINK", "n_recent": "SUBKV_RECENT", "n_rollback": "SUBKV_ROLLBACK"}
ADAPT = "SUBKV_ADAPT"
READ = (CACHE, *NUMBERS.values(), ADAPT)
LIBRARY_PATH = {"darwin": "DYLD_LIBRARY_PATH", "win32": "PATH"}.get(sys.platform, "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Asked:
    """What a user asks of the caches of a program, as the flags of the same names."""

    bases: Path | None = None
    window: Window = Window()
    adapt: str | None = None

    def variables(self) -> dict[str, str]:
        """The environment's names of what was asked for. Raises CacheError about what no cache takes."""
        for name, n in self.window.asked().items():
            most = MAX_SINK if name == "n_sink" else MAX_RECENT
            if n > most:
                raise CacheError(name, f"expected 0 to {most} tokens, found {n}")
        found = {NUMBERS[name]: str(n) for name, n in self.window.asked().items()}
        if self.adapt is not None:
            from subkv.format import adapt as adaptive  # native libraries: not for a --help

            if self.adapt != adaptive.NONE:
                adaptive.parse(self.adapt)
            found[ADAPT] = self.adapt
        return found

    def flags(self) -> list[str]:
        """Names of what only a coded cache has."""
        named = {"bases": self.bases, "adapt": self.adapt}
        return [*(name for name, value in named.items() if value is not None), *self.window.asked()]


def _asked(bases: Path | None, adapt: str | None, **window: int | None) -> Asked:
    return Asked(bases, Window.of(**window), adapt)


asked_options = group(
    "asked",
    _asked,
    click.option("--bases", type=options.PATH, metavar="FILE", help="bases: a sidecar or a converted model"),
    options.window_options,
    options.rollback_option,
)


@dataclass(frozen=True)
class Prepared:
    """The cache that a model will get. layout: the file with its bases, None: an ordinary one; told: one line."""

    layout: Path | None
    told: str


def prepare(model: Path, strict: bool = False) -> Prepared:
    """Find the bases of a model, or make them of its weights and keep them where the library looks for them.

    strict: coefficients were asked for by name; else a model for which no bases can be made gets an ordinary cache.
    Raises ModelFileError about `model_path`, CacheError about `bases` or `kv_cache`, SubkvError about XDG_CACHE_HOME.
    """
    # numpy and the native libraries: not for a --help
    from subkv.engine.cache import CODED, CacheOptions, choose_cache
    from subkv.format import store
    from subkv.native.gguf import check_model_file

    with concerning(model="model_path"):
        check_model_file(model)
    try:
        choice = choose_cache(model, CacheOptions(CODED))
    except CacheError as error:
        if strict or error.key != "kv_cache":
            raise
        return Prepared(None, f"KV cache: f16, as no bases can be made for {model}: {_cause(error)}")
    assert choice.layout is not None  # CODED was asked for
    if not choice.told:
        return _in_file(choice.layout)
    if choice.layout != store.beside(model) and choice.layout.parent != store.folder():
        reason = f"expected a folder in which the bases of {model} can be kept, found {store.folder()}"
        raise SubkvError("XDG_CACHE_HOME", reason)
    return Prepared(choice.layout, choice.told)


def _in_file(bases: Path) -> Prepared:
    """The cache by bases that need no search. Raises CacheError about `bases`, ModelFileError."""
    # numpy and the native libraries: not for a --help
    from subkv.engine import sidecars
    from subkv.engine.cache import CODED, CacheOptions, choose_cache

    choose_cache(bases, CacheOptions(CODED, bases=bases))
    return Prepared(bases, f"bases: of {bases}, {sidecars.bits(bases)}")


def cache_variables(
    models: Sequence[Path], asked: Asked, strict: bool = False, fixed: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Variables that give these models the caches that were asked for, and lines that say which these are.

    strict: as prepare(). fixed: whoever reads the variables may not have this user's cache folder, so that the file of
    a single model's bases is named. Raises as prepare() and Asked.variables().
    """
    found = asked.variables()
    if asked.bases is not None:
        prepared = [_in_file(asked.bases)]
    else:
        prepared = [prepare(model, strict) for model in models]
    value, layout = AUTO, prepared[0].layout if len(prepared) == 1 else None
    if layout is not None and (strict or fixed or asked.bases is not None):
        value = os.path.abspath(layout)
    several = len(prepared) > 1
    named = zip(models, prepared, strict=True) if several else [(None, one) for one in prepared]
    told = [f"{model.name}: {one.told}" if model else one.told for model, one in named]
    return {CACHE: value, **found}, told


def library_variables(libraries: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that have programs, and llama-cpp-python in them, use our libraries."""
    before = environment.get(LIBRARY_PATH, "")
    others = [folder for folder in before.split(os.pathsep) if folder != str(libraries)] if before else []
    own = {LIB_PATH: str(libraries), LIBRARY_PATH: os.pathsep.join([str(libraries), *others])}
    return own | mtmd_variable(libraries)


def _cause(error: CacheError) -> str:
    """Why bases cannot be made, without remedies."""
    cause = error.__cause__
    reason = cause.reason if isinstance(cause, SubkvError) else error.reason
    return reason.split("; use an ordinary cache")[0].split("; choose f16")[0]


def models_in(path: Path) -> list[Path]:
    """A model, or those of a folder: each GGUF that is no sidecar, no projector and no later file of a split model.

    Raises SubkvError about `prepare`.
    """
    if not path.is_dir():
        return [path]
    found = []
    for file in sorted(path.rglob("*.gguf")):
        part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", file.name)
        aside = file.name.endswith(".subkv-sidecar.gguf") or "mmproj" in file.name.lower()
        if not aside and (part is None or int(part[1]) == 1) and is_gguf(file):
            found.append(file)
    if not found:
        raise SubkvError("prepare", f"expected a folder with models (GGUF), found none in {path}")
    return found
