"""KLD of a model with different KV caches in one run, beside its noise floor.

    python -m runtime.perplexity -m M.gguf -f TEXT -c 2048 --chunks 4 --compare f16,q8_0,q4_0,subkv

The caches evaluate each batch in turn, so the logits of the first one, the base, need no file. The noise floor is an
f16 base once more, with flash attention flipped. `subkv run llama-perplexity` evaluates one cache.

As there, the text is split into chunks of n_ctx tokens. Each chunk is evaluated in an empty context, with BOS as its
first token if the model expects one, and its second half is scored.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter.corpus import read_text
from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from subkv.engine.context import ContextOptions
    from subkv.engine.model import Model

MIN_CTX = 8  # tokens
TITLES = "cache | bpe | KV B/token | PPL | Δ PPL | mean KLD | median KLD | 99.9% KLD | same top-1"
CELLS = (
    "{name} | {bpe:.2f} | {kv_bytes_per_token} | {ppl:.4f} ± {ppl_stderr:.4f} "
    "| {delta_percent:+.2f}% ± {ppl_ratio_stderr:.2%} | {mean_kld:.6f} ± {mean_kld_stderr:.6f} "
    "| {median_kld:.6f} | {kld_999:.6f} | {same_top:.2%} ± {same_top_stderr:.2%}"
)


def read_chunks(model: Model, file: Path, n_ctx: int, n_chunks: int) -> Any:
    """The text's tokens [chunks, n_ctx], at most n_chunks if that is positive; n_ctx 0: the trained context.

    Raises SubkvError, also for texts that llama-perplexity rejects as too short.
    """
    n_ctx = n_ctx or model.n_ctx_train
    if n_ctx < MIN_CTX:
        raise SubkvError("n_ctx", f"expected a context of at least {MIN_CTX} tokens, found {n_ctx}")
    with concerning(files="file"):
        tokens = model.tokenize(read_text(file).data.removesuffix(b"\n"))
    if len(tokens) < 2 * n_ctx:
        raise SubkvError("file", f"expected at least {2 * n_ctx} tokens for a context of {n_ctx}, found {len(tokens)}")
    chunks = tokens[: len(tokens) // n_ctx * n_ctx].reshape(-1, n_ctx)
    return chunks[:n_chunks] if n_chunks > 0 else chunks


@command()
@click.option("-f", "--file", type=options.PATH, required=True, metavar="FILE", help="text to score")
@click.option("--chunks", "n_chunks", type=int, default=-1, help="chunks to evaluate, -1: all")
@options.comparison("--compare", "f16,subkv")
@options.context_options(
    options.context_option(512), options.flash_option, options.threads_option, options.batch_options(n_batch=512)
)
def main(file: Path, n_chunks: int, compared: options.Comparison, context: ContextOptions) -> None:
    """Perplexity on a text with different KV caches in one run, and their KL divergence from the first one.

    One cache alone: subkv run llama-perplexity.
    """
    from converter.scoring import evaluate  # numpy: not for a --help

    with compared.open() as (model, choices, cleanup):
        chunks = read_chunks(model, file, context.n_ctx, n_chunks)
        context = replace(context, n_ctx=chunks.shape[1])
        if context.n_ctx > model.n_ctx_train:
            options.note(f"-c: {context.n_ctx} tokens exceed the trained context of {model.n_ctx_train}")
        caches = [(name, choice, context) for name, choice in zip(compared.names, choices, strict=True)]
        if choices[0].name == "f16":
            other = "on" if context.flash_attn == "off" else "off"
            caches.append((f"f16 (flash attention {other})", choices[0], replace(context, flash_attn=other)))
        contexts = [options.open_context(model, choice, sized, name, cleanup) for name, choice, sized in caches]
        scores = evaluate(model, contexts, chunks, default_threads(context.n_threads))
        about = {"text": file.name, "n_ctx": context.n_ctx, "chunks": len(chunks)}
        results = [
            {"name": name, **scored.summary(), **options.cache_members(one), **about}
            for (name, *_), one, scored in zip(caches, contexts, scores, strict=True)
        ]
    for result in results:
        options.note_zero_rows(result["n_zero_rows"], result["name"])
    compared.show(results, TITLES, CELLS)


if __name__ == "__main__":
    main()
