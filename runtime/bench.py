"""Speed with different KV caches. They alternate within every repetition, so a busy machine slows all of them equally.

    python -m runtime.bench -m M.gguf -p 512 -n 32 -d 0,4096 -ctk f16,q8_0,subkv -fa auto,off -t 2 -r 5

`subkv run llama-bench` measures one cache after the other. Here each context is filled to a depth once, and its tail is
removed after each repetition. To fill it quickly, two batches are evaluated and their cells are copied (but not with
adaptive bases, sliding windows or recurrent layers). Times do not depend on the numbers in the cells.
"""

from __future__ import annotations

import contextlib
import itertools
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

if TYPE_CHECKING:
    from subkv.engine.cache import CacheChoice
    from subkv.engine.context import Context, ContextOptions
    from subkv.engine.model import Model
    from subkv.native.core_speed import CoreSpeed

Tokens = Callable[[int], Any]  # n random tokens, as in llama-bench
WARM_UP = 2  # tokens
TITLES = "cache | fa | KV B/token | test | t/s: median ± σ | runs"
CELLS = "{cache} | {flash_attn} | {kv_bytes_per_token} | {test} | {median_ts:.2f} ± {stddev_ts:.2f} | {n_runs}"


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
        return max(*self.prompts, *self.gens)


@dataclass
class Measurement:
    """Times of one test (n_prompt or n_gen tokens at a depth) of one cache. core: measured before this depth."""

    cache: str
    context: Context
    core: CoreSpeed
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
            **{name: value for name, value in vars(self).items() if name not in ("context", "core")},
            **options.cache_members(self.context),
            **self.core._asdict(),
            "n_runs": len(speeds),
            "avg_ts": statistics.fmean(speeds),
            "median_ts": statistics.median(speeds),
            "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            "samples_ts": speeds,
        }


def open_context(
    model: Model, name: str, choice: CacheChoice, context: ContextOptions, tests: Tests, cleanup: contextlib.ExitStack
) -> Context:
    """A context for the tests, closed by `cleanup`. context: flash attention, threads, batches. Raises CacheError."""
    choice = choice.with_rollback(tests.longest)  # coded cells can be removed only while their exact rows are kept
    n_ctx = tests.n_parallel * (max(tests.depths) + max(tests.longest, WARM_UP + 1))
    n_seq = tests.n_parallel + (not choice.window.adapts)  # a spare one for copies
    return options.open_context(model, choice, replace(context, n_ctx=n_ctx, n_seq_max=n_seq), name, cleanup)


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


def fill(context: Context, tokens: Tokens, depth: int, n_parallel: int) -> None:
    """Extend sequences 0, 1, … to `depth` cells.

    If cells can be copied, only the first two batches are decoded. The copies leave out the first batch, which holds
    the sinks. The last cell is always decoded; before that, the keys of copies are rotated to their positions.
    """
    first = max(context.n_batch, context.stats.n_sink)
    while (start := context.length()) < depth:
        n = min(context.n_batch, depth - start)
        copies = min(start - first, depth - start - 1)
        for seq in range(n_parallel):
            if context.can_repeat and copies > 0 and copies >= min(context.n_batch, depth - start - 1):
                context.repeat(copies, start, seq, spare=n_parallel)
            else:
                context.decode(tokens(n), start, n - 1, seq)
            context.synchronize()


def measure(contexts: list[tuple[str, Context]], tokens: Tokens, tests: Tests, done: list[Measurement]) -> None:
    """Run all tests and append the measurements to `done`."""
    from subkv.native.binding import captured_log  # native libraries: not for a --help
    from subkv.native.core_speed import core_speed

    for _, context in contexts:  # page in the weights, build the graphs
        prompt(context, tokens, 0, WARM_UP)
        generate(context, tokens, WARM_UP, 1)
        context.clear()
    kinds = [(n, 0) for n in tests.prompts if n] + [(0, n) for n in tests.gens if n]
    for depth in sorted(set(tests.depths)):
        core = core_speed()
        rows = [[Measurement(*named, core, *kind, depth, tests.n_parallel) for named in contexts] for kind in kinds]
        done += itertools.chain(*rows)
        with progress_bar(f"depth {depth}", tests.repetitions * len(rows) * len(contexts), "run") as bar:
            for name, context in contexts:
                bar.set_postfix_str(f"{name} fill")
                with captured_log(forward=False):  # llama.cpp logs every shift of copied cells
                    fill(context, tokens, depth, tests.n_parallel)
                for seq in range(tests.n_parallel):
                    context.mark(depth, seq)
            for repetition, row in itertools.product(range(tests.repetitions), rows):
                shift = repetition % len(row)  # another cache starts each time
                for m in row[shift:] + row[:shift]:
                    bar.set_postfix_str(m.cache)
                    start = time.perf_counter_ns()
                    prompt(m.context, tokens, depth, m.n_prompt)
                    generate(m.context, tokens, depth, m.n_gen, m.n_parallel)
                    m.samples_ns.append(time.perf_counter_ns() - start)
                    for seq in range(tests.n_parallel):
                        m.context.drop_tail(depth, seq)
                    bar.update(1)


@command()
@group(
    "tests",
    Tests,
    click.option("-p", "--n-prompt", "prompts", type=options.NUMBERS, default="512", help="prompt lengths, 0: none"),
    click.option("-n", "--n-gen", "gens", type=options.NUMBERS, default="128", help="tokens to generate, 0: none"),
    click.option("-d", "--n-depth", "depths", type=options.NUMBERS, default="0", help="cells filled before the test"),
    click.option(
        "-np", "--parallel", "n_parallel", type=click.IntRange(1, 64), default=1, help="sequences that generate at once"
    ),
    click.option("-r", "--repetitions", type=options.POSITIVE, default=5, help="runs of every test"),
)
@click.option(
    "-fa",
    "--flash-attn",
    type=options.FLASH_LIST,
    metavar="on|off|auto,…",
    default="auto",
    help="flash attention settings",
)
@options.comparison("-ctk --cache-type-k", "auto")
@options.context_options(options.threads_option, options.batch_options())
def main(tests: Tests, flash_attn: list[str], compared: options.Comparison, context: ContextOptions) -> None:
    """Speed of prompts and of generation with different KV caches, interleaved in one run.

    After Ctrl-C, it prints the results so far. One cache alone: subkv run llama-bench.
    """
    if not tests.longest:
        raise click.UsageError("-p, -n: expected a length above 0, found 0 for both")
    contexts: list[tuple[str, Context]] = []
    done: list[Measurement] = []
    with compared.open() as (model, choices, cleanup):
        for (spec, choice), fa in itertools.product(zip(compared.names, choices, strict=True), flash_attn):
            name = spec if choice.coded and (":" in spec or "+" in spec) else choice.name
            name = name if len(flash_attn) == 1 else f"{name} fa={fa}"
            settings = replace(context, flash_attn=fa)
            try:
                contexts.append((name, open_context(model, name, choice, settings, tests, cleanup)))
            except CacheError as error:
                if error.key != "flash_attn" or len(flash_attn) == 1:
                    raise
                options.note(f"{spec} -fa {fa}: skipped, {error.reason}")
        if not contexts:
            raise SubkvError("type_k", "expected a cache that runs with the given -fa, found none")

        def show() -> None:
            measured = [m for m in done if m.samples_ns]
            for depth, core in {m.n_depth: m.core for m in measured}.items():
                options.note(
                    f"depth {depth}: {core.clock_ghz:.2f} GHz, {core.additions_per_cycle:.1f} additions per cycle"
                )
            compared.show([m.result() for m in measured], TITLES, CELLS)

        try:
            measure(contexts, random_tokens(model), tests, done)
        except KeyboardInterrupt:
            show()
            raise
        show()


if __name__ == "__main__":
    main()
