"""Quality of caches without engine noise: codecs and eviction policies inside a float32 model of transformers.

    python -m research.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 3.5,4.25,5,7 [-o json]
    python -m research.evaluate -m M.gguf --bases calib.safetensors --held-out
    python -m research.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 4.25 --codecs kvarn:4/2,kivi:2
    python -m research.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 4,5 --evictions h2o:25,h2o:75@5

Chunks of n_ctx tokens, each from an empty cache; the second half of each is scored against the same model with exact
keys and values, under runtime.perplexity's names. The table has llama.cpp's cache types twice: without and with the
exact window of our rows ("+ window"). --codecs adds other projects' codecs (research/rivals), each with its own window
and with ours. --evictions adds policies that keep a share of the tokens (research/evictions), in f16 or in our cells.
--adapt adds our rows with adaptive bases. Extra `torch`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter.cli import options_from_flags, recent_bits_option
from converter.corpus import INTERRUPTED, PATH, Corpus, bases_option, corpus_options, cut, model_option
from subkv.base.command import command, group, sentence
from subkv.base.errors import SubkvError
from subkv.base.text import printable
from subkv.format.window import N_RECENT, N_SINK
from subkv.plan.methods import BASES_K, BASES_V

if TYPE_CHECKING:
    from research.evictions.keeping import Spec as Eviction
    from research.float32.caches import Cache
    from research.rivals.registry import Spec as Codec
    from subkv.native.gguf import Gguf
    from subkv.plan.pipeline import Fit, Options

STOCK = "q8_0,q5_1,q5_0,q4_1,q4_0"
SIDES = {"both": "kv", "keys": "k", "values": "v"}
LAYERS = ("all", "full", "sliding")


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}") from error


def _kinds(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    from subkv.plan import stock  # numpy: not for a --help

    kinds = [part for part in text.split(",") if part]
    for kind in kinds:
        if kind not in stock.KINDS:
            raise click.BadParameter(f"expected types out of {', '.join(stock.KINDS)}, found {kind!r}")
    return kinds


def _codecs(context: click.Context, parameter: click.Parameter, text: str) -> list[Codec]:
    if not text:
        return []
    from research.rivals import registry  # numpy: not for a --help

    try:
        return [registry.parse(part) for part in text.split(",")]
    except SubkvError as error:
        raise click.BadParameter(error.reason) from error


def _evictions(context: click.Context, parameter: click.Parameter, text: str) -> list[Eviction]:
    if not text:
        return []
    from research.evictions import keeping  # numpy: not for a --help

    try:
        return [keeping.parse(part) for part in text.split(",")]
    except SubkvError as error:
        raise click.BadParameter(error.reason) from error


@dataclass(frozen=True)
class Rows:
    """The caches in the table, in its order: values of the options of main(). sides: of SIDES; layers: of LAYERS."""

    kv_bits: list[float]
    plans: bool
    uncalibrated: list[float]
    stock: list[str]
    codecs: list[Codec]
    evictions: list[Eviction]
    sides: str
    layers: str
    adapt: tuple[str, ...]

    def caches(self, fit: Fit, base: Gguf, options: Options, n_ctx: int, opened: contextlib.ExitStack) -> list[Cache]:
        """n_ctx: tokens of a chunk. opened: closes the layouts of adaptive rows. Raises SubkvError."""
        from research.compared import evicting_caches, rival_caches  # numpy: not for a --help
        from research.float32.caches import adaptive_cache, coded_cache, stock_caches, uncalibrated_cache

        if not (self.kv_bits or self.uncalibrated or self.stock or self.codecs or self.evictions):
            raise SubkvError("kv_bits", "expected a budget or --stock types to evaluate, found none")
        sides = SIDES[self.sides]
        caches = []
        for bits in self.kv_bits:
            own = coded_cache(fit, bits, sides)
            caches += [own, replace(coded_cache(fit, bits, sides, derive=True), own=own)] if self.plans else [own]
            caches += [adaptive_cache(fit, base, bits, sides, how, opened) for how in self.adapt]
        caches += [uncalibrated_cache(base, bits, sides) for bits in self.uncalibrated]
        caches += stock_caches(self.stock, fit, sides, self.layers)
        caches += rival_caches(self.codecs, fit, base, sides) if self.codecs else []
        return [*caches, *evicting_caches(self.evictions, fit, n_ctx)]


@command("evaluate", interrupted=INTERRUPTED)
@model_option()
@bases_option()
@corpus_options("UTF-8 text.", "Chunks of every text.", 2, required=False)
@click.option(
    "--held-out",
    is_flag=True,
    help="Built-in texts of seven kinds that no calibration sees, a chunk of each; with their mean and their worst.",
)
@group(
    "rows",
    Rows,
    click.option("--kv-bits", default="3.5,4.25,5,7", callback=_numbers, help="Budgets, as of convert."),
    click.option(
        "--plans", is_flag=True, help="A second row per budget: a plan of a file, and its KLD over the first."
    ),
    click.option("--uncalibrated", default="", callback=_numbers, help="Budgets of bases from the weights alone."),
    click.option("--stock", default=STOCK, callback=_kinds, help="llama.cpp's types to compare with; empty: none."),
    click.option("--codecs", default="", callback=_codecs, help="Other projects' codecs: exl3:4,kvarn:4/2,kivi:2…"),
    click.option(
        "--evictions",
        default="",
        callback=_evictions,
        help="Policies and the percentage they keep: h2o:25,snapkv:50@5…",
    ),
    click.option("--sides", type=click.Choice(list(SIDES)), default="both", help="Which of keys and values are coded."),
    click.option(
        "--layers",
        type=click.Choice(LAYERS),
        default="all",
        help="Layers that --stock types quantize: all, as llama.cpp; those with full attention; with a sliding window.",
    ),
    click.option(
        "--adapt",
        multiple=True,
        metavar="SIDES[,NAME=VALUE...]",
        help="Another row per budget with adaptive bases for k, v or kv: v or v,length=512,max_chunks=1.",
    ),
)
@group(
    "options",
    options_from_flags,
    click.option("--basis-k", type=click.Choice(BASES_K), help="As of convert."),
    click.option("--basis-v", type=click.Choice(BASES_V), help="As of convert."),
    click.option("--center-k/--no-center-k", default=True, help="As of convert."),
    click.option("--n-sink", type=int, default=N_SINK, help="First positions exact."),
    click.option("--n-recent", type=int, default=N_RECENT, help="Last positions exact."),
    recent_bits_option,
    click.option("--bpe-context", type=click.IntRange(1), help="Context of the bit count. [default: as of convert]"),
)
@click.option("--plot", type=PATH, help="Draw bits against KLD (extra plot).")
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md")
def main(
    model: Path,
    bases: Path,
    corpus: Corpus,
    held_out: bool,
    rows: Rows,
    options: Options,
    plot: Path | None,
    output: str,
) -> None:
    """KLD of layouts, of llama.cpp's cache types, and of other projects' codecs and policies, in float32."""
    if not corpus.files and not held_out:
        raise click.UsageError("-f: expected a text or --held-out, found neither")

    from converter import held_out as built_in
    from converter.plots import figure, frontier  # not for a --help: all below
    from research.float32 import tables
    from research.float32.caches import result, run
    from research.float32.reference import Reference, check_length, check_shapes
    from subkv.format.adapt import parse
    from subkv.format.calibration import read_calibration
    from subkv.native.gguf import Gguf
    from subkv.plan import stock as types
    from subkv.plan.pipeline import Fit

    if plot is not None:
        figure.check(plot)
    calibration = read_calibration(bases)
    # (text, whether it must fill its chunks)
    texts = [(text, True) for text in corpus.read()] + [(text, False) for text in built_in.read() if held_out]
    reference = Reference(model, corpus.n_threads)
    check_shapes(reference, calibration)
    check_length(reference, corpus.n_ctx)
    if rows.stock and not types.fits(reference.d):
        raise SubkvError("stock", f"expected none, since llama.cpp cannot quantize heads of {reference.d}")
    for how in rows.adapt:
        parse(how)
    with contextlib.ExitStack() as opened:
        if rows.adapt:  # their window holds halves, so all windows do
            options = replace(options, window=replace(options.window, recent_bits=16))
        with Gguf(model) as base:
            fit = Fit(base, calibration, options, progress=True)
            for note in fit.notes:
                click.echo(sentence(note), err=True)
            caches = rows.caches(fit, base, options, corpus.n_ctx, opened)
        results: list[dict[str, Any]] = []
        for text, whole in texts:
            pieces = cut(reference, [text], corpus.n_ctx, corpus.chunks if whole else 1, whole)
            if not results:
                reference.match(calibration, pieces[0])
            for cache in caches:
                cache.clear()
            run(reference, caches, pieces, corpus.n_threads, progress=True)
            results += [result(cache, text.source.name, max(map(len, pieces)), len(pieces)) for cache in caches]
    click.echo(json.dumps(results, indent=2) if output == "json" else printable(tables.scores(results), keep="\n"))
    if output == "md" and len(texts) > 1:
        click.echo(printable(f"\n{tables.over_texts(results)}", keep="\n"))
    if plot is not None:
        frontier.frontier(results, plot)


if __name__ == "__main__":
    main()
