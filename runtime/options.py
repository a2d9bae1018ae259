"""Options that every program shares, under llama.cpp's names, and how programs fail.

A failure is one sentence on stderr that starts with the flag or key it concerns: exit 1; wrong usage: exit 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from subkv.base.command import stack


def gpu_layers(n: int) -> int:
    """-ngl as given; notes that no GPU takes these layers, which llama.cpp keeps to itself."""
    from subkv.native import library as _lib
    from subkv.native.binding import C

    if n and not C.llama_supports_gpu_offload():
        built = (_lib.lib_dir() / f"libggml-cuda{_lib.SUFFIX}").is_file()
        why = "the CUDA backend sees none" if built else "this build has no backend for one"
        note(f"-ngl {n}: expected a GPU, found none ({why}); all layers are on the CPU")
    return n


def model_option(required: bool, text: str = "model file (GGUF)") -> Callable[..., Any]:
    return click.option("-m", "--model", required=required, envvar="LLAMA_ARG_MODEL", metavar="FILE", help=text)


def context_option(
    default: int | None, text: str = "context size in tokens, 0: what the model was trained with"
) -> Callable[..., Any]:
    return click.option(
        "-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=default, envvar="LLAMA_ARG_CTX_SIZE", help=text
    )


def predict_option(text: str) -> Callable[..., Any]:
    return click.option(
        "-n",
        "--predict",
        "--n-predict",
        "n_predict",
        type=int,
        default=-1,
        envvar="LLAMA_ARG_N_PREDICT",
        help=text,
    )


threads_option = click.option(
    "-t",
    "--threads",
    "n_threads",
    type=int,
    default=None,
    envvar="LLAMA_ARG_THREADS",
    help="threads, default: all processors",
)
gpu_option = click.option(
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    "n_gpu_layers",
    type=int,
    default=0,
    envvar="LLAMA_ARG_N_GPU_LAYERS",
    help="layers on the GPU, -1: all",
)


def batch_options(n_batch: int = 2048, n_ubatch: int = 512) -> Callable[..., Any]:
    return stack(
        click.option(
            "-b",
            "--batch-size",
            "n_batch",
            type=click.IntRange(min=1),
            default=n_batch,
            envvar="LLAMA_ARG_BATCH",
            help="tokens per decode call",
        ),
        click.option(
            "-ub",
            "--ubatch-size",
            "n_ubatch",
            type=click.IntRange(min=1),
            default=n_ubatch,
            envvar="LLAMA_ARG_UBATCH",
            help="tokens computed at once",
        ),
    )


cache_options = stack(
    click.option(
        "-ctk",
        "--cache-type-k",
        "type_k",
        default=None,
        envvar="LLAMA_ARG_CACHE_TYPE_K",
        metavar="TYPE",
        help="KV cache: subkv, f16, q8_0, q4_0, …; auto (default): subkv when the model file or --bases carries bases",
    ),
    click.option(
        "-ctv",
        "--cache-type-v",
        "type_v",
        default=None,
        envvar="LLAMA_ARG_CACHE_TYPE_V",
        metavar="TYPE",
        help="the same for V; default: as -ctk",
    ),
    click.option("--bases", default=None, metavar="FILE", help="bases for -m: a sidecar or a converted model"),
)
window_options = stack(
    click.option(
        "--n-sink", type=click.IntRange(min=0), default=None, help="first tokens kept exact; default: as converted"
    ),
    click.option(
        "--n-recent", type=click.IntRange(min=0), default=None, help="last tokens kept exact; default: as converted"
    ),
    click.option(
        "--adapt",
        default=None,
        metavar="SIDES[,NAME=VALUE…]",
        help="bases that follow the text, of k, v or kv: v or v,length=512; none: static; default: as converted",
    ),
)
rollback_option = click.option(
    "--n-rollback", type=click.IntRange(min=0), default=None, help="exact tokens kept for taking back; default 32"
)
flash_option = click.option(
    "-fa",
    "--flash-attn",
    "flash_attn",
    type=click.Choice(["on", "off", "auto", "1", "0", "-1"]),
    default="auto",
    envvar="LLAMA_ARG_FLASH_ATTN",
    help="flash attention",
)
FLASH = {"on": "on", "off": "off", "auto": "auto", "1": "on", "0": "off", "-1": "auto"}


def output_option(*kinds: str) -> Callable[..., Any]:
    return click.option("-o", "--output", "output", type=click.Choice(kinds), default=kinds[0], help="output format")


def cache_arguments(type_k: str | None, type_v: str | None) -> dict[str, Any]:
    """-ctk and -ctv as the arguments of subkv.cache.choose_cache. -ctk alone sets both, -ctv alone leaves K at f16."""
    if type_v is None or type_v == type_k:
        return {"kv_cache": type_k or "auto"}
    return {"type_k": type_k, "type_v": type_v}


def note(text: str) -> None:
    """A status line on stderr, prefixed so that it cannot be mistaken for an answer."""
    click.echo(text, err=True)
