"""`subkv serve`: llama-server with a coded KV cache.

python -m runtime.serve                              the demo model, http://127.0.0.1:8080
python -m runtime.serve -m model.gguf -c 32768 -np 4 --api-key SECRET --store FOLDER
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from runtime import demo, options
from runtime.launch.arguments import ProgramArguments
from runtime.launch.start import Program, Start, find_program, prepare_start, read_arguments
from runtime.launch.variables import request_options
from subkv.base.command import command, group, stack
from subkv.base.errors import SubkvError
from subkv.engine.request import CacheRequest

SERVER = "llama-server"


# Without these, glibc keeps freed blocks of up to 32 MiB (a quarter of the memory after twenty minutes), every page in
# the user's browser can read answers, and prompts in memory take up to 8 GiB.
DEFAULTS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "LLAMA_ARG_CORS_ORIGINS": "localhost",
    "LLAMA_ARG_CACHE_RAM": "1024",
}

DEMO_FLAGS = {
    "TEMPERATURE": ("--temp", "--temperature"),
    "REPEAT_PENALTY": ("--repeat-penalty",),
    "N_PREDICT": ("-n", "--predict", "--n-predict"),
    "ALIAS": ("-a", "--alias"),
    "CHAT_TEMPLATE": ("--chat-template", "--chat-template-file"),
}
# Options whose value may be a GGUF file that is not the model.
OTHER_FILES = (
    *("-mm", "--mmproj", "-md", "--model-draft", "--spec-draft-model", "-mv", "--model-vocoder"),
    *("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
)


def _allowed_hosts(host: str) -> dict[str, str]:
    """Variables that restrict Host headers to localhost (against DNS rebinding), if the server listens there."""
    local = host == "localhost" or host == "::1" or host.startswith("127.")
    return {"SUBKV_ALLOW_HOST": "localhost"} if local else {}


def _store(store: Path | None, store_mib: int | None, store_moved: bool) -> dict[str, str]:
    """The variables of the prompt store. Raises SubkvError and click.UsageError."""
    moved = {"SUBKV_STORE_MOVED": "1"} if store_moved else {}
    if store is None:
        if store_mib is not None:
            raise click.UsageError("--store-mib: expected --store with it, found none")
        return moved
    if os.path.lexists(store) and not store.is_dir():
        raise SubkvError("store", f"expected a folder, found the file {store}")
    variables = moved | {"SUBKV_STORE": os.path.abspath(store)}
    return variables if store_mib is None else variables | {"SUBKV_STORE_MIB": str(store_mib)}


store_options = group(
    "store",
    _store,
    click.option(
        "--store",
        type=options.PATH,
        metavar="FOLDER",
        help="folder that stores evaluated prompts across restarts; several servers may share it",
    ),
    click.option("--store-mib", type=click.IntRange(min=1), help="maximum size of the folder in MiB [default: 4096]"),
    click.option(
        "--store-moved",
        is_flag=True,
        help="text behind another beginning is moved, not evaluated: from slots, memory and the folder",
    ),
)


def _place_of_model(arguments: Sequence[str]) -> int | None:
    """Where a model stands that follows no option. Raises click.UsageError for another first word.

    llama-server has only options; a word behind one may be its value.
    """
    if arguments and not arguments[0].startswith("-"):
        options.model_file(arguments[0])
        return 0
    pairs = enumerate(itertools.pairwise(arguments), 1)
    return next((i for i, (flag, word) in pairs if options.is_model_file(word) and not re.match(r"-\D", flag)), None)


def _read(program: Program, arguments: Sequence[str]) -> ProgramArguments:
    """The arguments, with -m in front of a model that follows no option. Raises click.UsageError for a second model."""
    place, read = _place_of_model(arguments), read_arguments(program, arguments)
    if read.prints:
        return read
    if place is not None:
        if read.names_model:
            raise click.UsageError(f"-m: expected one model, found another one: {arguments[place]}")
        return read_arguments(program, [*arguments[:place], "-m", *arguments[place:]])
    if not read.names_model:
        for flag, word in itertools.pairwise(arguments):
            if options.is_model_file(word) and flag not in OTHER_FILES:
                raise click.UsageError(f"{word}: expected -m in front of a model behind an option, found {flag}")
    return read


def _demo_defaults(arguments: Sequence[str]) -> dict[str, str]:
    """Variables for the demo model's answers and its name; llama-server warns if an option replaces a variable."""
    values = {name.upper(): f"{value:g}" for name, value in demo.ANSWERS.items()}
    # its own template adds a system message, with which it answers worse
    values |= {"ALIAS": demo.NAME, "CHAT_TEMPLATE": "chatml"}
    given = {word.partition("=")[0] for word in arguments}
    return {f"LLAMA_ARG_{name}": value for name, value in values.items() if not given.intersection(DEMO_FLAGS[name])}


def start(arguments: Sequence[str], request: CacheRequest, store: Mapping[str, str]) -> Start:
    """llama-server with these arguments, and with the demo model if they name none.

    Without a given type the cache is coded, or there is an error, except for embeddings and for models that the
    arguments do not name. Raises SubkvError.
    """
    program = find_program(SERVER, {**DEFAULTS, **os.environ, **store}, ours=True)
    read = _read(program, arguments)
    if read.prints:
        return Start(program.path, [SERVER, *arguments], program.environment)
    defaults = _allowed_hosts(read.host or "127.0.0.1")
    if not read.names_model:
        options.note(demo.NOTE)
        defaults |= _demo_defaults(arguments)
        read = read.with_model(demo.model_path() if read.ordinary or request.bases is not None else demo.converted())
    return prepare_start(program, read, request, strict=not read.embeds, defaults=defaults)


# -h and every other short option belong to llama-server
SETTINGS = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
serve_options = stack(
    request_options,
    store_options,
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[LLAMA-SERVER'S OPTIONS]..."),
)


@command(context_settings=SETTINGS)
@serve_options
def main(request: CacheRequest, store: dict[str, str], arguments: tuple[str, ...]) -> None:
    """Serve a model over HTTP: llama-server with -ctk subkv; without -m or -hf, the demo model.

    All other options go to llama-server: -m or -hf, -c, -np, --host, --port, --api-key and so on.
    `subkv run llama-server --help` lists them.
    """
    raise click.exceptions.Exit(start(arguments, request, store).execute())


@command("flags", context_settings=SETTINGS)
@serve_options
def _flags(request: CacheRequest, store: dict[str, str], arguments: tuple[str, ...]) -> Start:
    return start(arguments, request, store)


def flags_context(arguments: Sequence[str]) -> click.Context:
    """Parses our own options of a command line, without opening the model. Raises click's errors."""
    return _flags.make_context("flags", list(arguments))


def serve_start(arguments: Sequence[str]) -> Start:
    """The start of `subkv serve` with this command line, not carried out. Raises click.ClickException."""
    result: Start = _flags.main(list(arguments), prog_name="flags", standalone_mode=False)
    return result


if __name__ == "__main__":
    main()
