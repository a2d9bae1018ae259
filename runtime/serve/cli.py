"""Flags, start and end of the server.

python -m runtime.serve                                  the demo model on a compressed cache, http://127.0.0.1:8080
python -m runtime.serve -m model.subkv.gguf -c 32768 -np 4 --api-key SECRET
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from pathlib import Path
from typing import Any

import click

from runtime import options
from runtime.warmstart import flags
from subkv.base.command import command
from subkv.base.errors import SubkvError

# Four slots, as llama-server has: a second program, or the requests for titles that chat clients send in between, then
# do not drive a conversation out of its cells.
N_SLOTS = 4
N_CTX_SLOT = 4096
N_CONNECTIONS = 4096
N_OTHER_FILES = 64
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3}  # enum llama_pooling_type


def _keys(given: tuple[str, ...], file: str | None) -> list[str]:
    """--api-key, several or separated by commas, and the lines of --api-key-file but for comments."""
    keys = [key for text in given for key in text.split(",")]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SubkvError("api_key_file", f"cannot read {file}: {error}") from error
        keys += [line for line in lines if not line.startswith("#")]
    keys = [key.strip() for key in keys if key.strip()]
    if not keys and (given or file is not None):
        raise SubkvError("api_key", "expected at least one key, found none")
    return keys


def _listen(host: str, port: int, timeout: float) -> socket.socket:
    """A listening socket, taken before the model is loaded so that a port in use costs no time."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise SubkvError("host", f"expected an address of this machine, found {host!r} ({error.strerror})") from error
    sock = socket.socket(family, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: the kernel drops a client that never reads
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout))
        sock.bind(address)
        sock.listen(N_CONNECTIONS)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SubkvError("port", f"expected a free port, found {port} in use on {host}") from error
        raise SubkvError("host", f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sock


def _n_connections() -> int:
    """How many connections the process may hold, with some of its files left for everything else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = N_CONNECTIONS + N_OTHER_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(N_CONNECTIONS, soft - N_OTHER_FILES)


def _folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SubkvError("slot_save_path", f"expected a folder that can be written, found {name}")
    return folder


@command()
@options.model_option(required=False, text="model file (GGUF); default: the demo model")
@click.option("--host", default="127.0.0.1", envvar="LLAMA_ARG_HOST", help="address to listen on")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    envvar="LLAMA_ARG_PORT",
    help="port, 0: a free one, which is printed",
)
@click.option(
    "-np",
    "--parallel",
    "n_slots",
    type=click.IntRange(1, 64),
    default=N_SLOTS,
    envvar="LLAMA_ARG_N_PARALLEL",
    help="slots: requests that generate together, and conversations whose cells are kept",
)
@options.context_option(
    None, f"context in tokens, divided by the slots, 0: what the model was trained with; default: {N_CTX_SLOT} a slot"
)
@options.predict_option("most tokens per answer, -1: as many as a slot holds")
@options.cache_options
@options.window_options
@options.rollback_option
@options.flash_option
@options.threads_option
@options.batch_options()
@options.gpu_option
@flags.warm_options
@click.option("-a", "--alias", default=None, envvar="LLAMA_ARG_ALIAS", help="the model's name in answers")
@click.option("--chat-format", default=None, help="llama_cpp's name of a chat format; default: the model's template")
@click.option("--api-key", "api_keys", multiple=True, envvar="LLAMA_API_KEY", help="key that requests must give")
@click.option("--api-key-file", default=None, metavar="FILE", help="file of keys, one per line")
@click.option(
    "--slot-save-path", default=None, envvar="LLAMA_ARG_SLOT_SAVE_PATH", metavar="FOLDER", help="where slots are saved"
)
@click.option(
    "--embedding", "--embeddings", "embeddings", is_flag=True, envvar="LLAMA_ARG_EMBEDDINGS", help="embeddings only"
)
@click.option(
    "--pooling",
    type=click.Choice(list(POOLING)),
    default=None,
    envvar="LLAMA_ARG_POOLING",
    help="how embeddings are pooled; default: the model's way",
)
@click.option("--queue", "n_queue", type=click.IntRange(min=0), default=256, help="requests that may wait for a slot")
@click.option("--max-body", type=click.IntRange(min=1), default=8 * 1024 * 1024, help="bytes of a request's body")
@click.option(
    "-to",
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    envvar="LLAMA_ARG_TIMEOUT",
    help="seconds for a request's body to come and for a client to take a piece of the answer",
)
def main(**given: Any) -> None:
    """Answer OpenAI requests over HTTP: chat, completions, embeddings; /health, /metrics, /slots.

    Needs the extra `server`.
    """
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise SubkvError("serve", f"expected package {error.name}, found none; pip install 'subkv[server]'") from error
    from runtime.chat.program import open_model

    n_slots = 1 if given["embeddings"] else given["n_slots"]
    if given["n_batch"] < n_slots:
        raise click.UsageError(f"-b: expected at least one token for each of {n_slots} slots, found {given['n_batch']}")
    keys = _keys(given["api_keys"], given["api_key_file"])
    folder = _folder(given["slot_save_path"])
    n_ctx = given["n_ctx"] if given["n_ctx"] is not None else n_slots * N_CTX_SLOT
    more: dict[str, Any] = {"n_slots": n_slots, "chat_format": given["chat_format"]}
    cache = {}
    if given["embeddings"]:
        # a text is evaluated once and its cells are never read again: nothing to gain from coefficients
        cache = {"type_k": given["type_k"] or "f16"}
        more |= {"embedding": True, "pooling_type": -1 if given["pooling"] is None else POOLING[given["pooling"]]}
    elif given["pooling"] is not None:
        raise click.UsageError("--pooling: expected --embeddings beside it, found none")
    if given["embeddings"] and given["warm_start"] != "off":
        raise click.UsageError("--warm-start: expected a server that generates text, found --embeddings beside it")
    sock = _listen(given["host"], given["port"], given["timeout"])
    with sock:
        from runtime.serve.model import SlotsLlama
        from subkv.engine.stats import cache_line
        from subkv.native.binding import llama_cpp

        with (
            flags.planted(given) as planting,
            open_model(given | {"n_ctx": n_ctx} | cache, SlotsLlama, planting, **more) as llm,
            flags.started(given, llm, planting) as warm,
        ):
            from runtime.serve.app import Limits, Service, create_app
            from runtime.serve.batching import Engine
            from runtime.serve.server import GRACE_SECONDS, Server

            if not given["embeddings"] and not llama_cpp.llama_get_memory(llm.ctx):
                raise SubkvError(
                    "model", "expected a model that generates text, found one that only encodes; use --embeddings"
                )
            options.note(cache_line(llm.kv_stats()))
            engine = Engine(llm, warm)
            limits = Limits(given["n_predict"], given["n_queue"], given["max_body"], given["timeout"])
            name = given["alias"] or Path(llm.model_path).name
            service = Service(engine, name, limits, given["embeddings"], folder)
            config = uvicorn.Config(
                create_app(service, keys),
                log_level="warning",
                access_log=False,
                ws="none",
                timeout_graceful_shutdown=2 * GRACE_SECONDS,
                backlog=N_CONNECTIONS,
                limit_concurrency=_n_connections(),
            )
            host, port = sock.getsockname()[:2]
            address = f"[{host}]" if ":" in host else host
            options.note(f"{n_slots} slots of {engine.n_ctx} tokens, listening on http://{address}:{port}")
            # uvicorn ends on these and then raises them once more, for whoever had them before
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None)
            try:
                Server(config, engine).run(sockets=[sock])
            finally:
                engine.close()


if __name__ == "__main__":
    main()
