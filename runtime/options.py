"""Options that programs share, named as in llama.cpp. Groups of them build the library's dataclasses."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from subkv.base.command import group, show, stack
from subkv.base.errors import SubkvError, system_reason
from subkv.base.text import printable
from subkv.base.threads import MAX_THREADS
from subkv.engine.request import CacheRequest
from subkv.format.window import Window

if TYPE_CHECKING:
    from subkv.engine.cache import CacheChoice
    from subkv.engine.context import Context, ContextOptions
    from subkv.engine.model import Model
    from subkv.engine.stats import KVStats

Option = Callable[..., Any]

PATH = click.Path(path_type=Path)


class Flash(click.Choice):  # type: ignore[type-arg]
    """Flash attention as "on", "off" or "auto"; llama.cpp's programs also take numbers."""

    NAMES = {"on": "on", "off": "off", "auto": "auto", "1": "on", "0": "off", "-1": "auto"}

    def __init__(self) -> None:
        super().__init__(list(self.NAMES))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return self.NAMES[super().convert(value, param, ctx)]


class ListOf(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated values of another type."""

    def __init__(self, kind: Any = click.STRING, name: str = "T,T,…") -> None:
        self.kind, self.name = kind, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if isinstance(value, list):
            return value
        return [self.kind.convert(item.strip(), param, ctx) for item in str(value).split(",")]


def llama_option(names: str, variable: str, text: str, **more: Any) -> Option:
    """An option of llama.cpp's programs. names: separated by spaces; variable: without LLAMA_ARG_; text: its help."""
    return click.option(*names.split(), envvar=f"LLAMA_ARG_{variable}", help=text, **more)


class Number(click.FloatRange):
    """A finite number in a range; click also takes nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Threads(click.ParamType):  # type: ignore[type-arg]
    """A number of threads, -1: all processors, as llama.cpp's default."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        n = int(click.INT.convert(value, param, ctx))
        if n != -1 and not 1 <= n <= MAX_THREADS:
            self.fail(f"expected 1 to {MAX_THREADS} threads, or -1 for all processors, found {n}", param, ctx)
        return n


POSITIVE, NATURAL, SHARE = click.IntRange(min=1), click.IntRange(min=0), Number(0, 1)
NUMBERS, FLASH_LIST = ListOf(NATURAL, "N,N,…"), ListOf(Flash())


def model_option(required: bool, text: str = "model file (GGUF)") -> Option:
    """-m FILE, or FILE alone; read before other options."""
    return stack(
        click.argument(
            "model_file", required=False, metavar="[FILE]", is_eager=True, expose_value=False, callback=_model_file
        ),
        llama_option(
            "-m --model",
            "MODEL",
            text,
            required=required,
            metavar="FILE",
            is_eager=True,
            default=lambda: click.get_current_context().meta.get(MODEL_FILE),
            show_default=False,
            callback=_one_model,
        ),
    )


MODEL_FILE = "runtime.options.model_file"  # of a command line, in click's meta


def is_model_file(word: str) -> bool:
    """Whether the word has the ending of a model file."""
    return word.lower().endswith(".gguf")


def model_file(word: str) -> str:
    """The word, which names a model without -m. Raises click.UsageError for another word."""
    if not is_model_file(word):
        raise click.UsageError(f"{word}: expected a model file (*.gguf) or an option, found another word")
    return word


def _model_file(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    context.meta[MODEL_FILE] = model_file(value)
    if "model" in context.params:  # -m was read before
        context.params["model"] = _one_model(context, parameter, context.params["model"])


def _one_model(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value == "":  # a variable of a shell that is not set
        raise click.UsageError("-m: expected a model file, found an empty name")
    alone = context.meta.get(MODEL_FILE)
    if alone is not None and context.get_parameter_source("model") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(f"-m: expected one model, found {value} and {alone}")
    model = alone or value
    if model is None and parameter.required and not context.resilient_parsing:
        # click takes the None of the default's function for a value
        raise click.MissingParameter(ctx=context, param=parameter)
    return model


def context_option(default: int | None, text: str = "context size in tokens, 0: the trained context") -> Option:
    return llama_option("-c --ctx-size n_ctx", "CTX_SIZE", text, type=NATURAL, default=default)


threads_option = llama_option(
    "-t --threads n_threads", "THREADS", "threads, -1: all processors [default: -1]", type=Threads()
)
gpu_option = llama_option(
    "-ngl --gpu-layers --n-gpu-layers n_gpu_layers", "N_GPU_LAYERS", "layers on the GPU, -1: all", type=int, default=0
)


flash_option = llama_option(
    "-fa --flash-attn flash_attn",
    "FLASH_ATTN",
    "flash attention",
    type=Flash(),
    default="auto",
)


def batch_options(n_batch: int = 2048, n_ubatch: int = 512) -> Option:
    return stack(
        llama_option("-b --batch-size n_batch", "BATCH", "tokens per decode call", type=POSITIVE, default=n_batch),
        llama_option(
            "-ub --ubatch-size n_ubatch", "UBATCH", "tokens computed at once", type=POSITIVE, default=n_ubatch
        ),
    )


def _context(n_ctx: int | None = None, **more: Any) -> ContextOptions:
    from subkv.engine.context import ContextOptions  # numpy and the native libraries: not for a --help

    return ContextOptions(n_ctx or 0, **more)


def context_options(*options: Option) -> Option:
    """`context: ContextOptions`; n_ctx is 0 without the option -c."""
    return group("context", _context, *options)


#
# caches
#

rollback_option = click.option(
    "--n-rollback", type=NATURAL, help="exact tokens kept so that they can be removed again [default: 16]"
)
window_options = stack(
    click.option("--n-sink", type=NATURAL, help="first tokens kept exact [default: from the file]"),
    click.option("--n-recent", type=NATURAL, help="last tokens kept exact [default: from the file]"),
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
    sidecar: bool = True,
    kv_bits: float | None = None,
    kv_memory: str | None = None,
    **window: Any,
) -> CacheRequest:
    """The cache that the flags request. -ctk alone sets both K and V, -ctv alone leaves K at f16."""
    return CacheRequest(
        type_k=type_k,
        type_v=type_v or type_k,
        bases=bases,
        window=Window.of(**window),
        sidecar=sidecar,
        kv_bits=kv_bits,
        kv_memory=kv_memory,
    )


bases_option = click.option("--bases", type=PATH, metavar="FILE", help="bases for -m: a sidecar or a converted model")
bits_option = click.option(
    "--kv-bits",
    type=float,
    metavar="BITS",
    help="bits per K/V element of subkv, of those that the bases have plans for [default: SUBKV_BITS, or the file's]",
)
memory_option = click.option(
    "--kv-memory",
    metavar="SIZE",
    help="memory of the KV cache, such as 2GiB: the largest of these budgets that fits with -c tokens",
)


def cache_options(*more: Option) -> Option:
    """`cache: CacheRequest`; more: --n-rollback, for programs that remove tokens."""
    return group(
        "cache",
        requested_cache,
        llama_option(
            "-ctk --cache-type-k type_k",
            "CACHE_TYPE_K",
            "KV cache: subkv, subkv:BITS, f16, q8_0, q4_0, …; auto: subkv, or f16 for a model that cannot have it "
            "[default: auto]",
            metavar="TYPE",
        ),
        llama_option("-ctv --cache-type-v type_v", "CACHE_TYPE_V", "the same for V [default: as -ctk]", metavar="TYPE"),
        bases_option,
        bits_option,
        memory_option,
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


def read_utf8(path: Path, key: str) -> str:
    """The text of a file. Raises SubkvError about `key`."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise SubkvError(key, f"cannot read {path}: {system_reason(error)}") from error
    except UnicodeDecodeError as error:
        reason = f"expected UTF-8 text, found an invalid byte at {error.start} of {path}"
        raise SubkvError(key, reason) from error


def read_template(chat_template: str | None, chat_template_file: Path | None) -> str | None:
    """A Jinja template or the name of one; None: the model's own. Raises SubkvError about the file."""
    if chat_template_file is None:
        return chat_template
    if chat_template is not None:
        raise click.UsageError("--chat-template: expected either it or --chat-template-file, found both")
    return read_utf8(chat_template_file, "chat_template_file")


template_options = group(
    "template",
    read_template,
    llama_option(
        "--chat-template",
        "CHAT_TEMPLATE",
        "Jinja template, or a template name of llama.cpp [default: the model's own, else chatml]",
        metavar="NAME|JINJA",
    ),
    llama_option("--chat-template-file", "CHAT_TEMPLATE_FILE", "file with a Jinja template", type=PATH, metavar="FILE"),
)


def form_option(*kinds: str) -> Option:
    """`form`: output format of results."""
    return click.option("-o", "--output", "form", type=click.Choice(kinds), default=kinds[0], help="output format")


#
# several caches
#


@dataclass(frozen=True)
class Comparison:
    """Caches of one model that a program compares. names: as -ctk takes them; form: output format of the results."""

    model: str
    names: list[str]
    requested: CacheRequest
    n_gpu_layers: int
    form: str

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Model, list[CacheChoice], contextlib.ExitStack]]:
        """The model, a choice per name, and what closes contexts before the model. Raises SubkvError."""
        from subkv.engine.cache import parse_cache  # numpy and the native libraries: not for a --help
        from subkv.engine.model import Model

        with Model(self.model, gpu_layers(self.n_gpu_layers)) as model, contextlib.ExitStack() as cleanup:
            yield model, [parse_cache(name, model.path, self.requested) for name in self.names], cleanup

    def show(self, results: list[dict[str, Any]], titles: str, cells: str) -> None:
        """Print results as JSON, or as a Markdown table; a cell whose members are None is empty.

        titles, cells: separated by |, the cells as format strings of a result's members.
        """
        if self.form == "json":
            click.echo(json.dumps(results, indent=2))
            return
        lines = [f"| {titles} |", "|---" + "|---:" * titles.count("|") + "|"]
        for result in results:
            row = []
            for cell in cells.split(" | "):
                try:
                    row.append(cell.format_map(result))
                except TypeError:
                    row.append("")
            lines.append(f"| {' | '.join(row)} |")
        click.echo(printable("\n".join(lines), keep="\n"))


def comparison(flags: str, default: str) -> Option:
    """`compared: Comparison`. flags: of the list of caches."""

    def build(model: str, type_k: list[str], n_gpu_layers: int, form: str, **coded: Any) -> Comparison:
        return Comparison(model, type_k, requested_cache(**coded), n_gpu_layers, form)

    return group(
        "compared",
        build,
        model_option(required=True),
        click.option(
            *flags.split(),
            "type_k",
            type=ListOf(),
            default=default,
            help="caches: f16, q8_0, q8_0/q4_0 for K and V, subkv, subkv:FILE, …",
        ),
        bases_option,
        bits_option,
        window_options,
        gpu_option,
        form_option("md", "json"),
    )


#
# status lines
#


def note(text: str) -> None:
    """Print a status line to stderr; stdout is for results."""
    show(text, err=True)


def note_cache(stats: KVStats, choice: CacheChoice, name: str = "") -> None:
    """Log a context's cache and the source of its bases. name: which of several contexts."""
    from subkv.engine.stats import (
        cache_line,
        smaller_type,
        why_not_smaller,
    )  # numpy and the native libraries: not for a --help

    note(f"{name}: {cache_line(stats)}" if name else cache_line(stats))
    if choice.line:
        note(choice.line)
    if choice.fit:
        note(choice.fit)
    if smaller := smaller_type(stats):
        note(f"-c: {why_not_smaller(stats)}: at this size -ctk {smaller} takes less")


def open_context(
    model: Model, choice: CacheChoice, context: ContextOptions, name: str, cleanup: contextlib.ExitStack
) -> Context:
    """A context of one of several caches, closed by `cleanup`; its cache is logged under `name`."""
    from subkv.engine.cache import open_or_f16  # as in note_cache

    opened = open_or_f16(choice, CacheRequest(), lambda chosen: model.context(chosen, context))
    cleanup.callback(opened.close)
    note_cache(opened.stats, opened.choice, name)
    return opened


def cache_members(context: Context) -> dict[str, Any]:
    """Members of a result (JSON) about a context's cache."""
    stats = context.stats
    return {
        "type_k": stats.type_k,
        "type_v": stats.type_v,
        "flash_attn": context.flash_attn,
        "bpe": round(stats.bpe, 4),
        "kv_bytes": stats.bytes_kv,
        "kv_bytes_per_token": stats.bytes_per_token,
        "n_zero_rows": context.n_zero_rows,
        "kernel": stats.kernel,
    }


def note_zero_rows(n_zero_rows: int, name: str = "") -> None:
    """Log the rows of a cache that are not finite, if there are any. name: which of several caches."""
    from subkv.engine.stats import zero_rows_line  # as in note_cache

    if n_zero_rows:
        note(f"{name}: {zero_rows_line(n_zero_rows)}" if name else zero_rows_line(n_zero_rows))


def gpu_layers(n: int) -> int:
    """Return -ngl unchanged. If no GPU can take the layers, log the reason, because llama.cpp does not."""
    from subkv.native import library  # native libraries: not for a --help
    from subkv.native.binding import C

    if n and not C.llama_supports_gpu_offload():
        reasons = {
            "cuda": "the CUDA backend sees none",
            "vulkan": "the Vulkan backend sees none with a driver and 16-bit storage; it ignores devices that are CPUs "
            "unless GGML_VK_VISIBLE_DEVICES=0 names one",
        }
        built = [name for name in reasons if (library.lib_dir() / f"libggml-{name}{library.SUFFIX}").is_file()]
        reason = reasons[built[0]] if built else "this build has no GPU backend"
        note(f"-ngl {n}: expected a GPU, found none ({reason}); all layers are on the CPU")
    return n
