"""Errors of attention over a coefficient cache while a text is read, against their bounds.

    python -m research.experiments.tracker -m M.gguf --bases FILE -f TEXT [-c N] [--every N] [--adapt …]
        -o FILE.jsonl [--plot FILE]

At every N-th position, for every layer with bases and every KV head: what the position's queries get from the cells as
the engine holds them, and from the exact keys and values that it computed and does not keep. What earlier layers and
tokens lost is in both. The exact window counts as exact.

Memory: all keys and values are kept beside the cache in single precision, twice the size of an f16 cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command, group
from subkv.base.errors import SubkvError
from subkv.base.threads import default_threads
from subkv.format.window import Window

# what runs is imported by the command: numpy and the native libraries are not for a --help
if TYPE_CHECKING:
    from subkv.engine.request import CacheRequest

FILE = click.Path(path_type=Path)


def _cache(bases: Path | None, **window: Any) -> CacheRequest:
    from subkv.engine.cache import CODED
    from subkv.engine.request import CacheRequest

    return CacheRequest(CODED, bases=bases, window=Window.of(**window))


@dataclass(frozen=True)
class Reading:
    """The text, how many tokens of it (0: as many as the model was trained with), and how often is measured."""

    files: Path
    n_ctx: int
    every: int


@command(name="errors")
@options.model_option(required=True)
@group(
    "cache",
    _cache,
    click.option(
        "--bases", type=FILE, default=None, metavar="FILE", help="bases for -m: a sidecar or a converted model"
    ),
    options.window_options,
)
@group(
    "reading",
    Reading,
    click.option("-f", "--file", "files", required=True, type=FILE, help="UTF-8 text to read"),
    options.context_option(2048, "tokens to read"),
    click.option("--every", type=click.IntRange(min=1), default=256, help="tokens between two measurements"),
)
@options.threads_option
@click.option("-o", "--output", "output", required=True, type=FILE, help="JSON lines to write")
@click.option("--plot", type=FILE, help="draw errors and bounds by layer (extra plot)")
def main(
    model: str, cache: CacheRequest, reading: Reading, n_threads: int | None, output: Path, plot: Path | None
) -> None:
    """Measure the errors of attention over a coefficient cache against their bounds, as a text is read."""
    from converter.corpus import read_text
    from converter.plots import figure as plots
    from research.experiments import live
    from subkv.base.files import atomic_file, check_writable
    from subkv.engine.cache import choose_cache
    from subkv.engine.model import Model

    check_writable(output)
    if plot is not None:
        plots.check(plot)
    text = read_text(reading.files)
    with Model(model) as loaded:
        n = reading.n_ctx or loaded.n_ctx_train
        tokens = loaded.tokenize(text.data)[:n]
        if len(tokens) < n:
            raise SubkvError("files", f"expected at least {n} tokens, found {len(tokens)} in {reading.files.name}")
        lines = live.measure(
            loaded, choose_cache(loaded.path, cache), tokens, reading.every, default_threads(n_threads)
        )
    with atomic_file(output) as handle:
        handle.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())
    click.echo(live.summary(lines))
    if plot is not None:
        plots.write_figure(live.figure(lines), plot)
        options.note(f"wrote {plot}")


if __name__ == "__main__":
    main()
