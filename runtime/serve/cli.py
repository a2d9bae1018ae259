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
from runtime.launch.start import Start, find_program, prepare_start, read_arguments
from runtime.launch.variables import CacheRequest, request_options
from subkv.base.command import command, group, stack
from subkv.base.errors import SubkvError

SERVER = "llama-server"


# Without these, glibc keeps freed blocks of up to 32 MiB (a quarter of the memory after twenty minutes), every page in
# the user's browser can read answers, and prompts in memory take up to 8 GiB.
DEFAULTS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "LLAMA_ARG_CORS_ORIGINS": "localhost",
    "LLAMA_ARG_CACHE_RAM": "1024",
}


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


def _with_model_flag(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, with -m in front of a model that follows no option. Raises click.UsageError for another word.

    llama-server has only options; a word behind one may be its value.
    """
    if arguments and not arguments[0].startswith("-"):
        return ["-m", options.model_file(arguments[0]), *arguments[1:]]
    for i, (before, word) in enumerate(itertools.pairwise(arguments), 1):
        if word.lower().endswith(".gguf") and not re.match(r"-\D", before):
            return [*arguments[:i], "-m", *arguments[i:]]
    return arguments


def start(arguments: Sequence[str], request: CacheRequest, store: Mapping[str, str]) -> Start:
    """llama-server with these arguments, and with the demo model if they name none.

    Without a given type the cache is coded, or there is an error, except for embeddings and for models that the
    arguments do not name. Raises SubkvError.
    """
    arguments = _with_model_flag(arguments)
    program = find_program(SERVER, {**DEFAULTS, **os.environ, **store}, ours=True)
    read = read_arguments(program, arguments)
    if read.prints:
        return Start(program.path, [SERVER, *arguments], program.environment)
    defaults = _allowed_hosts(read.host or "127.0.0.1")
    if not read.names_model:
        options.note(demo.NOTE)
        defaults |= {f"LLAMA_ARG_{name.upper()}": f"{value:g}" for name, value in demo.ANSWERS.items()}
        # its own template adds a system message, with which it answers worse
        defaults |= {"LLAMA_ARG_ALIAS": demo.NAME, "LLAMA_ARG_CHAT_TEMPLATE": "chatml"}
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
