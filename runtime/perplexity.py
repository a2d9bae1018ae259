"""Perplexity and KLD of a model with different KV caches, by llama-perplexity's method and option names.

    python -m runtime.perplexity -m M.gguf -f TEXT -c 2048 --chunks 4 [-ctk T]
    python -m runtime.perplexity -m M.gguf -f TEXT -c 2048 --chunks 4 --compare f16,q8_0,q4_0,subkv [--plot FILE.png]
    … --kl-divergence-base F                           writes the base's logits, of an f16 cache without -ctk
    … --kl-divergence-base F --kl-divergence -ctk T    compares with them

The text is split into chunks of n_ctx tokens. Each chunk is evaluated in an empty context, with BOS as its first token
if the model expects one, and its second half is scored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from runtime import options
from subkv.base.command import command, group
from subkv.base.errors import SubkvError, concerning, system_reason
from subkv.base.progress import progress_bar
from subkv.base.text import printable
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from converter.scoring import I32, BaseReader, Scores
    from subkv.engine.cache import CacheOptions
    from subkv.engine.context import Context, ContextOptions
    from subkv.engine.model import Model

MIN_CTX = 8  # tokens


@dataclasses.dataclass
class Scored:
    """Tokens to score in chunks of n_ctx. text: file name, None for a base file; reader: the base file."""

    tokens: I32
    n_ctx: int
    chunks: int
    text: str | None = None
    reader: BaseReader | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Flags that choose the tokens to score: of a text, or with kl_divergence of a file with base logits.

    chunks: maximum, if positive. kl_divergence_base: the file of base logits to read or to write.
    """

    file: Path | None
    chunks: int
    kl_divergence_base: Path | None
    kl_divergence: bool

    @property
    def base_to_write(self) -> Path | None:
        """The base file to write."""
        return None if self.kl_divergence else self.kl_divergence_base

    def open(self, model: Model, n_ctx: int, cleanup: contextlib.ExitStack) -> Scored:
        """Read the tokens; n_ctx 0: the trained context. Raises SubkvError."""
        scored = self._read_base(model, cleanup) if self.kl_divergence else self._read_text(model, n_ctx)
        return dataclasses.replace(scored, chunks=min(self.chunks, scored.chunks)) if self.chunks > 0 else scored

    def _read_text(self, model: Model, n_ctx: int) -> Scored:
        """Rejects texts that are too short, as llama-perplexity does."""
        assert self.file is not None
        n_ctx = n_ctx or model.n_ctx_train
        if n_ctx < MIN_CTX:
            raise SubkvError("n_ctx", f"expected a context of at least {MIN_CTX} tokens, found {n_ctx}")
        try:
            text = self.file.read_bytes()
        except OSError as error:
            raise SubkvError("file", f"cannot read {self.file}: {system_reason(error)}") from error
        with concerning(files="file"):
            tokens = model.tokenize(text.removesuffix(b"\n"))
        if len(tokens) < 2 * n_ctx:
            least = f"at least {2 * n_ctx} tokens for a context of {n_ctx}"
            raise SubkvError("file", f"expected {least}, found {len(tokens)} in {self.file}")
        return Scored(tokens, n_ctx, len(tokens) // n_ctx, self.file.name)

    def _read_base(self, model: Model, cleanup: contextlib.ExitStack) -> Scored:
        from converter.scoring import BaseReader  # numpy: not for a --help

        assert self.kl_divergence_base is not None
        with concerning(path="kl_divergence_base"):
            reader = BaseReader(self.kl_divergence_base)
            cleanup.callback(reader.close)
            if reader.n_vocab != model.n_vocab:
                raise SubkvError("path", f"expected {model.n_vocab} tokens in the vocabulary, found {reader.n_vocab}")
            if reader.tokens.min() < 0 or reader.tokens.max() >= model.n_vocab:
                raise SubkvError("path", f"expected token ids below {model.n_vocab}, found larger or negative ones")
        return Scored(reader.tokens, reader.n_ctx, reader.n_chunk, reader=reader)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several caches in one run, each a spec of parse_cache(). plot: file for a plot of the results."""

    compare: list[str]
    noise_floor: bool
    plot: Path | None


@dataclasses.dataclass
class Run:
    """One cache under test."""

    name: str
    context: Context
    flash_attn: str
    scores: Scores

    def result(self, scored: Scored) -> dict[str, Any]:
        """One JSON object."""
        stats = self.context.stats
        return {
            "name": self.name,
            **self.scores.summary(),
            "type_k": stats.type_k,
            "type_v": stats.type_v,
            "flash_attn": self.flash_attn,
            "bpe": round(stats.bpe, 4),
            "kv_bytes": stats.bytes_kv,
            "kv_bytes_per_token": stats.bytes_per_token,
            "n_zero_rows": self.context.n_zero_rows,
            "kernel": stats.kernel,
            "text": scored.text,
            "n_ctx": scored.n_ctx,
            "chunks": scored.chunks,
        }


def evaluate(model: Model, runs: list[Run], scored: Scored, n_threads: int, writer: BinaryIO | None = None) -> None:
    """Evaluate the same chunks with every cache, batch by batch. The base is the base file, else the first run.

    Only one batch of base logits is in memory. writer: the base file to write; then there is one run.
    """
    import numpy as np  # not for a --help

    from converter import scoring

    n_ctx, chunks = scored.n_ctx, scored.chunks
    first = n_ctx // 2
    n_batch = min(run.context.n_batch for run in runs)
    with ThreadPoolExecutor(n_threads) as pool, progress_bar("perplexity", chunks * n_ctx * len(runs), "tok") as bar:
        for chunk in range(chunks):
            part = scored.tokens[chunk * n_ctx : (chunk + 1) * n_ctx]
            feed = part.copy()
            if model.add_bos:
                feed[0] = model.bos
            for run in runs:
                run.context.clear()
            for start in range(0, n_ctx, n_batch):
                end = min(start + n_batch, n_ctx)
                low = max(start, first)
                n_rows = max(min(end, n_ctx - 1) - low, 0)  # the last token predicts one of the next chunk
                base: Any = scored.reader.read(n_rows) if scored.reader is not None and n_rows else None
                for run in runs:
                    n_logits = run.context.decode(feed[start:end], start, low - start)
                    bar.update(end - start)
                    if not n_rows:
                        run.context.synchronize()
                        continue
                    logits = run.context.logits(n_logits)[:n_rows]
                    targets = part[low + 1 : low + 1 + n_rows]
                    if writer is not None:
                        scoring.write_rows(writer, logits)
                    run.scores.add(scoring.score(logits, targets, base, pool, n_threads))
                    if base is None and len(runs) > 1:
                        base = np.array(logits)
            ppl, _ = scoring.perplexity(np.concatenate(runs[0].scores.nll))
            bar.set_postfix_str(f"[{chunk + 1}/{chunks}] PPL {ppl:.4f}")
            if bar.disable:  # not a terminal
                options.note(f"[{chunk + 1}/{chunks}] PPL {ppl:.4f}")


def table(results: list[dict[str, Any]]) -> str:
    """Results of --compare as a Markdown table; the first row is the base."""
    lines = [
        "| cache | bpe | KV MiB | PPL | Δ PPL | mean KLD | median KLD | 99.9% KLD | same top-1 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        cells = [
            r["name"],
            f"{r['bpe']:.2f}",
            f"{r['kv_bytes'] / 2**20:.1f}",
            f"{r['ppl']:.4f} ± {r['ppl_stderr']:.4f}",
        ]
        if r["mean_kld"] is None:
            cells += ["base"] + [""] * 4
        else:
            cells += [
                f"{r['delta_percent']:+.2f}% ± {100 * r['ppl_ratio_stderr']:.2f}%",
                f"{r['mean_kld']:.6f} ± {r['mean_kld_stderr']:.6f}",
                f"{r['median_kld']:.6f}",
                f"{r['kld_999']:.6f}",
                f"{100 * r['same_top']:.2f}% ± {100 * r['same_top_stderr']:.2f}%",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(r: dict[str, Any]) -> str:
    """One result in llama-perplexity's format."""
    lines = [f"Final estimate: PPL = {r['ppl']:.4f} +/- {r['ppl_stderr']:.5f}"]
    if r["mean_kld"] is not None:
        lines += [
            f"Mean PPL(base)        : {r['ppl_base']:.6f}",
            f"Mean PPL(Q)/PPL(base) : {r['ppl_ratio']:.6f} ± {r['ppl_ratio_stderr']:.6f}",
            f"Mean    KLD           : {r['mean_kld']:.6f} ± {r['mean_kld_stderr']:.6f}",
            f"Maximum KLD           : {r['max_kld']:.6f}",
            f"99.9%   KLD           : {r['kld_999']:.6f}",
            f"Median  KLD           : {r['median_kld']:.6f}",
            f"Same top p            : {100 * r['same_top']:.3f} ± {100 * r['same_top_stderr']:.3f} %",
        ]
    return "\n".join(lines)


@command()
@options.model_option(required=True)
@group(
    "source",
    Source,
    click.option("-f", "--file", type=options.PATH, metavar="FILE", help="text to score"),
    click.option("--chunks", type=int, default=-1, help="chunks to evaluate, -1: all"),
    click.option(
        "--kl-divergence-base",
        type=options.PATH,
        metavar="FILE",
        help="base logits: written, or read with --kl-divergence",
    ),
    click.option("--kl-divergence", is_flag=True, help="compare against --kl-divergence-base (no -f needed)"),
)
@options.cache_options()
@options.context_options(
    options.context_option(512),
    options.flash_option,
    options.threads_option,
    options.batch_options(n_batch=512, n_ubatch=512),
)
@group(
    "comparison",
    Comparison,
    click.option(
        "--compare",
        callback=options.split_commas,
        metavar="T,T[:FILE],…",
        help="several caches in one run, the first is the base: f16,q8_0,q8_0/q4_0,subkv,subkv:sidecar.gguf",
    ),
    click.option(
        "--noise-floor/--no-noise-floor", default=True, help="with --compare: add the base with flash attention flipped"
    ),
    click.option("--plot", type=options.PATH, metavar="FILE.png", help="with --compare: draw bits against KLD"),
)
@options.gpu_option
@options.form_option("text", "json")
def main(
    model: str,
    source: Source,
    cache: CacheOptions,
    context: ContextOptions,
    comparison: Comparison,
    n_gpu_layers: int,
    form: str,
) -> None:
    """Perplexity of a model on a text; with a base, also the KL divergence of a compressed cache from it."""
    compare, plot = comparison.compare, comparison.plot
    if source.kl_divergence and not source.kl_divergence_base:
        raise click.UsageError("--kl-divergence: expected --kl-divergence-base FILE with it, found none")
    if compare and (source.kl_divergence_base or cache.type_v):
        raise click.UsageError("--compare: expected no -ctk, -ctv or --kl-divergence-base with it")
    if plot and not compare:
        raise click.UsageError("--plot: expected --compare T,… with it, found none")
    if not source.file and not source.kl_divergence:
        raise click.UsageError("-f: expected a text file, found none")

    from converter.plots import figure, frontier  # numpy and the native libraries: not for a --help
    from converter.scoring import write_header
    from subkv.base.files import atomic_file
    from subkv.engine.model import Model

    if plot:
        figure.check(plot)
    n_threads = default_threads(context.n_threads)
    with contextlib.ExitStack() as cleanup:
        opened = cleanup.enter_context(Model(model, options.gpu_layers(n_gpu_layers)))
        scored = source.open(opened, context.n_ctx, cleanup)
        if scored.n_ctx > opened.n_ctx_train:
            options.note(f"-c: {scored.n_ctx} tokens exceed the trained context of {opened.n_ctx_train}")
        context = dataclasses.replace(context, n_ctx=scored.n_ctx, n_threads=n_threads)
        runs = open_runs(opened, cache, context, comparison, bool(source.base_to_write), cleanup)
        writer = None
        if source.base_to_write:
            cleanup.enter_context(concerning(output="kl_divergence_base"))
            writer = cleanup.enter_context(atomic_file(source.base_to_write))
            write_header(writer, scored.tokens, scored.n_ctx, opened.n_vocab, scored.chunks)
        evaluate(opened, runs, scored, n_threads, writer)
        results = [run.result(scored) for run in runs]
    for result in results:
        options.note_zero_rows(result["n_zero_rows"], result["name"])
    if form == "json":
        click.echo(json.dumps(results if compare else results[0], indent=2))
    else:
        click.echo(printable(table(results) if compare else report(results[0]), keep="\n"))
    if plot:
        frontier.frontier(results, plot)
        options.note(f"wrote {plot}")


def open_runs(
    model: Model,
    cache: CacheOptions,
    context: ContextOptions,
    comparison: Comparison,
    writing: bool,
    cleanup: contextlib.ExitStack,
) -> list[Run]:
    """Open the requested contexts and log the cache line of each."""
    from converter.scoring import Scores  # numpy and the native libraries: not for a --help
    from subkv.engine.cache import AUTO, choose_cache, parse_cache

    flash = context.flash_attn
    if comparison.compare:
        with concerning(kv_cache="compare"):
            specs = [(spec, parse_cache(spec, model.path, cache), flash) for spec in comparison.compare]
        base = specs[0][1]
        if comparison.noise_floor and base.name == "f16":
            other = "on" if flash == "off" else "off"
            specs.append((f"f16 (flash attention {other})", base, other))
    else:
        if writing and cache.type_v in (None, AUTO):  # the base is an exact cache
            cache = dataclasses.replace(cache, type_k="f16", type_v="f16")
        choice = choose_cache(model.path, cache)
        specs = [(choice.name, choice, flash)]
    runs = []
    for name, choice, fa in specs:
        opened = model.context(choice, dataclasses.replace(context, flash_attn=fa))
        cleanup.callback(opened.close)
        options.note_cache(opened.stats, choice, name if comparison.compare else "")
        runs.append(Run(name, opened, fa, Scores()))
    return runs


if __name__ == "__main__":
    main()
