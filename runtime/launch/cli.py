"""`subkv run PROGRAM …`: runs a program on our libraries, with a coded KV cache."""

from __future__ import annotations

import os

import click

from runtime import options
from runtime.launch.start import find_program, prepare_start, read_arguments
from runtime.launch.variables import request_options
from subkv.base.command import command
from subkv.base.folders import PLUGIN_ONLY
from subkv.engine.request import CacheRequest


@command(context_settings={"allow_interspersed_args": False})
@request_options
@click.option(
    "--plugin", is_flag=True, help="for programs that load a llama.cpp of their own, where `run` does not find it"
)
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def main(request: CacheRequest, plugin: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run PROGRAM with coefficients in its KV cache: one of llama.cpp's, or Python on llama-cpp-python.

    Bases of the model of -m or -hf are looked up, or derived from its weights. PROGRAM then replaces this process. It
    gets all its arguments.
    """
    located = find_program(program, os.environ, plugin=plugin or PLUGIN_ONLY, arguments=arguments)
    if located.door.plugin:
        options.note(f"{located.path} {located.door.why}")
    raise click.exceptions.Exit(prepare_start(located, read_arguments(located, arguments), request).execute())


if __name__ == "__main__":
    main()
