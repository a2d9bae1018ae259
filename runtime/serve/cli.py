"""Flags, start and end of the server.

python -m runtime.serve                                  the demo model on a compressed cache, http://127.0.0.1:8080
python -m runtime.serve -m model.subkv.gguf -c 32768 -np 4 --api-key SECRET
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import signal
from typing import Any

import click

from runtime import options
from runtime.serve.opened import Wanted
from runtime.serve.settings import LOG_FORMATS, N_CTX_SLOT, N_SLOTS, POOLING, Limits, Listening, Offer, Remembering
from subkv.base.command import command, group, stack

N_OTHER_FILES = 64
SECONDS = click.FloatRange(min=0, min_open=True)


def _n_connections(wanted: int) -> int:
    """How many connections the process may hold, with some of its files left for everything else."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = wanted + N_OTHER_FILES
    if soft < n_files:
        soft = n_files if hard == resource.RLIM_INFINITY else min(n_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(wanted, soft - N_OTHER_FILES)


listening_options = group(
    "listening",
    Listening,
    click.option("--host", default="127.0.0.1", envvar="LLAMA_ARG_HOST", help="address to listen on"),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8080,
        envvar="LLAMA_ARG_PORT",
        help="port, 0: a free one, which is printed",
    ),
    click.option("--api-key", multiple=True, envvar="LLAMA_API_KEY", help="key that requests must give"),
    click.option("--api-key-file", type=options.PATH, metavar="FILE", help="file of keys, one per line"),
    click.option(
        "--allow-host",
        multiple=True,
        metavar="NAME",
        help="name under which the server, or a page that asks it, may be reached beside localhost, *: any",
    ),
    click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default=Listening.log_format,
        help="a line on stderr for every request",
    ),
)
offer_options = group(
    "offer",
    Offer,
    click.option(
        "-np",
        "--parallel",
        type=click.IntRange(1, 64),
        default=N_SLOTS,
        envvar="LLAMA_ARG_N_PARALLEL",
        help="slots: requests that generate together, and conversations whose cells are kept",
    ),
    options.context_option(
        None,
        f"context in tokens, divided by the slots, 0: what the model was trained with [default: {N_CTX_SLOT} a slot]",
    ),
    click.option("-a", "--alias", envvar="LLAMA_ARG_ALIAS", help="the model's name in answers"),
    click.option("--chat-format", help="llama_cpp's name of a chat format [default: the model's template]"),
    click.option(
        "--slot-save-path",
        type=options.PATH,
        envvar="LLAMA_ARG_SLOT_SAVE_PATH",
        metavar="FOLDER",
        help="where slots are saved",
    ),
    click.option(
        "--embedding", "--embeddings", "embeddings", is_flag=True, envvar="LLAMA_ARG_EMBEDDINGS", help="embeddings only"
    ),
    click.option(
        "--pooling",
        type=click.Choice(list(POOLING)),
        envvar="LLAMA_ARG_POOLING",
        help="how embeddings are pooled [default: the model's way]",
    ),
)
memory_options = group(
    "remembering",
    Remembering,
    click.option(
        "-cram",
        "--cache-ram",
        type=click.IntRange(min=0),
        default=Remembering.cache_ram,
        envvar="LLAMA_ARG_CACHE_RAM",
        help="MiB of memory for prefixes that slots held, 0: none",
    ),
    click.option("--cache-disk", type=options.PATH, metavar="FOLDER", help="where prefixes outlive the server"),
    click.option(
        "--cache-disk-size",
        type=click.IntRange(min=1),
        default=Remembering.cache_disk_size,
        help="MiB that the folder or store may hold",
    ),
    click.option(
        "--cache-store", metavar="URL", help="where prefixes are shared with other servers, by fsspec: s3://…, file://…"
    ),
    click.option("--shared-cache", is_flag=True, help="what was remembered for one API key serves all of them"),
)
limit_options = group(
    "limits",
    Limits,
    options.predict_option("most tokens per answer, -1: as many as a slot holds"),
    click.option(
        "--queue",
        "n_queue",
        type=click.IntRange(min=0),
        default=Limits.n_queue,
        help="requests that may wait for a slot",
    ),
    click.option("--max-body", type=click.IntRange(min=1), default=Limits.max_body, help="bytes of a request's body"),
    click.option(
        "--header-timeout",
        type=SECONDS,
        default=Limits.header_timeout,
        help="seconds for a request's headers to come, and for a connection without a request",
    ),
    click.option(
        "--connections",
        "n_connections",
        type=click.IntRange(min=1),
        default=Limits.n_connections,
        help="connections at a time; beyond them the one that has waited longest for a request is closed",
    ),
    click.option(
        "--grammar-timeout",
        type=SECONDS,
        default=Limits.grammar_timeout,
        help="seconds to compile a grammar or a JSON schema, and to check one token against it",
    ),
    click.option(
        "--grammar-memory",
        type=click.IntRange(min=16),
        default=Limits.grammar_memory,
        help="MiB of memory for each grammar",
    ),
    click.option(
        "--stall-timeout",
        type=SECONDS,
        default=Limits.stall_timeout,
        help="seconds of one step of the engine, after which /health says 503 and waiting requests end",
    ),
    click.option(
        "-to",
        "--timeout",
        type=SECONDS,
        default=Limits.timeout,
        envvar="LLAMA_ARG_TIMEOUT",
        help="seconds for a request's body to come and for a client to take a piece of the answer",
    ),
)


# everything but the model and where a server listens
serving_options = stack(
    offer_options,
    memory_options,
    limit_options,
    options.cache_options(options.rollback_option),
    options.context_options(options.flash_option, options.threads_option, options.batch_options()),
    options.gpu_option,
    options.draft_options,
    options.shift_option("a full slot forgets half of its tokens, instead of ending the answer"),
)


@command()
@options.model_option(required=False, text="model file (GGUF) [default: the demo model]")
@listening_options
@serving_options
def main(listening: Listening, **flags: Any) -> None:
    """Answer OpenAI requests over HTTP: chat, completions, embeddings; /health, /metrics, /slots.

    Needs the extra `server`.
    """
    wanted = Wanted(**flags).checked()
    keys = listening.keys()
    limits = dataclasses.replace(wanted.limits, n_connections=_n_connections(wanted.limits.n_connections))
    wanted = dataclasses.replace(wanted, limits=limits)
    with listening.listen(limits.timeout, limits.n_connections) as sock, contextlib.ExitStack() as ending:
        ending.callback(faulthandler.cancel_dump_traceback_later)  # Server's, once nothing is left that might not end
        service = ending.enter_context(wanted.opened())
        from runtime.serve.app import create_app  # what the service needs is loaded now, and not for a --help
        from runtime.serve.guard import Hosts
        from runtime.serve.server import Server, configuration

        engine = service.engine
        host, port = sock.getsockname()[:2]
        names = listening.names(host)
        hosts = None if names is None else Hosts(names)
        app = create_app(service, keys, hosts, listening.allow_host, listening.log_format)
        address = f"[{host}]" if ":" in host else host
        options.note(f"{len(engine.slots)} slots of {engine.n_ctx} tokens, listening on http://{address}:{port}")
        # uvicorn ends on these and then raises them once more, for whoever had them before
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        Server(configuration(app, limits), engine).run(sockets=[sock])


if __name__ == "__main__":
    main()
