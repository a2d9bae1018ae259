"""Quality of layouts without engine noise: the codec of the engine inside a float32 model of transformers.

    python -m converter.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 3.5,4.25,5,7 [-o json]

Chunks of n_ctx tokens, each from an empty cache; the second half of each is scored against the same model with exact
keys and values, under runtime.perplexity's names. llama.cpp's cache types stand in the same table twice: as they are,
and with the exact window of our rows ("+ window"). --adapt adds our rows with bases that follow the text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from converter.adaptive import AdaptiveCoder, loaded
from converter.calibrate import MIN_TOKENS, read_text
from converter.plots import figure, frontier
from converter.reference import F32, Coder, Reference, check_length, check_shapes, cut
from converter.scoring import Scores, score
from subkv.base.command import command as command_of
from subkv.base.command import sentence
from subkv.base.errors import SubkvError, exit_on_error
from subkv.base.progress import progress_bar
from subkv.base.threads import default_threads
from subkv.format.adapt import Adapt, parse
from subkv.format.bases import CodedLayer
from subkv.format.calibration import Calibration, read_calibration
from subkv.format.metadata import Account
from subkv.format.window import N_RECENT, N_SINK, Window
from subkv.native.gguf import Gguf
from subkv.plan import stock
from subkv.plan.costs import BASES_K, BASES_V
from subkv.plan.pipeline import Fit, Options
from subkv.plan.predict import reconstructed

SIDES = {"both": "kv", "keys": "k", "values": "v"}


@dataclass
class Cache:
    """One row of the table. coder None: exact. bpe: everything counted; rows: coded rows alone.

    adaptive: the coder, if its bases follow the text; what they cost is then in result(), at `context` tokens.
    """

    name: str
    coder: Coder | None
    bpe: float
    rows: float
    n_sink: int = 0
    n_recent: int = 0
    predicted: float | None = None
    scores: Scores = field(default_factory=Scores)
    adaptive: AdaptiveCoder | None = None
    context: int = 0

    def clear(self) -> None:
        """Forget the texts so far."""
        self.scores = Scores()
        if self.adaptive is not None:
            self.adaptive.clear()


def layer_coder(layers: Sequence[CodedLayer], sides: str = "kv") -> Coder:
    """What attention sees through coded layers. sides: which of k and v are coded; the others stay exact."""
    coded = {layer.shape.il: layer.heads for layer in layers}

    def seen(il: int, k: F32, v: F32) -> tuple[F32, F32]:
        heads = coded.get(il, ())
        if heads and "k" in sides:
            k = np.stack([reconstructed(rows, head.k, head.gamma) for rows, head in zip(k, heads, strict=True)])
        if heads and "v" in sides:
            v = np.stack([reconstructed(rows, head.v) for rows, head in zip(v, heads, strict=True)])
        return k, v

    return seen


def stock_coder(kind: str, sides: str = "kv") -> Coder:
    """What attention sees through one of llama.cpp's cache types."""

    def seen(il: int, k: F32, v: F32) -> tuple[F32, F32]:
        return (
            stock.round_trip(kind, k, keys=True) if "k" in sides else k,
            stock.round_trip(kind, v, keys=False) if "v" in sides else v,
        )

    return seen


def stock_caches(kinds: Sequence[str], fit: Fit, sides: str) -> list[Cache]:
    """Rows for llama.cpp's types, each as it is and with the exact window of `fit`."""
    window = fit.overhead.window_bits
    n_sink, n_recent = fit.settings.window.n_sink, fit.settings.window.n_recent
    caches = []
    for kind in kinds:
        bits = stock.BITS[kind]
        coder = stock_coder(kind, sides)
        caches.append(Cache(kind, coder, bits, bits, predicted=fit.stock_error(kind)))
        if n_sink + n_recent:
            caches.append(Cache(f"{kind} + window", coder, bits + window, bits, n_sink, n_recent))
    return caches


def _coded(fit: Fit, kv_bits: float) -> tuple[tuple[CodedLayer, ...], Account]:
    """A layout at a budget, and what it takes."""
    plan = fit.plan(kv_bits)
    layers, _ = fit.code(plan)
    return layers, fit.account(plan)


def coded_cache(fit: Fit, kv_bits: float, sides: str, name: str | None = None) -> Cache:
    """Our row at a budget."""
    layers, counted = _coded(fit, kv_bits)
    return Cache(
        name or f"subkv {kv_bits:g}",
        layer_coder(layers, sides),
        counted.total,
        counted.rows,
        fit.settings.window.n_sink,
        fit.settings.window.n_recent,
        fit.error(layers) if fit.calibration.sensitivity and sides == "kv" else None,
    )


def adaptive_cache(
    fit: Fit, base: Gguf, kv_bits: float, sides: str, text: str, adapt: tuple[str, Adapt], stack: contextlib.ExitStack
) -> Cache:
    """Our row at a budget with bases that adapt as `text`, parsed: `adapt`. `stack` closes what it opens."""
    layers, counted = _coded(fit, kv_bits)
    coded = stack.enter_context(loaded(base, fit.calibration, fit.settings, counted, layers))
    coder = AdaptiveCoder(coded, layers, sides, *adapt)
    window = fit.settings.window.n_sink, fit.settings.window.n_recent
    name = f"subkv {kv_bits:g} adapt {text}"
    return Cache(name, coder, counted.total, counted.rows, *window, adaptive=coder, context=counted.context)


def run(
    reference: Reference, caches: Sequence[Cache], chunks: Sequence[Sequence[int]], n_threads: int, progress: bool
) -> None:
    """Score the second half of every chunk under every cache; the scores are added to the caches'."""
    with (
        ThreadPoolExecutor(n_threads) as pool,
        progress_bar("evaluate", len(chunks) * (len(caches) + 1), "chunk", progress) as bar,
    ):
        for chunk in chunks:
            first = len(chunk) // 2
            targets = np.array(chunk[first + 1 :], dtype=np.int32)
            base = reference.logits(chunk, first)[:-1]
            bar.update()
            for cache in caches:
                if cache.coder is None:
                    logits = base
                else:
                    logits = reference.coded_logits(chunk, first, cache.coder, cache.n_sink, cache.n_recent)[:-1]
                cache.scores.add(score(logits, targets, base, pool, n_threads))
                bar.update()


def result(cache: Cache, text: str, n_ctx: int, chunks: int) -> dict[str, Any]:
    """One JSON object, runtime.perplexity's names. chunks_*: per head that adapts and text, None if none does."""
    adaptive = cache.adaptive
    return {
        "name": cache.name,
        **cache.scores.summary(),
        "bpe": round(cache.bpe + (adaptive.bits(cache.context) if adaptive else 0.0), 4),
        "bpe_rows": round(cache.rows, 4),
        "bpe_adapt": round(adaptive.bits(cache.context), 4) if adaptive else 0.0,
        "predicted_kld": cache.predicted,
        "chunks_opened": round(adaptive.mean("n_opened"), 3) if adaptive else None,
        "chunks_refused": round(adaptive.mean("n_refused"), 3) if adaptive else None,
        "chunks_merged": round(adaptive.mean("n_merged"), 3) if adaptive else None,
        "n_sink": cache.n_sink,
        "n_recent": cache.n_recent,
        "text": text,
        "n_ctx": n_ctx,
        "chunks": chunks,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Results as a Markdown table; columns for chunks where a cache has any."""
    adaptive = any(r["chunks_opened"] is not None for r in results)
    lines = [
        "| text | cache | bpe | rows alone | Δ PPL | mean KLD | median KLD | 99.9% KLD | same top-1 | predicted KLD |"
        + (" opened | refused | merged |" if adaptive else ""),
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|" + ("---:|---:|---:|" if adaptive else ""),
    ]
    for r in results:
        predicted = "" if r["predicted_kld"] is None else f"{r['predicted_kld']:.2g}"
        lines.append(
            f"| {r['text']} | {r['name']} | {r['bpe']:.2f} | {r['bpe_rows']:.2f} "
            f"| {r['delta_percent']:+.2f}% ± {100 * r['ppl_ratio_stderr']:.2f}% "
            f"| {r['mean_kld']:.3g} ± {r['mean_kld_stderr']:.1g} | {r['median_kld']:.2g} | {r['kld_999']:.2g} "
            f"| {100 * r['same_top']:.2f}% | {predicted} |{_chunks(r) if adaptive else ''}"
        )
    return "\n".join(lines)


def _chunks(r: dict[str, Any]) -> str:
    counts = (r["chunks_opened"], r["chunks_refused"], r["chunks_merged"])
    return "".join(" |" if count is None else f" {count:.1f} |" for count in counts)


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}") from error


def _kinds(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    kinds = [part for part in text.split(",") if part]
    for kind in kinds:
        if kind not in stock.BITS:
            raise click.BadParameter(f"expected types out of {', '.join(stock.BITS)}, found {kind!r}")
    return kinds


@command_of("evaluate")
@click.option("-m", "--model", required=True, type=click.Path(path_type=Path), help="GGUF model.")
@click.option("--bases", required=True, type=click.Path(path_type=Path), help="Calibration file (calib.safetensors).")
@click.option(
    "-f", "--file", "files", required=True, multiple=True, type=click.Path(path_type=Path), help="UTF-8 text."
)
@click.option("--kv-bits", default="3.5,4.25,5,7", show_default=True, callback=_numbers, help="Budgets, as of convert.")
@click.option(
    "--stock",
    "kinds",
    default="q8_0,q5_1,q5_0,q4_1,q4_0",
    show_default=True,
    callback=_kinds,
    help="llama.cpp's types to compare with; empty: none.",
)
@click.option(
    "-c", "--ctx-size", default=2048, show_default=True, type=click.IntRange(MIN_TOKENS), help="Tokens per chunk."
)
@click.option("--chunks", default=2, show_default=True, type=click.IntRange(1), help="Chunks of every text.")
@click.option("--basis-k", type=click.Choice(BASES_K), help="As of convert.")
@click.option("--basis-v", type=click.Choice(BASES_V), help="As of convert.")
@click.option("--center-k/--no-center-k", default=True, show_default=True, help="As of convert.")
@click.option("--sides", type=click.Choice(list(SIDES)), default="both", show_default=True, help="What is coded.")
@click.option(
    "--adapt",
    "adapts",
    multiple=True,
    metavar="SIDES[,NAME=VALUE...]",
    help="A row more per budget whose bases of k, v or kv follow the text: v or v,length=512,max_chunks=1.",
)
@click.option("--n-sink", type=int, default=N_SINK, show_default=True, help="First positions exact.")
@click.option("--n-recent", type=int, default=N_RECENT, show_default=True, help="Last positions exact.")
@click.option("--bpe-context", type=click.IntRange(1), help="Context of the bit count. [default: as of convert]")
@click.option("-t", "--threads", type=click.IntRange(1), help="[default: all processors]")
@click.option("--plot", "target", type=click.Path(path_type=Path), help="Draw bits against KLD (extra plot).")
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", show_default=True)
def command(
    model: Path,
    bases: Path,
    files: tuple[Path, ...],
    kv_bits: list[float],
    kinds: list[str],
    ctx_size: int,
    chunks: int,
    basis_k: str | None,
    basis_v: str | None,
    center_k: bool,
    sides: str,
    adapts: tuple[str, ...],
    n_sink: int,
    n_recent: int,
    bpe_context: int | None,
    threads: int | None,
    target: Path | None,
    output: str,
) -> None:
    """KLD of layouts and of llama.cpp's cache types in float32."""
    with exit_on_error(), contextlib.ExitStack() as stack:
        if target is not None:
            figure.check(target)
        calibration: Calibration = read_calibration(bases)
        n_threads = threads or default_threads()
        reference = Reference(model, n_threads)
        check_shapes(reference, calibration)
        check_length(reference, ctx_size)
        for path in files:
            read_text(path)
        if kinds and not stock.fits(reference.d):
            raise SubkvError("stock", f"expected none, since llama.cpp cannot quantize heads of {reference.d}")
        options = Options(
            basis_k=basis_k,
            basis_v=basis_v,
            window=Window(n_sink, n_recent),
            bpe_context=bpe_context,
            center_k=center_k,
        )
        adaptive = {text: parse(text) for text in adapts}
        results: list[dict[str, Any]] = []
        with Gguf(model) as base:
            fit = Fit(base, calibration, options, progress=True)
            for note in fit.notes:
                click.echo(sentence(note), err=True)
            planned = []
            for bits in kv_bits:
                planned.append(coded_cache(fit, bits, SIDES[sides]))
                for text, adapt in adaptive.items():
                    planned.append(adaptive_cache(fit, base, bits, SIDES[sides], text, adapt, stack))
            if not planned and not kinds:
                raise SubkvError("kv_bits", "expected a budget or --stock types to evaluate, found none")
            against = stock_caches(kinds, fit, SIDES[sides])
        for path in files:
            pieces = cut(reference, (path,), ctx_size, chunks)
            if not results:
                reference.match([layer.k2 for layer in calibration.layers], pieces[0], calibration.n_skip)
            for cache in (*planned, *against):
                cache.clear()
            run(reference, (*planned, *against), pieces, n_threads, progress=True)
            results += [result(cache, path.name, ctx_size, len(pieces)) for cache in (*planned, *against)]
        click.echo(json.dumps(results, indent=2) if output == "json" else table(results))
        if target is not None:
            frontier.frontier(results, target)


def main() -> None:
    """Entry point of `python -m converter.evaluate`."""
    command()


if __name__ == "__main__":
    main()
