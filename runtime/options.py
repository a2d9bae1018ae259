"""Options that several programs share, named as in llama.cpp; groups of them build the library's dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from subkv.base.command import group, stack
from subkv.base.errors import SubkvError
from subkv.format.window import Window

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel

    from subkv.engine.cache import CacheChoice, CacheOptions
    from subkv.engine.context import ContextOptions
    from subkv.engine.stats import KVStats

Option = Callable[..., Any]

PATH = click.Path(path_type=Path)
FLASH = {"on": "on", "off": "off", "auto": "auto", "1": "on", "0": "off", "-1": "auto"}
N_BATCH, N_UBATCH = 2048, 512


class IntList(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated numbers, as llama-bench takes them."""

    name = "N,N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            numbers = [int(item) for item in str(value).split(",")]
        except ValueError:
            self.fail(f"expected numbers separated by commas, found {value!r}", param, ctx)
        if min(numbers) < 0:
            self.fail(f"expected numbers that are not negative, found {value!r}", param, ctx)
        return numbers


def split_commas(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str]:
    """click callback: split the value at commas."""
    return [item.strip() for item in value.split(",")] if value else []


def model_option(required: bool, text: str = "model file (GGUF)") -> Option:
    return click.option("-m", "--model", required=required, envvar="LLAMA_ARG_MODEL", metavar="FILE", help=text)


def context_option(default: int | None, text: str = "context size in tokens, 0: the trained context") -> Option:
    return click.option(
        "-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=default, envvar="LLAMA_ARG_CTX_SIZE", help=text
    )


def predict_option(text: str) -> Option:
    return click.option(
        "-n", "--predict", "--n-predict", "n_predict", type=int, default=-1, envvar="LLAMA_ARG_N_PREDICT", help=text
    )


threads_option = click.option(
    "-t", "--threads", "n_threads", type=int, envvar="LLAMA_ARG_THREADS", help="threads [default: all processors]"
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


def shift_option(text: str) -> Callable[[Any], Any]:
    """llama-server's --context-shift; text: its help."""
    return click.option(
        "--context-shift/--no-context-shift", default=False, envvar="LLAMA_ARG_CONTEXT_SHIFT", help=text
    )


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding: the source of drafts, named as in llama.cpp."""

    spec_type: str | None
    draft_model: Path | None
    n_draft: int
    n_draft_min: int
    p_min: float
    draft_cache: str
    ngram: int
    mgram: int

    def model(self, n_gpu_layers: int) -> LlamaDraftModel | None:
        """For Llama's draft_model. Raises click.UsageError for flags that do not go together."""
        kind = self.spec_type or ("none" if self.draft_model is None else "draft-simple")
        if (kind == "draft-simple") != (self.draft_model is not None):
            given = "none" if self.draft_model is None else f"--spec-type {kind}"
            raise click.UsageError(f"-md: expected a model with --spec-type draft-simple and no other, found {given}")
        # numpy and the native libraries: not for a --help
        from subkv.engine.drafts import DraftModel, PromptLookup

        if self.draft_model is not None:
            return DraftModel(
                self.draft_model, self.n_draft, self.p_min, self.draft_cache, n_gpu_layers, self.n_draft_min
            )
        return PromptLookup(self.ngram, self.mgram, self.n_draft_min) if kind == "ngram-simple" else None


draft_options = group(
    "drafts",
    Drafts,
    click.option(
        "--spec-type",
        type=click.Choice(["none", "ngram-simple", "draft-simple"]),
        envvar="LLAMA_ARG_SPEC_TYPE",
        help="draft tokens and verify them together: from repetitions in the text, or with the model of -md",
    ),
    click.option(
        "-md",
        "--spec-draft-model",
        "--model-draft",
        "draft_model",
        type=PATH,
        envvar="LLAMA_ARG_SPEC_DRAFT_MODEL",
        metavar="FILE",
        help="draft model: a smaller model with the same vocabulary",
    ),
    click.option(
        "--spec-draft-n-max",
        "--draft-max",
        "n_draft",
        type=click.IntRange(min=1),
        default=3,
        envvar="LLAMA_ARG_SPEC_DRAFT_N_MAX",
        help="maximum tokens per draft of -md",
    ),
    click.option(
        "--spec-draft-n-min",
        "--draft-min",
        "n_draft_min",
        type=click.IntRange(min=0),
        default=0,
        envvar="LLAMA_ARG_SPEC_DRAFT_N_MIN",
        help="minimum tokens per draft; shorter drafts are dropped",
    ),
    click.option(
        "--spec-draft-p-min",
        "--draft-p-min",
        "p_min",
        type=click.FloatRange(0, 1),
        default=0.0,
        envvar="LLAMA_ARG_SPEC_DRAFT_P_MIN",
        help="minimum probability of a drafted token under -md",
    ),
    click.option(
        "-ctkd", "--spec-draft-type-k", "draft_cache", default="f16", metavar="TYPE", help="KV cache of -md, K and V"
    ),
    click.option(
        "--spec-ngram-simple-size-n",
        "ngram",
        type=click.IntRange(min=1),
        default=12,
        help="ngram-simple: tokens that must match",
    ),
    click.option(
        "--spec-ngram-simple-size-m",
        "mgram",
        type=click.IntRange(min=1),
        default=48,
        help="ngram-simple: tokens per draft",
    ),
)
flash_option = click.option(
    "-fa",
    "--flash-attn",
    "flash_attn",
    type=click.Choice(list(FLASH)),
    default="auto",
    envvar="LLAMA_ARG_FLASH_ATTN",
    callback=lambda _context, _parameter, value: FLASH[value],
    help="flash attention",
)


def batch_options(n_batch: int = N_BATCH, n_ubatch: int = N_UBATCH) -> Option:
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


def _context(n_ctx: int | None = None, **given: Any) -> ContextOptions:
    from subkv.engine.context import ContextOptions  # numpy and the native libraries: not for a --help

    return ContextOptions(n_ctx or 0, **given)


def context_options(*options: Option) -> Option:
    """`context: ContextOptions`; n_ctx is 0 without the option -c."""
    return group("context", _context, *options)


#
# caches
#

rollback_option = click.option(
    "--n-rollback", type=click.IntRange(min=0), help="exact tokens kept so that they can be removed again [default: 16]"
)
window_options = stack(
    click.option("--n-sink", type=click.IntRange(min=0), help="first tokens kept exact [default: from the file]"),
    click.option("--n-recent", type=click.IntRange(min=0), help="last tokens kept exact [default: from the file]"),
    click.option(
        "--adapt",
        metavar="SIDES[,NAME=VALUE…]",
        help="adaptive bases for k, v or kv: v or v,length=512; none: static [default: from the file]",
    ),
)


def requested_cache(
    type_k: str | None = None,
    type_v: str | None = None,
    bases: Path | None = None,
    adapt: str | None = None,
    sidecar: bool = True,
    **window: int | None,
) -> CacheOptions:
    """The cache that the flags request. -ctk alone sets both K and V, -ctv alone leaves K at f16."""
    from subkv.engine.cache import CacheOptions  # native libraries: not for a --help

    window_request = Window.of(**window)
    return CacheOptions(
        type_k=type_k, type_v=type_v or type_k, bases=bases, window=window_request, adapt=adapt, sidecar=sidecar
    )


def cache_options(*more: Option) -> Option:
    """`cache: CacheOptions`; more: --n-rollback, for programs that remove tokens."""
    return group(
        "cache",
        requested_cache,
        click.option(
            "-ctk",
            "--cache-type-k",
            "type_k",
            envvar="LLAMA_ARG_CACHE_TYPE_K",
            metavar="TYPE",
            help="KV cache: subkv, f16, q8_0, q4_0, …; auto: subkv when the model file, its sidecar or --bases carries "
            "bases [default: auto]",
        ),
        click.option(
            "-ctv",
            "--cache-type-v",
            "type_v",
            envvar="LLAMA_ARG_CACHE_TYPE_V",
            metavar="TYPE",
            help="the same for V [default: as -ctk]",
        ),
        click.option("--bases", type=PATH, metavar="FILE", help="bases for -m: a sidecar or a converted model"),
        click.option(
            "--no-sidecar",
            "sidecar",
            flag_value=False,
            default=True,
            help="ignore bases that convert has stored",
            show_default=False,
        ),
        window_options,
        *more,
    )


def read_template(chat_template: str | None, chat_template_file: Path | None) -> str | None:
    """A Jinja template or the name of one; None: the model's own. Raises SubkvError about the file."""
    if chat_template_file is None:
        return chat_template
    if chat_template is not None:
        raise click.UsageError("--chat-template: expected either it or --chat-template-file, found both")
    try:
        return chat_template_file.read_text("utf-8")
    except OSError as error:
        reason = f"cannot read {chat_template_file}: {error.strerror or error}"
        raise SubkvError("chat_template_file", reason) from error
    except UnicodeDecodeError as error:
        reason = f"expected UTF-8 text, found an invalid byte at {error.start} of {chat_template_file}"
        raise SubkvError("chat_template_file", reason) from error


template_options = group(
    "template",
    read_template,
    click.option(
        "--chat-template",
        envvar="LLAMA_ARG_CHAT_TEMPLATE",
        metavar="NAME|JINJA",
        help="Jinja template, or a template name of llama.cpp [default: the model's own, else chatml]",
    ),
    click.option(
        "--chat-template-file",
        type=PATH,
        envvar="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        metavar="FILE",
        help="file with a Jinja template",
    ),
)


def form_option(*kinds: str) -> Option:
    """`form`: output format of results."""
    return click.option("-o", "--output", "form", type=click.Choice(kinds), default=kinds[0], help="output format")


#
# status lines
#


def note(text: str) -> None:
    """Print a status line to stderr; stdout is for results."""
    click.echo(text, err=True)


def note_cache(stats: KVStats, choice: CacheChoice, name: str = "") -> None:
    """Log a context's cache and the source of its bases. name: which of several contexts."""
    from subkv.engine.stats import cache_line  # numpy and the native libraries: not for a --help

    note(f"{name}: {cache_line(stats)}" if name else cache_line(stats))
    if choice.note:
        note(choice.note)
    if choice.coded and stats.bpe >= 16:
        n_exact = stats.n_sink + stats.n_recent + stats.n_rollback
        note(
            f"-c: expected more tokens than the exact window of {n_exact} for a gain, found {stats.n_cells}; "
            "-ctk f16 takes less"
        )


def gpu_layers(n: int) -> int:
    """Return -ngl unchanged; log a reason if no GPU can take the layers, because llama.cpp does not."""
    from subkv.native import library as _lib  # native libraries: not for a --help
    from subkv.native.binding import C

    if n and not C.llama_supports_gpu_offload():
        reasons = {
            "cuda": "the CUDA backend sees none",
            "vulkan": "the Vulkan backend sees none with a driver and 16-bit storage; it ignores devices that are CPUs "
            "unless GGML_VK_VISIBLE_DEVICES=0 names one",
        }
        reasons_of_build = [
            why for name, why in reasons.items() if (_lib.lib_dir() / f"libggml-{name}{_lib.SUFFIX}").is_file()
        ]
        why = reasons_of_build[0] if reasons_of_build else "this build has no GPU backend"
        note(f"-ngl {n}: expected a GPU, found none ({why}); all layers are on the CPU")
    return n
