"""`subkv run PROGRAM …`: a program on llama.cpp's libraries, with coefficients in its KV cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from runtime import options
from runtime.launch import programs
from runtime.launch.arguments import Read, hub_models, name_of, read
from runtime.launch.environment import CACHE, OFF, Asked, asked_options, cache_variables, library_variables, models_in
from runtime.launch.environment import prepare as prepare_model
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning


def _unprepared(program: str, found: Read, others: bool) -> str:
    """Why no bases are made of what the arguments name, and how to have them, unless those of others were."""
    program = name_of(program)
    if found.elsewhere:
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
                    options.note(f"{model.name}: {prepare_model(model).told}")
            except SubkvError as error:
                if not path.is_dir() or error.key == "XDG_CACHE_HOME":
                    raise
                options.note(f"{model.name}: {error.reason}")


def _variables(program: str, found: Read, asked: Asked, others: bool) -> dict[str, str]:
    """What the environment says of the cache; also says it on stderr. others: bases of others were made.

    Raises SubkvError.
    """
    if found.ordinary:
        kinds = (found.type_k or "f16", found.type_v or found.type_k or "f16")
        name = kinds[0] if kinds[0] == kinds[1] else "/".join(kinds)
        for key in asked.flags():
            raise SubkvError(key, f"expected a coefficient cache (-ctk subkv), found {name}")
        options.note(f"KV cache: {name}, as the arguments say")
        return {CACHE: OFF}
    with concerning(model="-m", model_path="-m", kv_cache="-ctk"):
        variables, told = cache_variables(found.models, asked, found.strict)
    for line in told or [_unprepared(program, found, others)]:
        options.note(line)
    return variables


@command(context_settings={"allow_interspersed_args": False})
@asked_options
@click.option(
    "--prepare",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    metavar="PATH",
    help="make the bases of this model, or of every model in this folder, first (for what the arguments do not name)",
)
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def main(asked: Asked, prepare: tuple[Path, ...], program: str, arguments: tuple[str, ...]) -> None:
    """Run PROGRAM with coefficients in its KV cache: one of llama.cpp's, or Python on llama-cpp-python.

    The bases of the model that -m or -hf names are found, or derived from its weights; PROGRAM then replaces this
    one. Its arguments are its own, except that -ctk subkv is understood here.
    """
    # numpy and the native libraries: not for a --help
    from subkv.engine.cache import STOCK_TYPES
    from subkv.native.library import lib_dir

    libraries = lib_dir()
    environment = os.environ | library_variables(libraries, os.environ)
    path = programs.find(program, libraries, os.environ.get("PATH"))
    programs.check(program, path, libraries, environment)
    with concerning(type_k="-ctk", type_v="-ctv"):
        found = read(program, arguments, environment, STOCK_TYPES)
    if found.repos:
        with concerning(hf_repo="-hf"):
            found = hub_models(found)
    _prepare_others(prepare)
    environment = found.environment | _variables(program, found, asked, bool(prepare))
    raise click.exceptions.Exit(programs.execute(path, [program, *found.arguments], environment))


if __name__ == "__main__":
    main()
