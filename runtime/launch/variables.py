"""The environment variables that choose a program's KV cache, and the bases for it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import group
from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.base.numbers import shown
from subkv.engine.request import AUTOMATIC, CacheRequest
from subkv.format.window import VARIABLES, Window
from subkv.native.bases import AUTO, CODED
from subkv.native.library import LIB_PATH
from subkv.native.paths import mtmd_variable

if TYPE_CHECKING:
    from subkv.engine.cache import CacheChoice

CACHE = "SUBKV"  # auto, subkv (coded or no context), or the path of the file with the bases
BITS = "SUBKV_BITS"
ANY_MODEL = "KV cache: subkv for every model that can have bases, f16 for others"  # whose files are not known
READ = (CACHE, BITS, *VARIABLES.values())
LIBRARY_PATH = {"darwin": "DYLD_LIBRARY_PATH", "win32": "PATH"}.get(sys.platform, "LD_LIBRARY_PATH")


def request_variables(request: CacheRequest) -> dict[str, str]:
    """The environment variables for a request's window and bits. Raises CacheError about invalid numbers."""
    # numpy and the native libraries: not for a --help
    from subkv.engine.cache import choose_cache

    choose_cache(None, CacheRequest(CODED, window=request.window, kv_bits=request.kv_bits))
    request.window.check_adapt()
    bits = {} if request.kv_bits is None else {BITS: f"{request.kv_bits:g}"}
    return bits | {VARIABLES[name]: str(value) for name, value in request.window.requested().items()}


def check_variables(environment: Mapping[str, str]) -> None:
    """Raises SubkvError about a variable of a window or of bits that no context accepts.

    llama-cpp-python with verbose=False hides the reason of libllama.
    """
    variables = {"kv_bits": BITS, **VARIABLES}
    given: dict[str, Any] = {name: text for name, variable in variables.items() if (text := environment.get(variable))}
    for name in given.keys() - {"adapt"}:  # the forms that libsubkv reads
        form = r"[0-9]+(\.[0-9]*)?" if name == "kv_bits" else r"[+-]?[0-9]{1,18}"
        if not re.fullmatch(form, given[name], re.ASCII):
            kind = "bits per element, such as 3 or 4.25" if name == "kv_bits" else "a whole number"
            raise SubkvError(variables[name], f"expected {kind}, found {shown(given[name])}")
        given[name] = float(given[name]) if name == "kv_bits" else int(given[name])
    bits = given.pop("kv_bits", None)
    with concerning(**variables):
        request_variables(CacheRequest(window=Window.of(**given), kv_bits=bits))


request_options = group(
    "request",
    options.requested_cache,
    click.option("--bases", type=options.PATH, metavar="FILE", help="bases: a sidecar or a converted model"),
    options.bits_option,
    options.memory_option,
    options.window_options,
    options.rollback_option,
)


def prepare(model: Path, request: CacheRequest = AUTOMATIC, strict: bool = False) -> CacheChoice:
    """Look up the bases of a model, or derive them from its weights, as the library does it in the program.

    strict: raise if bases cannot be derived; else the model gets an ordinary cache.
    Raises ModelFileError about `model_path`, CacheError about `bases` or `kv_cache`.
    """
    # numpy and the native libraries: not for a --help
    from subkv.engine.cache import choose_cache, f16_instead
    from subkv.native.gguf import check_model_file

    if request.bases is None:
        with concerning(model="model_path"):
            check_model_file(model)
    try:
        coded = CODED if request.kv_cache == AUTO else request.kv_cache
        return choose_cache(model, replace(request, kv_cache=coded))
    except CacheError as error:
        if strict or error.key != "kv_cache":
            raise
        return f16_instead(AUTOMATIC, error)


def fit_memory(model: Path, request: CacheRequest, n_ctx: int, n_seq: int, unified: bool) -> tuple[CacheRequest, str]:
    """The request with the largest budget that fits in its kv_memory, and a line about it.

    n_ctx: tokens of all sequences; unified: they share the cells.

    Raises as prepare(), and CacheError about `kv_memory`.
    """
    # numpy and the native libraries: not for a --help
    from subkv.engine.cache import choose_cache
    from subkv.engine.fitting import fitted
    from subkv.native.binding import C

    choice = choose_cache(model, request)
    params = C.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx, n_seq, unified
    fitting = fitted(model, request, choice, params)
    return replace(request, kv_memory=None, kv_bits=fitting.budget), fitting.fit


def cache_variables(
    models: Sequence[Path],
    request: CacheRequest,
    strict: bool = False,
    name_bases: bool = False,
    cache: str = AUTO,
) -> tuple[dict[str, str], list[str]]:
    """Variables that give these models the requested caches, and a line about each cache.

    strict: as prepare(). name_bases: name the file with a single model's bases, for readers with another cache folder.
    cache: AUTO, or CODED: they get no other one.

    Raises as prepare() and request_variables().
    """
    variables = request_variables(request)
    if request.bases is not None:
        prepared = [prepare(request.bases, request, strict=True)]
    else:
        prepared = [prepare(model, request, strict) for model in models]
    value, layout = cache if models else AUTO, prepared[0].layout if len(prepared) == 1 else None
    if layout is not None and not prepared[0].derived and (name_bases or request.bases is not None):
        value = os.path.abspath(layout)
    several = len(prepared) > 1
    named = zip(models, prepared, strict=True) if several else [(None, one) for one in prepared]
    notes = [f"{model.name}: {one.line}" if model else one.line for model, one in named]
    return {CACHE: value, **variables}, notes


def library_variables(libraries: Path) -> dict[str, str]:
    """Variables that make llama-cpp-python use our libraries, which find each other by their own paths."""
    return {LIB_PATH: str(libraries)} | mtmd_variable(libraries)


def search_variables(libraries: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes a program use our libraries that is linked with them and does not know their folder."""
    return {LIBRARY_PATH: os.pathsep.join([str(libraries), *_others(libraries, environment)])}


def without_libraries(libraries: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which programs find the libraries of their own llama.cpp."""
    ours = {LIB_PATH: str(libraries), **mtmd_variable(libraries)}  # as `import subkv` sets them here
    kept = {name: value for name, value in environment.items() if name != LIBRARY_PATH and ours.get(name) != value}
    others = _others(libraries, environment)
    return kept | ({LIBRARY_PATH: os.pathsep.join(others)} if others else {})


def _others(libraries: Path, environment: Mapping[str, str]) -> list[str]:
    """The other folders in which the user's programs look for libraries."""
    before = environment.get(LIBRARY_PATH, "")
    return [folder for folder in before.split(os.pathsep) if folder != str(libraries)] if before else []


def program_path(libraries: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """PATH with the folder of our llama.cpp programs first; empty if this build has none."""
    own = next((folder for folder in (libraries, libraries.parent / "bin") if any(folder.glob("llama-*"))), None)
    if own is None:
        return {}
    others = [folder for folder in environment.get("PATH", "").split(os.pathsep) if folder not in ("", str(own))]
    return {"PATH": os.pathsep.join([str(own), *others])}
