"""Tasks for any model under several caches: does it still retrieve information from far back in a text?

    python -m runtime.tasks -m M.gguf --compare f16,q8_0,q4_0,subkv -c 512,2048 [-o json]
    python -m runtime.tasks -m M.gguf --tasks recall:4,tools --samples 32 --seed 7
    python -m runtime.tasks -m M.gguf --lm-eval FOLDER      the same samples for lm-evaluation-harness

An answer is right if each of its tokens is the most likely one after the text and the earlier right answers. Nothing
is sampled. Errors are standard errors over samples; changes are paired with the first cache, sample by sample.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from runtime.tasks.kinds import MAKERS, Task, parse
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from subkv.engine.context import Context, ContextOptions

MIN_LENGTH = 64  # tokens


def _tasks(_context: click.Context, _parameter: click.Parameter, text: str) -> list[Task]:
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except SubkvError as error:
        raise click.BadParameter(error.reason) from error


def table(results: list[dict[str, Any]]) -> str:
    """A line per cache and length, a column per task, and the worst change over the tasks."""
    tasks = list(dict.fromkeys(r["task"] for r in results))
    by_key = {(r["name"], r["length"], r["task"]): r for r in results}
    lines = [
        f"| cache | tokens | bpe | {' | '.join(tasks)} | worst change |",
        f"|---|---:|---:|{'---:|' * (len(tasks) + 1)}",
    ]
    for name, length in dict.fromkeys((r["name"], r["length"]) for r in results):
        row = [by_key[name, length, task] for task in tasks]
        cells = [share(r, name == results[0]["name"]) for r in row]
        worst = min(row, key=lambda r: r["change"])
        change = "" if name == results[0]["name"] else f"{100 * worst['change']:+.1f} {worst['task'].split(':')[0]}"
        lines.append(f"| {name} | {length} | {row[0]['bpe']:.2f} | {' | '.join(cells)} | {change} |")
    return "\n".join(lines)


def share(r: dict[str, Any], base: bool) -> str:
    """Right answers in percent, and the change from the base; for tool calls the share equal to the base's."""
    right = f"{100 * r['right']:.1f}%"
    if r["task"].startswith("tools") and not base:
        return f"{100 * r['same']:.1f}% ± {100 * r['same_stderr']:.1f} the same"
    if base:
        return f"{right} ± {100 * r['right_stderr']:.1f}"
    return f"{right} ({100 * r['change']:+.1f} ± {100 * r['change_stderr']:.1f})"


@command()
@options.model_option(required=True)
@click.option("--tasks", default=",".join(MAKERS), callback=_tasks, help="kinds, each with its difficulty: recall:4,…")
@click.option(
    "-c", "--ctx-size", "lengths", type=options.IntList(), default="512", help="tokens of a text, answers included"
)
@click.option("--samples", type=click.IntRange(min=1), default=8, help="texts of each kind and length")
@click.option("--seed", type=click.IntRange(min=0), default=1, help="seed of the first text; later texts count up")
@click.option(
    "--compare",
    callback=options.split_commas,
    metavar="T,T[:FILE],…",
    default="f16,q8_0,q4_0,subkv",
    help="caches; the first is the base",
)
@options.context_options(options.flash_option, options.threads_option, options.batch_options(n_batch=512, n_ubatch=512))
@click.option("--lm-eval", type=options.PATH, metavar="FOLDER", help="only write the texts, for lm-evaluation-harness")
@options.gpu_option
@options.form_option("text", "json")
def main(
    model: str,
    tasks: list[Task],
    lengths: list[int],
    samples: int,
    seed: int,
    compare: list[str],
    context: ContextOptions,
    lm_eval: Path | None,
    n_gpu_layers: int,
    form: str,
) -> None:
    """Retrieval, recall, copying, counting and tool calls under several KV caches, scored exactly."""
    from runtime.tasks import harness, run  # numpy and the native libraries: not for a --help
    from subkv.engine.cache import parse_cache
    from subkv.engine.model import Model

    context = dataclasses.replace(context, n_threads=default_threads(context.n_threads))
    with Model(model, options.gpu_layers(n_gpu_layers)) as opened:
        for length in lengths:
            if not MIN_LENGTH <= length <= opened.n_ctx_train:
                trained = f"expected {MIN_LENGTH} to {opened.n_ctx_train} tokens (the trained context)"
                raise SubkvError("lengths", f"{trained}, found {length}")
        if lm_eval is not None:
            with concerning(folder="lm_eval", length="lengths"):
                for path in harness.write(lm_eval, opened, tasks, lengths, samples, seed):
                    options.note(f"wrote {path}")
            return
        with concerning(kv_cache="compare"):
            choices = {name: parse_cache(name, opened.path) for name in compare}

        def made(name: str, length: int) -> Context:
            return opened.context(choices[name], dataclasses.replace(context, n_ctx=length))

        with concerning(length="lengths"):
            caches = [run.Cache(name, functools.partial(made, name)) for name in choices]
            results = run.run(opened, caches, tasks, lengths, samples, seed)
    click.echo(json.dumps(results, indent=2) if form == "json" else table(results))
