"""Perplexity and KLD of a model under different KV caches, by llama-perplexity's method and names.

    python -m runtime.perplexity -m M.gguf -f TEXT -c 2048 --chunks 4 [-ctk T]
    python -m runtime.perplexity -m M.gguf -f TEXT -c 2048 --chunks 4 --compare f16,q8_0,q4_0,subkv [--plot FILE.png]
    … --kl-divergence-base F        writes the base's logits (f16 cache unless -ctk says otherwise)
    … --kl-divergence-base F --kl-divergence -ctk T

The text is cut into chunks of n_ctx tokens, each evaluated in an empty context (its first token replaced by BOS where
the model wants one), and the second half of each is scored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from converter.scoring import BaseReader, Scores
    from subkv.engine.model import Context, Model


@dataclasses.dataclass
class Run:
    """One cache under test."""

    name: str
    context: Context
    flash_attn: str
    scores: Scores

    def result(self, text: str | None, n_ctx: int, chunks: int) -> dict[str, Any]:
        """One JSON object. text: name of the scored text, None when only its tokens are known."""
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
            "kernel": stats.kernel,
            "text": text,
            "n_ctx": n_ctx,
            "chunks": chunks,
        }


def read_tokens(model: Model, file: str, n_ctx: int, chunks: int) -> tuple[npt.NDArray[np.int32], int]:
    """Tokens of a text and the number of chunks to evaluate; refuses texts that llama-perplexity refuses, too."""
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise SubkvError("files", f"cannot read {file}: {error.strerror or error}") from error
    tokens = model.tokenize(text.removesuffix(b"\n"))
    if len(tokens) < 2 * n_ctx:
        raise SubkvError(
            "files", f"expected at least {2 * n_ctx} tokens for a context of {n_ctx}, found {len(tokens)} in {file}"
        )
    available = len(tokens) // n_ctx
    return tokens, min(chunks, available) if chunks > 0 else available


def batches(n_ctx: int, n_batch: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n_ctx, n_batch):
        yield start, min(start + n_batch, n_ctx)


def evaluate(
    runs: list[Run],
    tokens: npt.NDArray[np.int32],
    n_ctx: int,
    chunks: int,
    *,
    n_threads: int,
    reader: BaseReader | None = None,
    writer: Any = None,
) -> None:
    """Run every cache over the same chunks, batch by batch; the first is the base of the others unless `reader` is.

    Only one batch of base logits is held in memory. `writer` receives the base file's rows of the (only) run.
    """
    import numpy as np

    from converter import scoring
    from subkv.base.progress import progress_bar

    model = runs[0].context.model
    first = n_ctx // 2
    n_batch = min(run.context.n_batch for run in runs)
    with (
        ThreadPoolExecutor(n_threads) as pool,
        progress_bar("perplexity", chunks * n_ctx * len(runs), "tok") as bar,
    ):
        for chunk in range(chunks):
            part = tokens[chunk * n_ctx : (chunk + 1) * n_ctx]
            feed = part.copy()
            if model.add_bos:
                feed[0] = model.bos
            for run in runs:
                run.context.clear()
            for start, end in batches(n_ctx, n_batch):
                low = max(start, first)
                n_rows = max(min(end, n_ctx - 1) - low, 0)  # the last position predicts a token of the next chunk
                rows = reader.read(n_rows) if reader is not None and n_rows else None
                base = None
                for run in runs:
                    n_logits = run.context.decode(feed[start:end], start, low - start)
                    if n_rows:
                        logits = run.context.logits(n_logits)[:n_rows]
                        targets = part[low + 1 : low + 1 + n_rows]
                        if writer is not None:
                            for i in range(0, n_rows, scoring.ROWS):
                                writer.write(scoring.encode_rows(logits[i : i + scoring.ROWS]).astype("<u2").tobytes())
                        if rows is not None:
                            run.scores.add(scoring.score_against_rows(logits, targets, rows, pool, n_threads))
                        else:
                            run.scores.add(scoring.score(logits, targets, base, pool, n_threads))
                            if base is None and len(runs) > 1:
                                base = np.array(logits)
                    else:
                        run.context.synchronize()
                    bar.update(end - start)
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
    """One result in llama-perplexity's words."""
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
@click.option("-f", "--file", "file", default=None, metavar="FILE", help="text to score")
@options.context_option(512)
@click.option("--chunks", type=int, default=-1, help="chunks to evaluate, -1: all")
@options.cache_options
@options.window_options
@options.flash_option
@click.option(
    "--compare",
    default=None,
    metavar="T,T[:FILE],…",
    help="several caches in one run, the first is the base: f16,q8_0,q8_0/q4_0,subkv,subkv:sidecar.gguf",
)
@click.option(
    "--noise-floor/--no-noise-floor", default=True, help="with --compare: add the base with flash attention flipped"
)
@click.option("--plot", "target", default=None, metavar="FILE.png", help="with --compare: draw bits against KLD")
@click.option(
    "--kl-divergence-base",
    "base_file",
    default=None,
    metavar="FILE",
    help="base logits: written, or read with --kl-divergence",
)
@click.option("--kl-divergence", is_flag=True, help="compare against --kl-divergence-base (no -f needed)")
@options.threads_option
@options.batch_options(n_batch=512, n_ubatch=512)
@options.gpu_option
@options.output_option("text", "json")
@click.pass_context
def main(click_ctx: click.Context, /, **given: Any) -> None:
    """Perplexity of a model on a text; with a base, also the KL divergence of a compressed cache from it."""
    file, n_ctx, base_file = given["file"], given["n_ctx"], given["base_file"]
    if given["kl_divergence"] and not base_file:
        raise click.UsageError("--kl-divergence: expected --kl-divergence-base FILE with it, found none")
    if given["compare"] and (base_file or given["type_k"] or given["type_v"]):
        raise click.UsageError("--compare: expected no -ctk, -ctv or --kl-divergence-base with it")
    if given["target"] and not given["compare"]:
        raise click.UsageError("--plot: expected --compare T,… with it, found none")
    if not file and not given["kl_divergence"]:
        raise click.UsageError("-f: expected a text file, found none")

    from converter import scoring
    from converter.plots import figure, frontier
    from subkv.base.files import atomic_file
    from subkv.engine.model import Model

    if given["target"]:
        figure.check(Path(given["target"]))
    n_threads = default_threads(given["n_threads"])
    with contextlib.ExitStack() as cleanup:
        model = cleanup.enter_context(Model(given["model"], options.gpu_layers(given["n_gpu_layers"])))
        reader, writer = None, None
        if given["kl_divergence"]:
            try:
                reader = scoring.BaseReader(Path(base_file))
            except scoring.BaseFileError as error:
                raise SubkvError("kl_divergence_base", f"{error}") from error
            cleanup.callback(reader.close)
            if reader.n_vocab != model.n_vocab:
                raise SubkvError(
                    "kl_divergence_base", f"expected {model.n_vocab} tokens in the vocabulary, found {reader.n_vocab}"
                )
            n_ctx, chunks, tokens = reader.n_ctx, reader.n_chunk, reader.tokens
            if tokens.min() < 0 or tokens.max() >= model.n_vocab:
                raise SubkvError("kl_divergence_base", f"expected tokens 0..{model.n_vocab - 1}, found others")
            chunks = min(chunks, given["chunks"]) if given["chunks"] > 0 else chunks
        else:
            n_ctx = n_ctx or model.n_ctx_train
            if n_ctx < 8:
                raise SubkvError("n_ctx", f"expected a context of at least 8 tokens, found {n_ctx}")
            tokens, chunks = read_tokens(model, file, n_ctx, given["chunks"])
        if n_ctx > model.n_ctx_train:
            options.note(f"-c: {n_ctx} tokens are more than the {model.n_ctx_train} the model was trained with")
        runs = open_runs(model, given, n_ctx, n_threads, writing=bool(base_file) and reader is None)
        for run in runs:
            cleanup.callback(run.context.close)
        if base_file and reader is None:
            writer = cleanup.enter_context(atomic_file(Path(base_file)))
            scoring.write_header(writer, tokens, n_ctx, model.n_vocab, chunks)
        evaluate(runs, tokens, n_ctx, chunks, n_threads=n_threads, reader=reader, writer=writer)
        text = None if reader is not None else Path(file).name
        results = [run.result(text, n_ctx, chunks) for run in runs]
    if given["compare"]:
        click.echo(json.dumps(results, indent=2) if given["output"] == "json" else table(results))
        if given["target"]:
            frontier.frontier(results, Path(given["target"]))
            options.note(f"wrote {given['target']}")
    else:
        click.echo(json.dumps(results[0], indent=2) if given["output"] == "json" else report(results[0]))


def open_runs(model: Model, given: dict[str, Any], n_ctx: int, n_threads: int, writing: bool) -> list[Run]:
    """Contexts for what the flags ask for, each announced by its cache line."""
    from converter.scoring import Scores
    from subkv.engine.cache import choose_cache
    from subkv.engine.model import parse_cache
    from subkv.engine.stats import cache_line

    bases = Path(given["bases"]) if given["bases"] else None
    flash = options.FLASH[given["flash_attn"]]
    wanted = []
    if given["compare"]:
        for spec in given["compare"].split(","):
            wanted.append((spec.strip(), parse_cache(spec.strip(), model.path, bases, "--compare"), flash))
        base = wanted[0]
        if given["noise_floor"] and base[1].name == "f16":
            other = "on" if flash == "off" else "off"
            wanted.append((f"f16 (flash attention {other})", base[1], other))
    else:
        asked = options.cache_arguments(given["type_k"], given["type_v"])
        if writing and asked == {"kv_cache": "auto"}:
            asked = {"kv_cache": "f16"}
        choice = choose_cache(model.path, bases=bases, **asked)
        wanted.append((choice.name, choice, flash))
    runs = []
    for name, choice, fa in wanted:
        window: dict[str, Any] = {key: given[key] if choice.coded else None for key in ("n_sink", "n_recent", "adapt")}
        context = model.context(
            choice,
            n_ctx=n_ctx,
            n_batch=given["n_batch"],
            n_ubatch=given["n_ubatch"],
            n_threads=n_threads,
            flash_attn=fa,
            **window,
        )
        options.note(f"{name}: {cache_line(context.stats)}" if given["compare"] else cache_line(context.stats))
        runs.append(Run(name, context, fa, Scores()))
    return runs


if __name__ == "__main__":
    main()
