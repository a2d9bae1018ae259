"""Tasks about facts far back in a text, scored for one model under several caches.

    python -m research.tasks -m M.gguf --compare f16,q8_0,q4_0,subkv -c 512,2048 [-o json]
    python -m research.tasks -m M.gguf --tasks recall:4,tools --samples 32 --seed 7
    python -m research.tasks -m M.gguf --lm-eval FOLDER      the same samples for lm-evaluation-harness

An answer is right if each of its tokens is the most likely one after the text and the right answers before it. Nothing
is sampled. Errors are standard errors over samples. A change is the difference from the first cache on the same sample.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from research.tasks.kinds import MAKERS, Task, parse
from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from subkv.engine.context import ContextOptions

MIN_LENGTH = 64  # tokens


def _tasks(_context: click.Context, _parameter: click.Parameter, text: str) -> list[Task]:
    """Parse --tasks."""
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
        is_base = name == results[0]["name"]
        cells = [_cell(r, is_base) for r in row]
        worst = min(row, key=lambda r: r["change"])
        change = "" if is_base else f"{100 * worst['change']:+.1f} {worst['task'].split(':')[0]}"
        lines.append(f"| {name} | {length} | {row[0]['bpe']:.2f} | {' | '.join(cells)} | {change} |")
    return "\n".join(lines)


def _cell(r: dict[str, Any], is_base: bool) -> str:
    """Right answers in percent, and the change from the base; for tool calls the share equal to the base's."""
    right = f"{100 * r['right']:.1f}%"
    if is_base:
        return f"{right} ± {100 * r['right_stderr']:.1f}"
    if r["task"].startswith("tools"):
        return f"{100 * r['same']:.1f}% ± {100 * r['same_stderr']:.1f} the same"
    return f"{right} ({100 * r['change']:+.1f} ± {100 * r['change_stderr']:.1f})"


@command()
@options.model_option(required=True)
@click.option(
    "--tasks", default=",".join(MAKERS), callback=_tasks, help="tasks, each with an optional difficulty: recall:4,…"
)
@click.option(
    "-c",
    "--ctx-size",
    "lengths",
    type=options.NUMBERS,
    default="512",
    help="lengths of the texts in tokens, answers included",
)
@click.option("--samples", type=click.IntRange(min=1), default=8, help="texts per task and length")
@click.option("--seed", type=click.IntRange(min=0), default=1, help="seed of the first text; each further text adds 1")
@click.option(
    "--compare",
    type=options.ListOf(),
    metavar="T,T[:FILE],…",
    default="f16,q8_0,q4_0,subkv",
    help="caches; the first is the base",
)
@options.context_options(options.flash_option, options.threads_option, options.batch_options(n_batch=512, n_ubatch=512))
@click.option(
    "--lm-eval",
    type=options.PATH,
    metavar="FOLDER",
    help="write the texts for lm-evaluation-harness, and score nothing",
)
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
    from research.tasks import harness, run  # numpy and the native libraries: not for a --help
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

        with concerning(length="lengths"):
            results = run.run(opened, choices, context, tasks, lengths, samples, seed)
    click.echo(json.dumps(results, indent=2) if form == "json" else table(results))
