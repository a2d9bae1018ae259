"""`subkv run PROGRAM …`: a program on llama.cpp's libraries, with coefficients in its KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runtime.launch.start import find_program, prepare_start, read_arguments
from runtime.launch.variables import CacheRequest, request_options
from subkv.base.command import command


@command(context_settings={"allow_interspersed_args": False})
@request_options
@click.option(
    "--prepare",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    metavar="PATH",
    help="make the bases of this model, or of every model in this folder, first (for what the arguments do not name)",
)
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def main(request: CacheRequest, prepare: tuple[Path, ...], program: str, arguments: tuple[str, ...]) -> None:
    """Run PROGRAM with coefficients in its KV cache: one of llama.cpp's, or Python on llama-cpp-python.

    The bases of the model that -m or -hf names are found, or derived from its weights; PROGRAM then replaces this
    one. Its arguments are its own, except that -ctk subkv is read here.
    """
    found = find_program(program, os.environ)
    raise click.exceptions.Exit(prepare_start(found, read_arguments(found, arguments), request, prepare).execute())


if __name__ == "__main__":
    main()
