"""Speed of prompt processing and generation at several depths with different KV caches, in llama-bench's columns.

    python -m runtime.bench -m M.gguf -p 512 -n 32 -d 0,4096 -ctk f16,q8_0,subkv -fa auto,off -t 2 -r 5

All caches run in one process and alternate within every repetition, so that a busy machine slows all of them equally.
Each context is filled to a depth once, and its tail is removed after each repetition.

To fill a context quickly, two batches are evaluated and their cells are copied until the depth is reached. (Cells
cannot be copied if sequences do not share cells, with sliding windows or recurrent layers; then all batches are
evaluated.) So the cells hold other numbers than those of a real text, but times do not depend on these numbers.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from runtime.options import IntList
from subkv.base.command import command, group
from subkv.base.errors import CacheError, SubkvError
from subkv.base.progress import progress_bar
from subkv.base.text import printable
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from subkv.engine.cache import CacheOptions
    from subkv.engine.context import Context, ContextOptions
    from subkv.engine.model import Model

FLASH_NUMBERS = {"auto": -1, "off": 0, "on": 1}
SEED = 1234
WARM_UP = 2  # tokens


@dataclasses.dataclass(frozen=True)
class Tests:
    """The tests. prompts, gens: lengths in tokens, 0: none. depths: in cells. parallel: sequences that generate."""

    prompts: list[int]
    gens: list[int]
    depths: list[int]
    parallel: int
    repetitions: int

    @property
    def longest(self) -> int:
        return max(*self.prompts, *self.gens)

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """(prompt, gen) of each test at a depth."""
        return [(n, 0) for n in self.prompts if n] + [(0, n) for n in self.gens if n]

    @property
    def n_runs(self) -> int:
        """Runs of each configuration."""
        return len({*self.depths}) * len(self.kinds) * self.repetitions


@dataclasses.dataclass(frozen=True)
class Caches:
    """Caches and flash attention settings to combine. specs: for parse_cache(); requested: options of coded caches."""

    specs: list[str]
    flash: list[str]
    requested: CacheOptions

    @classmethod
    def of(cls, type_k: list[str], type_v: list[str], flash_attn: list[str], **more: Any) -> Caches:
        for item in flash_attn:
            if item not in options.FLASH:
                raise click.UsageError(f"-fa: expected on, off or auto, found {item!r}")
        specs = [f"{k}/{v}" for k, v in itertools.product(type_k, type_v)] if type_v else type_k
        return cls(specs, [options.FLASH[item] for item in flash_attn], options.requested_cache(**more))


@dataclasses.dataclass
class Config:
    """A cache and flash attention setting with its context. depth: filled cells."""

    name: str
    context: Context
    flash_attn: str
    depth: int = 0


@dataclasses.dataclass
class Measurement:
    """Times of one test (n_prompt or n_gen tokens at a depth) of one configuration."""

    config: Config
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    n_parallel: int = 1  # sequences that generate at the same time
    samples_ns: list[int] = dataclasses.field(default_factory=list)

    @property
    def label(self) -> str:
        kind = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        kind += f" x{self.n_parallel}" if self.n_gen and self.n_parallel > 1 else ""
        return f"{kind} @ d{self.n_depth}" if self.n_depth else kind


class Tokens:
    """Random tokens, as in llama-bench."""

    def __init__(self, model: Model) -> None:
        import numpy as np

        self.model = model
        self.random = np.random.default_rng(SEED)

    def take(self, n: int) -> Any:
        return self.random.integers(0, self.model.n_vocab, size=n).astype("int32")


def prompt(context: Context, tokens: Tokens, pos: int, n: int) -> None:
    """Evaluate n tokens from position pos in batches, with logits of each batch's last token, as llama-bench does."""
    for start in range(0, n, context.n_batch):
        part = tokens.take(min(context.n_batch, n - start))
        if pos + start == 0 and tokens.model.add_bos:
            part[0] = tokens.model.bos
        context.decode(part, pos + start, len(part) - 1)
    context.synchronize()


def generate(context: Context, tokens: Tokens, pos: int, n: int, n_parallel: int = 1) -> None:
    """Evaluate n tokens one by one from position pos, in each of n_parallel sequences at the same time."""
    for i in range(n):
        context.decode_each(tokens.take(n_parallel), pos + i)
        context.synchronize()


def fill(config: Config, tokens: Tokens, depth: int, n_parallel: int, bar: Any) -> None:
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
                context.decode(tokens.take(n), config.depth, n - 1, seq=seq if separate else n_parallel)
                if not separate:
                    context.move_sequence(n_parallel, seq)
            context.synchronize()
            bar.update(n)
        config.depth += n


class Stopped(Exception):
    """The program got the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped inside the block. Only the main thread gets signals."""
    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []

    def stop(number: int, _: Any) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(configs: list[Config], tokens: Tokens, tests: Tests, done: list[Measurement]) -> None:
    """Run all tests and append the measurements to `done`; configurations alternate within every repetition."""
    for config in configs:  # warm up: page in the weights, build the graphs
        prompt(config.context, tokens, 0, WARM_UP)
        generate(config.context, tokens, WARM_UP, 1)
        config.context.clear()
    n_parallel = tests.parallel
    for depth in sorted(set(tests.depths)):
        missing = n_parallel * sum(depth - config.depth for config in configs)
        with progress_bar(f"fill to depth {depth}", missing, "tok") as bar:
            for config in configs:
                bar.set_postfix_str(config.name)
                fill(config, tokens, depth, n_parallel, bar)
                for seq in range(n_parallel if depth else 0):
                    config.context.mark(depth, seq)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        rows = [
            [Measurement(config, n_p, n_g, depth, now, n_parallel) for config in configs] for n_p, n_g in tests.kinds
        ]
        done += [m for row in rows for m in row]
        with progress_bar(f"depth {depth}", tests.repetitions * len(rows) * len(configs), "run") as bar:
            for repetition, row in itertools.product(range(tests.repetitions), rows):
                shift = repetition % len(row)  # another configuration starts each time
                for m in row[shift:] + row[:shift]:
                    bar.set_postfix_str(f"{m.config.name} {m.label}")
                    start = time.perf_counter_ns()
                    if m.n_prompt:
                        prompt(m.config.context, tokens, depth, m.n_prompt)
                    else:
                        generate(m.config.context, tokens, depth, m.n_gen, n_parallel)
                    m.samples_ns.append(time.perf_counter_ns() - start)
                    if depth:
                        for seq in range(n_parallel):
                            m.config.context.drop_tail(depth, seq)
                    else:
                        m.config.context.clear()
                    bar.update(1)


def read_bandwidth(n_threads: int, mib: int = 512, repetitions: int = 5) -> float:
    """Read bandwidth in GB/s: n_threads sum an array of float32, best of some passes."""
    import numpy as np

    data = np.ones(mib * 2**20 // 4, dtype=np.float32)
    parts = np.array_split(data, n_threads)
    best = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return data.nbytes / best / 1e9


def as_object(m: Measurement, model: Model, requested: ContextOptions, bandwidth: float) -> dict[str, Any]:
    """One llama-bench object with our fields. Speeds in tokens/s, times in ns, sizes in bytes, bandwidths in GB/s.

    kv_read_gbs: K/V bytes that generation reads per second, kv_bytes_per_token · (depth + n_gen/2) · median_ts. null
    for prompts, which read a row once for many tokens.
    """
    from subkv.native.binding import C  # numpy and the native libraries: not for a --help
    from subkv.native.library import llama_cpp_commit

    stats = m.config.context.stats
    n_tokens = m.n_prompt + m.n_gen * m.n_parallel
    samples_ts = [1e9 * n_tokens / ns for ns in m.samples_ns]
    median = statistics.median(samples_ts)
    cells = m.n_depth + m.n_gen / 2
    return {
        "build_commit": llama_cpp_commit(),
        "model_filename": str(model.path),
        "model_type": model.description(),
        "model_size": C.llama_model_size(model.handle),
        "model_n_params": C.llama_model_n_params(model.handle),
        "backends": "GPU" if model.n_gpu_layers and C.llama_supports_gpu_offload() else "CPU",
        "n_batch": requested.n_batch,
        "n_ubatch": requested.n_ubatch,
        "n_threads": requested.n_threads,
        "type_k": stats.type_k,
        "type_v": stats.type_v,
        "n_gpu_layers": model.n_gpu_layers,
        "flash_attn": FLASH_NUMBERS[m.config.flash_attn],
        "n_prompt": m.n_prompt,
        "n_gen": m.n_gen,
        "n_depth": m.n_depth,
        "n_parallel": m.n_parallel,
        "test": m.label,
        "test_time": m.test_time,
        "avg_ns": round(statistics.fmean(m.samples_ns)),
        "stddev_ns": round(_stdev(m.samples_ns)),
        "avg_ts": statistics.fmean(samples_ts),
        "stddev_ts": _stdev(samples_ts),
        "median_ts": median,
        "samples_ns": m.samples_ns,
        "samples_ts": samples_ts,
        "cache": m.config.name,
        "kernel": stats.kernel,
        "bpe": round(stats.bpe, 4),
        "kv_bytes_per_token": stats.bytes_per_token,
        "n_zero_rows": m.config.context.n_zero_rows,
        "kv_read_gbs": stats.bytes_per_token * cells * median / 1e9 if m.n_gen else None,
        "read_bandwidth_gbs": bandwidth,
    }


def _stdev(x: list[Any]) -> float:
    return statistics.stdev(x) if len(x) > 1 else 0.0


def as_markdown(objects: list[dict[str, Any]]) -> str:
    """llama-bench's table; t/s is the median of the interleaved repetitions."""
    head = ["model", "size", "params", "backend", "threads", "type_k", "type_v", "fa", "KV B/token", "test", "t/s"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * 2 + " --- |" + " ---: |" * 7]
    for o in map(_printable, objects):
        size, params = o["model_size"], o["model_n_params"]
        cells = [
            o["model_type"],
            f"{size / 2**20:.2f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB",
            f"{params / 1e6:.2f} M" if params < 1e9 else f"{params / 1e9:.2f} B",
            o["backends"],
            str(o["n_threads"]),
            o["cache"] if o["type_k"] == o["type_v"] == "subkv" else o["type_k"],
            o["type_v"],
            str(o["flash_attn"]),
            str(o["kv_bytes_per_token"]),
            o["test"],
            f"{o['median_ts']:.2f} ± {o['stddev_ts']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    first, counts = objects[0], [len(o["samples_ns"]) for o in objects]
    times = str(max(counts)) if len({*counts}) == 1 else f"{min(counts)} to {max(counts)}"
    lines += ["", f"t/s: median ± standard deviation of {times} interleaved repetitions; "
                  f"read bandwidth {first['read_bandwidth_gbs']:.1f} GB/s; build: {first['build_commit']}"]  # fmt: skip
    return "\n".join(lines)


def _printable(result: dict[str, Any]) -> dict[str, Any]:
    """A result whose texts, for example of the model's file, can be printed."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in result.items()}


def as_csv(objects: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    names = [name for name in objects[0] if not name.startswith("samples")]
    writer = csv.DictWriter(out, names, quoting=csv.QUOTE_NONNUMERIC, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_printable, objects))
    return out.getvalue().rstrip("\n")


test_options = group(
    "tests",
    Tests,
    click.option("-p", "--n-prompt", "prompts", type=IntList(), default="512", help="prompt lengths, 0: none"),
    click.option("-n", "--n-gen", "gens", type=IntList(), default="128", help="tokens to generate, 0: none"),
    click.option("-d", "--n-depth", "depths", type=IntList(), default="0", help="cells filled before the test"),
    click.option(
        "-np",
        "--parallel",
        type=click.IntRange(1, 64),
        default=1,
        help="sequences that generate at the same time, each at the depth; t/s is their sum",
    ),
    click.option("-r", "--repetitions", type=click.IntRange(min=1), default=5, help="runs of every test"),
)
cache_options = group(
    "caches",
    Caches.of,
    click.option(
        "-ctk",
        "--cache-type-k",
        "type_k",
        default="auto",
        callback=options.split_commas,
        metavar="T,T,…",
        help="caches: f16, q8_0, q4_0, subkv, subkv:FILE, …; each sets K and V",
    ),
    click.option(
        "-ctv",
        "--cache-type-v",
        "type_v",
        callback=options.split_commas,
        metavar="T,T,…",
        help="V caches combined with every -ctk",
    ),
    click.option("--bases", type=options.PATH, metavar="FILE", help="bases of 'subkv': a sidecar or a converted model"),
    click.option(
        "-fa",
        "--flash-attn",
        "flash_attn",
        default="auto",
        callback=options.split_commas,
        metavar="on|off|auto,…",
        help="flash attention settings",
    ),
    options.window_options,
)


@command()
@options.model_option(required=True)
@test_options
@cache_options
@options.context_options(options.threads_option, options.batch_options())
@options.gpu_option
@options.form_option("md", "csv", "json")
def main(model: str, tests: Tests, caches: Caches, context: ContextOptions, n_gpu_layers: int, form: str) -> None:
    """Measure prompt processing and generation speed, cache types interleaved in one run.

    After Ctrl-C or SIGTERM, it prints the results so far.
    """
    if not any(tests.prompts) and not any(tests.gens):
        raise click.UsageError("-p, -n: expected a length above 0, found 0 for both")
    from subkv.engine.model import Model  # numpy and the native libraries: not for a --help

    n_threads = default_threads(context.n_threads)
    n_ctx = tests.parallel * (max(tests.depths) + max(tests.longest, WARM_UP + 1))
    context = dataclasses.replace(context, n_ctx=n_ctx, n_threads=n_threads)
    with contextlib.ExitStack() as cleanup:
        opened = cleanup.enter_context(Model(model, options.gpu_layers(n_gpu_layers)))
        configs = open_configs(opened, tests, caches, context, cleanup)
        bandwidth = read_bandwidth(n_threads)
        done: list[Measurement] = []
        stopped: Stopped | None = None
        try:
            with stoppable():
                measure(configs, Tokens(opened), tests, done)
        except Stopped as stop:
            stopped = stop
        objects = [as_object(m, opened, context, bandwidth) for m in done if m.samples_ns]
    if form == "json":
        click.echo(json.dumps(objects, indent=2))
    elif objects:
        click.echo(as_csv(objects) if form == "csv" else as_markdown(objects))
    if stopped:
        n, expected = sum(len(m.samples_ns) for m in done), tests.n_runs * len(configs)
        options.note(f"stopped by {stopped} after {n} of {expected} runs")
        raise click.exceptions.Exit(128 + stopped.number)


def open_configs(
    model: Model, tests: Tests, caches: Caches, context: ContextOptions, cleanup: contextlib.ExitStack
) -> list[Config]:
    """A context for every cache and flash attention setting; invalid pairs (quantized V, off) are skipped."""
    from subkv.engine.cache import parse_cache  # numpy and the native libraries: not for a --help

    configs = []
    for spec, fa in itertools.product(caches.specs, caches.flash):
        # coded cells can be removed only while their exact rows are kept
        choice = parse_cache(spec, model.path, caches.requested).with_rollback(tests.longest)
        n_seq = tests.parallel + choice.window.shares_cells  # the last one is for fill()
        try:
            opened = model.context(choice, dataclasses.replace(context, flash_attn=fa, n_seq_max=n_seq))
        except CacheError as error:
            if error.key == "flash_attn" and len(caches.flash) > 1:
                options.note(f"{spec} -fa {fa}: skipped, {error.reason}")
                continue
            raise
        cleanup.callback(opened.close)
        name = spec if choice.coded and (":" in spec or "+" in spec) else choice.name
        options.note_cache(opened.stats, choice, f"{spec} -fa {fa}")
        configs.append(Config(name if len(caches.flash) == 1 else f"{name} fa={fa}", opened, fa))
    if not configs:
        raise SubkvError("type_k", "expected a cache that runs with the given -fa, found none")
    return configs


if __name__ == "__main__":
    main()
