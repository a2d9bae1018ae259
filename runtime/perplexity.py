"""KLD of a model with different KV caches in one run, beside its noise floor.

    python -m runtime.perplexity -m M.gguf -f TEXT -c 2048 --chunks 4 --compare f16,q8_0,q4_0,subkv

The caches evaluate each batch in turn, so the logits of the first one, the base, need no file. The noise floor is an
f16 base once more, with flash attention flipped. `subkv run llama-perplexity` evaluates one cache.

As there, the text is split into chunks of n_ctx tokens. Each chunk is evaluated in an empty context, with BOS as its
first token if the model expects one, and its second half is scored.
"""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning, system_reason
from subkv.base.progress import progress_bar
from subkv.base.text import printable
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from converter.scoring import Scores
    from subkv.engine.cache import CacheOptions
    from subkv.engine.context import Context, ContextOptions
    from subkv.engine.model import Model

MIN_CTX = 8  # tokens


def read_chunks(model: Model, file: Path, n_ctx: int, n_chunks: int) -> Any:
    """The text's tokens [chunks, n_ctx], at most n_chunks if that is positive; n_ctx 0: the trained context.

    Raises SubkvError, also for texts that llama-perplexity rejects as too short.
    """
    n_ctx = n_ctx or model.n_ctx_train
    if n_ctx < MIN_CTX:
        raise SubkvError("n_ctx", f"expected a context of at least {MIN_CTX} tokens, found {n_ctx}")
    try:
        text = file.read_bytes()
    except OSError as error:
        raise SubkvError("file", f"cannot read {file}: {system_reason(error)}") from error
    with concerning(files="file"):
        tokens = model.tokenize(text.removesuffix(b"\n"))
    if len(tokens) < 2 * n_ctx:
        least = f"at least {2 * n_ctx} tokens for a context of {n_ctx}"
        raise SubkvError("file", f"expected {least}, found {len(tokens)} in {file}")
    chunks = tokens[: len(tokens) // n_ctx * n_ctx].reshape(-1, n_ctx)
    return chunks[:n_chunks] if n_chunks > 0 else chunks


def evaluate(model: Model, contexts: list[Context], chunks: Any, n_threads: int) -> list[Scores]:
    """Score the chunks with every cache, batch by batch. The first one is the base; one batch of it is in memory."""
    import numpy as np  # not for a --help

    from converter.scoring import Scores, perplexity, score

    n_ctx = chunks.shape[1]
    n_batch = min(context.n_batch for context in contexts)
    scores = [Scores() for _ in contexts]
    with ThreadPoolExecutor(n_threads) as pool, progress_bar("perplexity", chunks.size * len(contexts), "tok") as bar:
        for i, part in enumerate(chunks):
            feed = part.copy()
            if model.add_bos:
                feed[0] = model.bos
            for context in contexts:
                context.clear()
            for start in range(0, n_ctx, n_batch):
                end = min(start + n_batch, n_ctx)
                low = max(start, n_ctx // 2)
                n_rows = max(min(end, n_ctx - 1) - low, 0)  # the last token predicts one of the next chunk
                base = None
                for context, scored in zip(contexts, scores, strict=True):
                    n_logits = context.decode(feed[start:end], start, low - start)
                    context.synchronize()
                    bar.update(end - start)
                    if n_rows:
                        logits = context.logits(n_logits)[:n_rows]
                        scored.add(score(logits, part[low + 1 : low + 1 + n_rows], base, pool, n_threads))
                        base = np.array(logits) if base is None else base
            progress = f"[{i + 1}/{len(chunks)}] PPL {perplexity(np.concatenate(scores[0].nll))[0]:.4f}"
            bar.set_postfix_str(progress)
            if bar.disable:  # not a terminal
                options.note(progress)
    return scores


def table(results: list[dict[str, Any]]) -> str:
    """Results as a Markdown table; the first row is the base."""
    lines = [
        "| cache | bpe | KV MiB | PPL | Δ PPL | mean KLD | median KLD | 99.9% KLD | same top-1 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        line = f"| {r['name']} | {r['bpe']:.2f} | {r['kv_bytes'] / 2**20:.1f} | {r['ppl']:.4f} ± {r['ppl_stderr']:.4f} "
        if r["mean_kld"] is None:
            line += "| base |  |  |  |  |"
        else:
            line += (
                f"| {r['delta_percent']:+.2f}% ± {100 * r['ppl_ratio_stderr']:.2f}% "
                f"| {r['mean_kld']:.6f} ± {r['mean_kld_stderr']:.6f} | {r['median_kld']:.6f} | {r['kld_999']:.6f} "
                f"| {100 * r['same_top']:.2f}% ± {100 * r['same_top_stderr']:.2f}% |"
            )
        lines.append(line)
    return "\n".join(lines)


@command()
@options.model_option(required=True)
@click.option("-f", "--file", type=options.PATH, required=True, metavar="FILE", help="text to score")
@click.option("--chunks", "n_chunks", type=int, default=-1, help="chunks to evaluate, -1: all")
@click.option(
    "--compare",
    callback=options.split_commas,
    default="f16,subkv",
    metavar="T,T[:FILE],…",
    help="caches, the first is the base: f16,q8_0,q8_0/q4_0,subkv,subkv:sidecar.gguf",
)
@click.option("--noise-floor/--no-noise-floor", default=True, help="add an f16 base with flash attention flipped")
@options.coded_options
@options.context_options(
    options.context_option(512), options.flash_option, options.threads_option, options.batch_options(n_batch=512)
)
@options.gpu_option
@options.form_option("text", "json")
def main(
    model: str,
    file: Path,
    n_chunks: int,
    compare: list[str],
    noise_floor: bool,
    requested: CacheOptions,
    context: ContextOptions,
    n_gpu_layers: int,
    form: str,
) -> None:
    """Perplexity on a text with different KV caches in one run, and their KL divergence from the first one.

    One cache alone: subkv run llama-perplexity.
    """
    from subkv.engine.cache import parse_cache  # numpy and the native libraries: not for a --help
    from subkv.engine.model import Model

    with contextlib.ExitStack() as cleanup:
        opened = cleanup.enter_context(Model(model, options.gpu_layers(n_gpu_layers)))
        chunks = read_chunks(opened, file, context.n_ctx, n_chunks)
        context = replace(context, n_ctx=chunks.shape[1])
        if context.n_ctx > opened.n_ctx_train:
            options.note(f"-c: {context.n_ctx} tokens exceed the trained context of {opened.n_ctx_train}")
        with concerning(kv_cache="compare"):
            caches = [(spec, parse_cache(spec, opened.path, requested), context.flash_attn) for spec in compare]
        if noise_floor and caches[0][1].name == "f16":
            other = "on" if context.flash_attn == "off" else "off"
            caches.append((f"f16 (flash attention {other})", caches[0][1], other))
        contexts = [
            options.open_context(opened, choice, replace(context, flash_attn=flash), name, cleanup)
            for name, choice, flash in caches
        ]
        scores = evaluate(opened, contexts, chunks, default_threads(context.n_threads))
        results = [
            {
                "name": name,
                **scored.summary(),
                "flash_attn": flash,
                **options.cache_members(one),
                "text": file.name,
                "n_ctx": context.n_ctx,
                "chunks": len(chunks),
            }
            for (name, _, flash), one, scored in zip(caches, contexts, scores, strict=True)
        ]
    for result in results:
        options.note_zero_rows(result["n_zero_rows"], result["name"])
    click.echo(json.dumps(results, indent=2) if form == "json" else printable(table(results), keep="\n"))


if __name__ == "__main__":
    main()
