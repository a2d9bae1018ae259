"""Decode speed with 1 to all cores, a coded cache beside f16, on models with random weights. Downloads nothing.

    python -m research.cores -o cores.json                      # at most 6 minutes
    python -m research.cores --shapes llama-3.2-1b --threads 1,4 --depths 8000 -o cores.json

One core computes attention on f16 rows about as fast as it reads them; a few cores saturate the memory. Coded rows are
a quarter as long. So the ratio depends on the number of cores, and other programs' tables do not show it.

Each measurement is a run of runtime.bench, whose caches alternate. f16 is the faster of flash attention on and off.
Results are written after every run. Runs that do not fit in the time are listed as not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError

SHAPES = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
DEPTHS = (8000, 32000)
BATCH = 64  # two batches are evaluated and then repeated up to the depth; one core would need minutes for more
N_GEN = 16  # tokens of a run


def write_shape(name: str, folder: Path) -> tuple[Path, Path]:
    """A model of this shape and its bases. Raises SubkvError."""
    from research.shapes import SHAPES as SIZES
    from research.shapes import write_bases, write_model

    model, bases = folder / f"{name}.gguf", folder / f"{name}.bases.gguf"
    if not bases.exists():
        write_model(model, SIZES[name], "q4_0")
        write_bases(model, bases, SIZES[name])
    return model, bases


def bench(model: Path, bases: Path, n_threads: int, depths: tuple[int, ...], repetitions: int, limit: float) -> Any:
    """Objects of runtime.bench. Raises subprocess.TimeoutExpired after `limit` seconds, SubkvError if it fails."""
    words = [sys.executable, "-m", "runtime.bench", "-m", model, "--bases", bases, "-ctk", "f16,subkv", "-fa", "on,off"]
    words += ["-p", 0, "-n", N_GEN, "-d", ",".join(map(str, depths)), "-t", n_threads, "-b", BATCH, "-r", repetitions]
    done = subprocess.run([*map(str, words), "-o", "json"], capture_output=True, text=True, timeout=limit)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise SubkvError("runtime.bench", f"exit status {done.returncode}: {reason}")
    return json.loads(done.stdout)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Speeds of one shape, depth and number of threads, in tokens/s of the faster setting of flash attention."""
    speeds = {
        kind: max(o["median_ts"] for o in found if (o["type_k"] == "subkv") == (kind == "subkv"))
        for kind in ("f16", "subkv")
    }
    coded = next(o for o in found if o["type_k"] == "subkv")
    return {
        **speeds,
        "ratio": speeds["subkv"] / speeds["f16"],
        "kernel": coded["kernel"],
    }


def table(rows: list[dict[str, Any]], threads: list[int]) -> str:
    """Markdown: a row per shape and depth, and per number of threads the speeds (f16, subkv) and their ratio."""
    head = "| shape | cells | " + " | ".join(f"{n} threads" for n in threads) + " |"
    lines = [head, "|---|" + "---:|" * (1 + len(threads))]
    for shape, depth in dict.fromkeys((r["shape"], r["depth"]) for r in rows):
        found = {r["threads"]: r for r in rows if (r["shape"], r["depth"]) == (shape, depth)}
        cells = [
            f"{r['f16']:.1f} → {r['subkv']:.1f}: {r['ratio']:.2f}" if (r := found[n]).get("f16") else r["reason"]
            for n in threads
        ]
        lines.append(f"| {shape} | {depth} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@command()
@click.option("--shapes", default=",".join(SHAPES), type=options.ListOf(), metavar="S,S,…", help="of models")
@click.option("--threads", type=options.NUMBERS, help="numbers of threads [default: 1, 2, 4, … all processors]")
@click.option("--depths", type=options.NUMBERS, default=",".join(map(str, DEPTHS)), help="cells in the cache")
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=3, help="runs of every test")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=6.0, help="limit of all runs")
@click.option("--folder", type=options.PATH, help="for models, which are kept there [default: a temporary one]")
@click.option("-o", "--output", type=options.PATH, required=True, help="results (JSON), rewritten after every run")
def main(
    shapes: list[str],
    threads: list[int] | None,
    depths: list[int],
    repetitions: int,
    minutes: float,
    folder: Path | None,
    output: Path,
) -> None:
    """Measure decode speed with 1 to all cores, f16 beside a coded cache, in models with random weights."""
    from research.machine_speed import read_bandwidth
    from research.shapes import SHAPES as SIZES
    from subkv.base.files import atomic_file, check_writable

    if unknown := set(shapes) - set(SIZES):
        raise click.UsageError(f"--shapes: expected some of {', '.join(SIZES)}, found {', '.join(sorted(unknown))}")
    n_cores = os.cpu_count() or 1
    counts = sorted(set(threads or [n for n in (1, 2, 4, 8, 16, 32, 64) if n < n_cores] + [n_cores]))
    check_writable(output)
    end = time.monotonic() + 60 * minutes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        at = folder or Path(temporary)
        for shape in shapes:
            model, bases = write_shape(shape, at)
            for n_threads in reversed(counts):  # one thread takes longest
                at_depth = [{"shape": shape, "depth": depth, "threads": n_threads} for depth in depths]
                try:
                    found = bench(model, bases, n_threads, tuple(depths), repetitions, max(0.1, end - time.monotonic()))
                    bandwidth = read_bandwidth(n_threads)
                    for row in at_depth:
                        row |= summary([o for o in found if o["n_depth"] == row["depth"]])
                        row["read_bandwidth_gbs"] = bandwidth
                except subprocess.TimeoutExpired:
                    at_depth = [row | {"reason": "not measured: no time left"} for row in at_depth]
                rows += at_depth
                with atomic_file(output) as file:
                    file.write(json.dumps({"cores": n_cores, "rows": rows}, indent=1).encode())
                for row in at_depth:
                    click.echo(" ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    click.echo(table(rows, counts))


if __name__ == "__main__":
    main()
