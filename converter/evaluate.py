"""Quality of layouts without engine noise: the codec of the engine inside a float32 model of transformers.

    python -m converter.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 3.5,4.25,5,7 [-o json]
    python -m converter.evaluate -m M.gguf --bases calib.safetensors --held-out

Chunks of n_ctx tokens, each from an empty cache; the second half of each is scored against the same model with exact
keys and values, under runtime.perplexity's names. The table has llama.cpp's cache types twice: without and with the
exact window of our rows ("+ window"). --adapt adds our rows with bases that follow the text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter import tables
from converter.cli import options_from_flags, recent_bits_option
from converter.corpus import INTERRUPTED, PATH, Corpus, bases_option, corpus_options, cut, model_option
from subkv.base.command import command, group, sentence, stack
from subkv.base.errors import SubkvError
from subkv.format.window import N_RECENT, N_SINK
from subkv.plan.methods import BASES_K, BASES_V

if TYPE_CHECKING:
    from converter.caches import Cache
    from subkv.native.gguf import Gguf
    from subkv.plan.pipeline import Fit, Options

    Others = Callable[[Fit, Gguf, str, int], list[Cache]]

STOCK = "q8_0,q5_1,q5_0,q4_1,q4_0"
SIDES = {"both": "kv", "keys": "k", "values": "v"}


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}") from error


def _kinds(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    from subkv.plan import stock  # numpy: not for a --help

    kinds = [part for part in text.split(",") if part]
    for kind in kinds:
        if kind not in stock.BITS:
            raise click.BadParameter(f"expected types out of {', '.join(stock.BITS)}, found {kind!r}")
    return kinds


evaluate_options = stack(
    model_option(),
    bases_option(),
    corpus_options("UTF-8 text.", "Chunks of every text.", 2, required=False),
    click.option(
        "--held-out",
        is_flag=True,
        help="Built-in texts of seven kinds that no calibration sees, a chunk of each; "
        "with their mean and their worst.",
    ),
    click.option("--kv-bits", default="3.5,4.25,5,7", callback=_numbers, help="Budgets, as of convert."),
    click.option("--uncalibrated", default="", callback=_numbers, help="Budgets of bases from the weights alone."),
    click.option("--stock", default=STOCK, callback=_kinds, help="llama.cpp's types to compare with; empty: none."),
    group(
        "options",
        options_from_flags,
        click.option("--basis-k", type=click.Choice(BASES_K), help="As of convert."),
        click.option("--basis-v", type=click.Choice(BASES_V), help="As of convert."),
        click.option("--center-k/--no-center-k", default=True, help="As of convert."),
        click.option("--n-sink", type=int, default=N_SINK, help="First positions exact."),
        click.option("--n-recent", type=int, default=N_RECENT, help="Last positions exact."),
        recent_bits_option,
        click.option(
            "--bpe-context", type=click.IntRange(1), help="Context of the bit count. [default: as of convert]"
        ),
    ),
    click.option("--sides", type=click.Choice(list(SIDES)), default="both", help="What is coded."),
    click.option(
        "--adapt",
        multiple=True,
        metavar="SIDES[,NAME=VALUE...]",
        help="Another row per budget whose bases of k, v or kv follow the text: v or v,length=512,max_chunks=1.",
    ),
    click.option("--plot", type=PATH, help="Draw bits against KLD (extra plot)."),
    click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md"),
)


def run(
    model: Path,
    bases: Path,
    corpus: Corpus,
    held_out: bool,
    kv_bits: list[float],
    uncalibrated: list[float],
    stock: list[str],
    options: Options,
    sides: str,
    adapt: tuple[str, ...],
    plot: Path | None,
    output: str,
    others: Others | None = None,
) -> None:
    """Evaluate. The other arguments are those of evaluate_options.

    others: gives more caches for the table, from a fit, the model, the sides that are coded, and the length of a chunk.
    """
    if not corpus.files and not held_out:
        raise click.UsageError("-f: expected a text or --held-out, found neither")

    from converter import builtin  # not for a --help: all below
    from converter.caches import (
        adaptive_cache,
        coded_cache,
        result,
        stock_caches,
        uncalibrated_cache,
    )
    from converter.caches import (
        run as score,
    )
    from converter.plots import figure, frontier
    from converter.reference import Reference, check_length, check_shapes
    from subkv.format.adapt import parse
    from subkv.format.calibration import read_calibration
    from subkv.native.gguf import Gguf
    from subkv.plan import stock as types
    from subkv.plan.pipeline import Fit

    if plot is not None:
        figure.check(plot)
    calibration = read_calibration(bases)
    # (text, whether it must fill its chunks)
    texts = [(text, True) for text in corpus.read()] + [(text, False) for text in builtin.held_out() if held_out]
    reference = Reference(model, corpus.n_threads)
    check_shapes(reference, calibration)
    check_length(reference, corpus.n_ctx)
    if stock and not types.fits(reference.d):
        raise SubkvError("stock", f"expected none, since llama.cpp cannot quantize heads of {reference.d}")
    for how in adapt:
        parse(how)
    with contextlib.ExitStack() as opened:
        if adapt:  # their window holds halves, so all windows do
            options = replace(options, window=replace(options.window, recent_bits=16))
        with Gguf(model) as base:
            fit = Fit(base, calibration, options, progress=True)
            for note in fit.notes:
                click.echo(sentence(note), err=True)
            caches = []
            for bits in kv_bits:
                caches.append(coded_cache(fit, bits, SIDES[sides]))
                caches += [adaptive_cache(fit, base, bits, SIDES[sides], how, opened) for how in adapt]
            caches += [uncalibrated_cache(base, bits, options, SIDES[sides]) for bits in uncalibrated]
            if not caches and not stock and others is None:
                raise SubkvError("kv_bits", "expected a budget or --stock types to evaluate, found none")
            caches += stock_caches(stock, fit, SIDES[sides])
            caches += others(fit, base, SIDES[sides], corpus.n_ctx) if others else []
        results: list[dict[str, Any]] = []
        for text, whole in texts:
            pieces = cut(reference, [text], corpus.n_ctx, corpus.chunks if whole else 1, whole)
            if not results:
                reference.match(calibration, pieces[0])
            for cache in caches:
                cache.clear()
            score(reference, caches, pieces, corpus.n_threads, progress=True)
            results += [result(cache, text.source.name, max(map(len, pieces)), len(pieces)) for cache in caches]
    click.echo(json.dumps(results, indent=2) if output == "json" else tables.scores(results))
    if output == "md" and len(texts) > 1:
        click.echo(f"\n{tables.over_texts(results)}")
    if plot is not None:
        frontier.frontier(results, plot)


@command("evaluate", interrupted=INTERRUPTED)
@evaluate_options
def main(**arguments: Any) -> None:
    """KLD of layouts and of llama.cpp's cache types in float32."""
    run(**arguments)


if __name__ == "__main__":
    main()
