"""What `subkv run` and `subkv serve` start: a program's file, its arguments, and an environment with a cache in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime import options
from runtime.launch import programs
from runtime.launch.arguments import ProgramArguments, program_name, read, with_hub_models
from runtime.launch.variables import CACHE, OFF, CacheRequest, cache_variables, library_variables, models_in
from runtime.launch.variables import prepare as prepare_model
from subkv.base.errors import SubkvError, concerning


@dataclass(frozen=True)
class Start:
    """A program that is ready to run. arguments: the first is the program's name, as execve takes them."""

    path: Path
    arguments: list[str]
    environment: dict[str, str]

    def execute(self) -> int:
        """Replace this process by the program; on Windows wait for it and return its exit code. Raises SubkvError."""
        return programs.execute(self.path, self.arguments, self.environment)


def _unprepared(program: str, found: ProgramArguments, others: bool) -> str:
    """Why no bases are derived for the arguments, and how to have them, unless those of others were."""
    program = program_name(program)
    if found.from_url:
        why, what = "the model comes from an address", "FILE"
    elif found.folder is not None:
        why, what = f"{program} chooses models itself", "DIR"
    else:
        why, what = "the arguments name no model", "FILE"
    line = "KV cache: subkv for every model that has bases, f16 for others"
    return line if others else f"{line}, as {why}; `subkv run --prepare {what} {program} …` makes bases first"


def _prepare_others(paths: Sequence[Path]) -> None:
    """Make the bases of models that are not among the arguments; in a folder one that is refused does not stop others.

    Raises SubkvError about `prepare`.
    """
    for path in paths:
        for model in models_in(path):
            try:
                with concerning(model="prepare", model_path="prepare"):
                    options.note(f"{model.name}: {prepare_model(model).note}")
            except SubkvError as error:
                if not path.is_dir() or error.key == "XDG_CACHE_HOME":
                    raise
                options.note(f"{model.name}: {error.reason}")


def _variables(program: str, found: ProgramArguments, request: CacheRequest, others: bool) -> dict[str, str]:
    """The variables that choose the cache; also reported on stderr. others: bases of other models were made.

    Raises SubkvError.
    """
    if found.ordinary:
        kinds = (found.type_k or "f16", found.type_v or found.type_k or "f16")
        name = kinds[0] if kinds[0] == kinds[1] else "/".join(kinds)
        for key in request.flags():
            raise SubkvError(key, f"expected a coefficient cache (-ctk subkv), found {name}")
        options.note(f"KV cache: {name}, as the arguments say")
        return {CACHE: OFF}
    with concerning(model="-m", model_path="-m", kv_cache="-ctk"):
        variables, note = cache_variables(found.models, request, found.strict)
    for line in note or [_unprepared(program, found, others)]:
        options.note(line)
    return variables


@dataclass(frozen=True)
class Program:
    """A program that was found, and the environment in which it uses our libraries."""

    name: str
    path: Path
    environment: dict[str, str]


def find_program(program: str, environment: Mapping[str, str]) -> Program:
    """The program of that name. Raises SubkvError about `program`."""
    # the native libraries: not for a --help
    from subkv.native.library import lib_dir

    libraries = lib_dir()
    with_libraries = {**environment, **library_variables(libraries, environment)}
    path = programs.find(program, libraries, environment.get("PATH"))
    programs.check(program, path, libraries, with_libraries)
    return Program(program, path, with_libraries)


def read_arguments(program: Program, arguments: Sequence[str]) -> ProgramArguments:
    """The arguments as far as they concern model and cache. Raises CacheError about `-ctk` or `-ctv`."""
    from subkv.engine.cache import STOCK_TYPES  # numpy and the native libraries

    with concerning(type_k="-ctk", type_v="-ctv"):
        return read(program.name, arguments, program.environment, STOCK_TYPES)


def prepare_start(
    program: Program, found: ProgramArguments, request: CacheRequest, prepare: Sequence[Path] = ()
) -> Start:
    """Bases are found or derived, and the cache is in the environment. Raises SubkvError."""
    if found.repos:
        with concerning(hf_repo="-hf"):
            found = with_hub_models(found)
    _prepare_others(prepare)
    environment = found.environment | _variables(program.name, found, request, bool(prepare))
    return Start(program.path, [program.name, *found.arguments], environment)
