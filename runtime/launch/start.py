"""Prepares a start of `subkv run` or `subkv serve`: the program's file, arguments and environment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime import options
from runtime.launch import doors, programs
from runtime.launch.arguments import (
    FORMER,
    ProgramArguments,
    empty_model,
    is_coded,
    is_llama_cpp_program,
    program_name,
    read,
    with_hub_models,
)
from runtime.launch.variables import (
    ANY_MODEL,
    CACHE,
    cache_variables,
    check_variables,
    fit_memory,
    library_variables,
    request_variables,
    search_variables,
    without_libraries,
)
from runtime.launch.variables import prepare as prepare_model
from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.base.folders import PLUGIN_ONLY
from subkv.base.threads import MAX_THREADS
from subkv.engine.request import CacheRequest
from subkv.native.bases import AUTO, CODED

THREADS = ("-t", "--threads", "-tb", "--threads-batch")
SERVER_SLOTS = 4  # of llama-server without -np, in one context
FITTED = ("llama-server", "llama-cli", "llama-completion", "llama-mtmd-cli")  # -c is the size of their one context


@dataclass(frozen=True)
class Start:
    """A program that is ready to run. arguments: as for execve, the first is the program's name."""

    path: Path
    arguments: list[str]
    environment: dict[str, str]

    def execute(self) -> int:
        """Replace this process by the program; on Windows, wait for it and return its exit code. Raises SubkvError."""
        return programs.execute(self.path, self.arguments, self.environment)


@dataclass(frozen=True)
class Program:
    """A program, its file, and its environment, in which it finds our libraries if it uses them."""

    name: str
    path: Path
    environment: dict[str, str]
    door: doors.Door


def _with_fitting_budget(program: str, read: ProgramArguments, request: CacheRequest) -> CacheRequest:
    """The request with the budget that fits in its memory; logs it to stderr. Raises CacheError about `kv_memory`."""
    if PLUGIN_ONLY:
        raise CacheError("kv_memory", "expected --kv-bits, because it needs package subkv, found it")
    if program_name(program) not in FITTED:
        raise CacheError("kv_memory", f"expected one of {', '.join(FITTED)}, found {program_name(program)}")
    if read.ordinary:
        raise CacheError("kv_memory", f"expected a coefficient cache (-ctk subkv), found {'/'.join(read.types)}")
    if len(read.models) != 1 or not read.n_ctx:
        found = f"{len(read.models)} models" if len(read.models) != 1 else "no context size"
        raise CacheError("kv_memory", f"expected -m with one model and -c with its context size, found {found}")
    n_seq = read.n_parallel or (SERVER_SLOTS if program_name(program) == "llama-server" else 1)
    with concerning(model="-m", model_path="-m", kv_cache="-ctk"):
        asked = _with_type(request, read.coded_type)
        fitting, line = fit_memory(read.models[0], asked, read.n_ctx, n_seq, unified=read.n_parallel is None)
    options.note(line)
    return replace(request, kv_memory=None, kv_bits=fitting.kv_bits)


def _with_type(request: CacheRequest, coded: str | None) -> CacheRequest:
    """The request with a coded type of the arguments, whose bits have precedence."""
    if coded is None:
        return request
    return replace(request, kv_cache=coded, kv_bits=None if ":" in coded else request.kv_bits)


def _variables(program: Program, read: ProgramArguments, request: CacheRequest, strict: bool) -> dict[str, str]:
    """The variables for contexts whose cache type is not given. Logs the caches to stderr.

    strict: the cache must be coded unless the arguments say otherwise. Raises SubkvError.
    """
    plugin = program.door.plugin  # which cannot look beside the model's file
    for flag, types in (("-ctk", read.types), ("-ctkd", read.draft_types)) if plugin else ():
        if own := next((name for name in types if is_coded(name) or name == AUTO), None):
            reason = f"expected none, because the plug-in codes every cache that has bases (--kv-bits), found {own}"
            raise SubkvError(flag, reason)
    variables: dict[str, str] = {}
    models = () if read.ordinary else read.models
    if request.kv_memory is not None:
        request = _with_fitting_budget(program.name, read, request)
    if read.ordinary:
        name = "/".join(dict.fromkeys(read.types))
        for key in () if read.codes_draft else request.only_coded():
            raise SubkvError(key, f"expected a coefficient cache (-ctk subkv), found {name}")
        options.note(f"KV cache: {name}, from the arguments")
    if not read.ordinary or read.codes_draft:
        check_variables({**read.environment, **request_variables(request)})
        with concerning(model="-m", model_path="-m", kv_cache="-ctk"):
            by_default = strict and not read.types
            asked, kind = _with_type(request, read.coded_type), CODED if by_default else AUTO
            variables, notes = cache_variables(models, asked, read.strict or by_default, bool(plugin), kind)
            variables |= request_variables(request)
        if not (notes or read.ordinary):
            notes = [ANY_MODEL]
        for line in notes:
            options.note(line)
    for model in ([read.draft] if read.draft else read.models) if read.codes_draft else []:
        with concerning(model="-md", model_path="-md", kv_cache="-ctkd"):
            strict_draft = any(is_coded(name) for name in read.draft_types)
            asked = _with_type(replace(request, bases=None), read.draft_type)
            options.note(f"draft {model.name}: {prepare_model(model, asked, strict_draft).line}")
    return variables


def find_program(
    program: str,
    environment: Mapping[str, str],
    ours: bool = False,
    plugin: bool = PLUGIN_ONLY,
    arguments: Sequence[str] = (),
) -> Program:
    """Look up a program by name. ours: only one that uses our libraries. plugin, arguments: as choose_door().

    Raises SubkvError about `program`.
    """
    # the native libraries: not for a --help
    from subkv.native.library import lib_dir

    libraries = lib_dir()
    own = without_libraries(libraries, environment)
    known = {**doors.without_plugin(own), **library_variables(libraries)}
    searched = {**known, **search_variables(libraries, environment)}
    path = programs.find(program, libraries, environment.get("PATH"), not plugin)
    if ours:
        programs.check(program, path, libraries, searched)
        with_ours, alone = (programs.listed_libraries(path, variables) for variables in (searched, own))
        door = doors.our_door(libraries, with_ours, alone, own)
    else:
        door = doors.choose_door(program, path, libraries, own, searched, plugin, arguments)
    return Program(program, path, own if door.plugin else searched if door.search else known, door)


def read_arguments(program: Program, arguments: Sequence[str]) -> ProgramArguments:
    """Read models and cache types from the arguments. Raises SubkvError about a flag that our llama.cpp has renamed."""
    if is_llama_cpp_program(program.name) and (flag := empty_model(arguments)):  # a variable of a shell that is not set
        raise SubkvError(flag, "expected a model, found an empty name")
    is_ours = program.door.plugin is None and is_llama_cpp_program(program.name)
    if is_ours and program_name(program.name) != "llama-bench":
        for flag in arguments:
            if flag in FORMER:
                raise SubkvError(flag, f"expected {FORMER[flag]}, its name in this version of llama.cpp")
        for flag, n in itertools.pairwise(arguments):
            if flag in THREADS and n.isdecimal() and not 1 <= int(n) <= MAX_THREADS:  # as in our own programs
                reason = f"expected 1 to {MAX_THREADS} threads, or -1 for all processors, found {n}"
                raise SubkvError(flag, reason)
    from subkv.native.library import cache_types  # the native libraries

    return read(program.name, arguments, program.environment, cache_types())


def prepare_start(
    program: Program,
    arguments: ProgramArguments,
    request: CacheRequest,
    strict: bool = False,
    defaults: Mapping[str, str] | None = None,
) -> Start:
    """Look up or derive the bases and add the default cache to the environment.

    strict: without a given type, a coded cache or none. defaults: variables, unless the environment has them. Raises
    SubkvError.
    """
    if arguments.repos:
        with concerning(hf_repo="-hf"):
            arguments = with_hub_models(arguments)
    inherited = doors.door_environment(program.door, arguments)
    variables = _variables(program, arguments, request, strict)
    inherited.pop(CACHE, None)
    return Start(program.path, [program.name, *arguments.arguments], {**(defaults or {}), **inherited, **variables})
