"""The machine's read bandwidth, the limit of decoding at depth, and how much of a core a thread gets.

python -m research.machine_speed -t 2
    {"read_bandwidth_gbs": 31.2, "clock_ghz": 3.6, "additions_per_cycle": 3.9}
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import click
import numpy as np

from runtime import options
from subkv.base.command import command
from subkv.base.threads import default_threads
from subkv.native.core_speed import core_speed


def read_bandwidth(n_threads: int, mib: int = 512, repetitions: int = 5) -> float:
    """Read bandwidth in GB/s: n_threads sum an array of float32, best of some passes."""
    data = np.ones(mib * 2**20 // 4, dtype=np.float32)
    parts = np.array_split(data, n_threads)
    best = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - start)
    return data.nbytes / best / 1e9


@command()
@options.threads_option
def main(n_threads: int | None) -> None:
    """Print the read bandwidth in GB/s and the speed of a core as JSON."""
    core = core_speed()
    click.echo(json.dumps({"read_bandwidth_gbs": read_bandwidth(default_threads(n_threads)), **core._asdict()}))


if __name__ == "__main__":
    main()
