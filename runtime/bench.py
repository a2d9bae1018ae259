"""Speed with different KV caches. They alternate within every repetition, so a busy machine slows all of them equally.

    python -m runtime.bench -m M.gguf -p 512 -n 32 -d 0,4096 -ctk f16,q8_0,subkv -fa auto,off -t 2 -r 5

`subkv run llama-bench` measures one cache after the other. Here each context is filled to a depth once, and its tail is
removed after each repetition. To fill it quickly, two batches are evaluated and their cells are copied. (Cells cannot
be copied if sequences do not share them, with sliding windows or recurrent layers; then all batches are evaluated.) So
the cells hold other numbers than those of a real text, but times do not depend on these numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command, group
from subkv.base.errors import CacheError, SubkvError
from subkv.base.progress import progress_bar
from subkv.base.text import printable

if TYPE_CHECKING:
    from subkv.engine.cache import CacheChoice, CacheOptions
    from subkv.engine.context import Context, ContextOptions
    from subkv.engine.model import Model

Tokens = Callable[[int], Any]  # n random tokens, as in llama-bench
FLASH_NUMBERS = {"auto": -1, "off": 0, "on": 1}
WARM_UP = 2  # tokens


@dataclass(frozen=True)
class Tests:
    """prompts, gens: lengths in tokens, 0: none. depths: in cells. n_parallel: sequences that generate."""

    prompts: list[int]
    gens: list[int]
    depths: list[int]
    n_parallel: int
    repetitions: int

    @property
    def longest(self) -> int:
        """Tokens of the longest test."""
        return max(*self.prompts, *self.gens)

    @property
    def n_ctx(self) -> int:
        """Cells of a context for all tests."""
        return self.n_parallel * (max(self.depths) + max(self.longest, WARM_UP + 1))


@dataclass
class Config:
    """A cache and flash attention setting with its context. depth: filled cells."""

    name: str
    context: Context
    flash_attn: str
    depth: int = 0


@dataclass
class Measurement:
    """Times of one test (n_prompt or n_gen tokens at a depth) of one configuration."""

    config: Config
    n_prompt: int
    n_gen: int
    n_depth: int
    n_parallel: int
    samples_ns: list[int] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        """One JSON object with llama-bench's names; speeds in tokens/s."""
        kind = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        kind += f" x{self.n_parallel}" if self.n_gen and self.n_parallel > 1 else ""
        speeds = [1e9 * (self.n_prompt + self.n_gen * self.n_parallel) / ns for ns in self.samples_ns]
        return {
            "test": f"{kind} @ d{self.n_depth}" if self.n_depth else kind,
            "cache": self.config.name,
            "flash_attn": FLASH_NUMBERS[self.config.flash_attn],
            **options.cache_members(self.config.context),
            **{key: value for key, value in vars(self).items() if key != "config"},
            "avg_ts": statistics.fmean(speeds),
            "median_ts": statistics.median(speeds),
            "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            "samples_ts": speeds,
        }


def open_config(
    model: Model, name: str, choice: CacheChoice, context: ContextOptions, tests: Tests, cleanup: contextlib.ExitStack
) -> Config:
    """A context for the tests, closed by `cleanup`. context: flash attention, threads, batches. Raises CacheError."""
    choice = choice.with_rollback(tests.longest)  # coded cells can be removed only while their exact rows are kept
    n_seq = tests.n_parallel + choice.window.shares_cells  # the last one is for fill()
    settings = replace(context, n_ctx=tests.n_ctx, n_seq_max=n_seq)
    return Config(name, options.open_context(model, choice, settings, name, cleanup), context.flash_attn)


def random_tokens(model: Model) -> Tokens:
    """Seeded."""
    import numpy as np  # not for a --help

    random = np.random.default_rng(1234)
    return lambda n: random.integers(0, model.n_vocab, n, "int32")


def prompt(context: Context, tokens: Tokens, pos: int, n: int) -> None:
    """Evaluate n tokens from position pos in batches, with logits of each batch's last token, as llama-bench does."""
    for start in range(0, n, context.n_batch):
        size = min(context.n_batch, n - start)
        context.decode(tokens(size), pos + start, size - 1)
    context.synchronize()


def generate(context: Context, tokens: Tokens, pos: int, n: int, n_parallel: int = 1) -> None:
    """Evaluate n tokens one by one from position pos, in each of n_parallel sequences at the same time."""
    for i in range(n):
        context.decode_each(tokens(n_parallel), pos + i)
        context.synchronize()


def fill(config: Config, tokens: Tokens, depth: int, n_parallel: int) -> None:
    """Extend sequences 0, 1, … to `depth` cells. Each batch is decoded in a spare sequence and then moved.

    If cells can be copied, only the first two batches are decoded. The copies leave out the first batch, which holds
    the sinks. The last cell is always decoded; before that, the keys of copies are rotated to their positions.
    Where sequences do not share cells, batches are decoded in the sequence itself.
    """
    context = config.context
    separate = not context.choice.window.shares_cells
    first = max(context.n_batch, context.stats.n_sink)
    while config.depth < depth:
        missing = depth - config.depth
        copies = min(config.depth - first, missing - 1)
        repeated = context.can_repeat and copies > 0 and copies >= min(context.n_batch, missing - 1)
        n = copies if repeated else min(context.n_batch, missing)
        for seq in range(n_parallel):
            if repeated:
                context.repeat(n, config.depth, seq, spare=n_parallel)
            else:
                context.decode(tokens(n), config.depth, n - 1, seq=seq if separate else n_parallel)
                if not separate:
                    context.move_sequence(n_parallel, seq)
            context.synchronize()
        config.depth += n


def measure(configs: list[Config], tokens: Tokens, tests: Tests, done: list[Measurement]) -> None:
    """Run all tests and append the measurements to `done`."""
    from subkv.native.binding import captured_log  # native libraries: not for a --help

    for config in configs:  # page in the weights, build the graphs
        prompt(config.context, tokens, 0, WARM_UP)
        generate(config.context, tokens, WARM_UP, 1)
        config.context.clear()
    kinds = [(n, 0) for n in tests.prompts if n] + [(0, n) for n in tests.gens if n]
    for depth in sorted(set(tests.depths)):
        rows = [[Measurement(config, *kind, depth, tests.n_parallel) for config in configs] for kind in kinds]
        done += itertools.chain(*rows)
        marked = range(tests.n_parallel if depth else 0)  # sequences
        with progress_bar(f"depth {depth}", tests.repetitions * len(rows) * len(configs), "run") as bar:
            for config in configs:
                bar.set_postfix_str(f"{config.name} fill")
                with captured_log(forward=False):  # llama.cpp logs every shift of copied cells
                    fill(config, tokens, depth, tests.n_parallel)
                for seq in marked:
                    config.context.mark(depth, seq)
            for repetition, row in itertools.product(range(tests.repetitions), rows):
                shift = repetition % len(row)  # another configuration starts each time
                for m in row[shift:] + row[:shift]:
                    bar.set_postfix_str(m.config.name)
                    context, start = m.config.context, time.perf_counter_ns()
                    prompt(context, tokens, depth, m.n_prompt)
                    generate(context, tokens, depth, m.n_gen, m.n_parallel)
                    m.samples_ns.append(time.perf_counter_ns() - start)
                    for seq in marked:
                        context.drop_tail(depth, seq)
                    if not depth:
                        context.clear()
                    bar.update(1)


def table(objects: list[dict[str, Any]]) -> str:
    """Results as a Markdown table."""
    lines = ["| cache | fa | KV B/token | test | t/s: median ± σ | runs |", "| --- |" + " ---: |" * 5]
    for o in objects:
        speed = f"{o['median_ts']:.2f} ± {o['stddev_ts']:.2f}"
        cells = (o["cache"], o["flash_attn"], o["kv_bytes_per_token"], o["test"], speed, len(o["samples_ns"]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@command()
@options.model_option(required=True)
@group(
    "tests",
    Tests,
    click.option("-p", "--n-prompt", "prompts", type=options.IntList(), default="512", help="prompt lengths, 0: none"),
    click.option("-n", "--n-gen", "gens", type=options.IntList(), default="128", help="tokens to generate, 0: none"),
    click.option("-d", "--n-depth", "depths", type=options.IntList(), default="0", help="cells filled before the test"),
    click.option(
        "-np",
        "--parallel",
        "n_parallel",
        type=click.IntRange(1, 64),
        default=1,
        help="sequences that generate at the same time, each at the depth; t/s is their sum",
    ),
    click.option("-r", "--repetitions", type=options.POSITIVE, default=5, help="runs of every test"),
)
@click.option(
    "-ctk",
    "--cache-type-k",
    "type_k",
    default="auto",
    callback=options.split_commas,
    metavar="T,T,…",
    help="caches: f16, q8_0, q8_0/q4_0 for K and V, subkv, subkv:FILE, …",
)
@click.option(
    "-fa",
    "--flash-attn",
    default="auto",
    callback=options.split_commas,
    metavar="on|off|auto,…",
    help="flash attention settings; caches that llama.cpp does not run with one are skipped there",
)
@options.coded_options
@options.context_options(options.threads_option, options.batch_options())
@options.gpu_option
@options.form_option("md", "json")
def main(
    model: str,
    tests: Tests,
    type_k: list[str],
    flash_attn: list[str],
    requested: CacheOptions,
    context: ContextOptions,
    n_gpu_layers: int,
    form: str,
) -> None:
    """Speed of prompts and of generation with different KV caches, interleaved in one run.

    After Ctrl-C, it prints the results so far. One cache alone: subkv run llama-bench.
    """
    if unknown := [item for item in flash_attn if item not in options.FLASH]:
        raise click.UsageError(f"-fa: expected on, off or auto, found {unknown[0]!r}")
    if not tests.longest:
        raise click.UsageError("-p, -n: expected a length above 0, found 0 for both")
    from subkv.engine.cache import parse_cache  # numpy and the native libraries: not for a --help
    from subkv.engine.model import Model

    configs, done, interrupted = [], list[Measurement](), False
    with contextlib.ExitStack() as cleanup:
        opened = cleanup.enter_context(Model(model, options.gpu_layers(n_gpu_layers)))
        for spec, fa in itertools.product(type_k, [options.FLASH[item] for item in flash_attn]):
            choice = parse_cache(spec, opened.path, requested)
            name = spec if choice.coded and (":" in spec or "+" in spec) else choice.name
            name = name if len(flash_attn) == 1 else f"{name} fa={fa}"
            try:
                configs.append(open_config(opened, name, choice, replace(context, flash_attn=fa), tests, cleanup))
            except CacheError as error:
                if error.key != "flash_attn" or len(flash_attn) == 1:
                    raise
                options.note(f"{spec} -fa {fa}: skipped, {error.reason}")
        if not configs:
            raise SubkvError("type_k", "expected a cache that runs with the given -fa, found none")
        try:
            measure(configs, random_tokens(opened), tests, done)
        except KeyboardInterrupt:
            interrupted = True
        objects = [m.result() for m in done if m.samples_ns]
    click.echo(json.dumps(objects, indent=2) if form == "json" else printable(table(objects), keep="\n"))
    if interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
