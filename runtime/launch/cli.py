"""`subkv run PROGRAM …`: a program on llama.cpp's libraries, with coefficients in its KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runtime.launch.start import located, prepared, understood
from runtime.launch.variables import Asked, asked_options
from subkv.base.command import command


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
    found = located(program, os.environ)
    raise click.exceptions.Exit(prepared(found, understood(found, arguments), asked, prepare).execute())


if __name__ == "__main__":
    main()
