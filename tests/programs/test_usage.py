"""llama-server's reports of its cache: `kv_cache` in /props, subkv's lines in /metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_ins
import tiny
from click.testing import CliRunner
from gguf import GGUFReader
from servers import Server, wait_until

from runtime.inspect import main as inspect
from subkv.engine.llama import Llama
from subkv.engine.stats import cache_line
from subkv.native.binding import native

Serve = Callable[..., Any]
MIB = 1 << 20
N_CELLS = 1024
ELEMENTS = 2 * 2 * 2 * 32  # of a token of the tiny llama: layers, keys and values, heads, size of a head


def usage(server: Server) -> dict[str, Any]:
    reported: dict[str, Any] = server.request("GET", "/props")["kv_cache"]
    assert set(reported) == {
        *("type", "bits", "bytes", "bytes_f16", "times_smaller", "n_cells", "n_zero_rows", "kernel"),
        *("layers", "sliding_window"),
    }
    return reported


def metrics(server: Server) -> dict[str, float]:
    """subkv's metrics. HELP and TYPE lines precede each; totals are counters."""
    lines = [line for line in server.request("GET", "/metrics").splitlines() if "subkv:" in line]
    values = {}
    for about, kind, line in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, value = line.split()
        assert about.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
        values[name.removeprefix("subkv:")] = float(value)
    return values


def test_a_coded_cache(serve: Serve, model: Path) -> None:
    """Equals the library's line in the log and the sizes of Llama, including the exact window and the bases."""
    with serve("-c", N_CELLS, "-np", 1, "--metrics") as server:
        logged = re.search(r"coded K/V cache, ([\d.]+) bits per element, ([\d.]+) MiB", server.log)
        assert logged
        reported = usage(server)
        assert (reported["type"], reported["kernel"], reported["n_cells"]) == (
            "subkv",
            native().subkv_kernel_name().decode(),
            N_CELLS,
        )
        assert reported["bytes_f16"] == 2 * ELEMENTS * N_CELLS
        assert reported["bits"] == pytest.approx(float(logged[1]), abs=0.01)
        with Llama(model, kv_cache="subkv", n_ctx=N_CELLS, verbose=False) as llm:
            stats = llm.kv_stats()
        assert reported["bytes"] == stats.bytes_all == stats.bytes_kv + stats.bytes_bases > stats.bytes_kv
        assert reported["bits"] == pytest.approx(8 * stats.bytes_kv / ELEMENTS / N_CELLS)
        assert (reported["layers"], reported["sliding_window"]) == ({"coded": 2, "sliding": 0, "other": 0}, None)
        assert reported["bytes"] / MIB == pytest.approx(float(logged[2]), abs=0.06)
        assert metrics(server) == {
            "kv_bytes": reported["bytes"],
            "kv_f16_bytes": reported["bytes_f16"],
            "kv_bits_per_element": pytest.approx(reported["bits"]),
            "kv_zero_rows_total": 0,
        }


def test_rows_that_are_not_finite(serve: Serve, model: Path, tmp_path: Path) -> None:
    """A token with a NaN embedding is logged once, with layer and position, and counted."""
    path = tmp_path / "nan.gguf"
    path.write_bytes(model.read_bytes())
    table = next(tensor for tensor in GGUFReader(path, "r+").tensors if tensor.name == "token_embd.weight")
    table.data[300] = np.nan
    table.data.flush()
    with serve("-c", N_CELLS, "-np", 1, "--metrics", model=path) as server:
        server.complete([5, 6, 7], 0)
        assert usage(server)["n_zero_rows"] == metrics(server)["kv_zero_rows_total"] == 0
        for n in (1, 2):
            server.complete([5, 300, *[8] * n], 0)
            wait_until("a count", lambda: usage(server)["n_zero_rows"] > 0)
        assert usage(server)["n_zero_rows"] == metrics(server)["kv_zero_rows_total"]
        line = r"layer (\d+): the (key|value) of position (\d+) is not finite"
        wait_until("the line in the log, which another thread writes", lambda: re.search(line, server.log) is not None)
        found = re.findall(line, server.log)
        assert len(found) == 1 and (found[0][0], found[0][2]) == ("0", "1")


@pytest.mark.parametrize(
    ("arguments", "type_", "bits"),
    [
        ([], "f16", 16.0),
        (["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"], "q8_0", 8.5),
        (["-ctk", "q8_0", "-ctv", "q4_0", "-fa", "on"], "q8_0/q4_0", 6.5),
    ],
)
@pytest.mark.parametrize("slots", [1, 2])
def test_ordinary_caches(serve: Serve, arguments: list[str], type_: str, bits: float, slots: int) -> None:
    with serve("-c", N_CELLS, "-np", slots, "--no-kv-unified", "--metrics", *arguments, coded=False) as server:
        n_bytes = bits * ELEMENTS * N_CELLS / 8
        assert usage(server) == {
            "type": type_,
            "bits": bits,
            "bytes": n_bytes,
            "bytes_f16": 2 * ELEMENTS * N_CELLS,
            "times_smaller": {"f16": 16 / bits, "q8_0": 8.5 / bits},
            "n_cells": N_CELLS,
            "n_zero_rows": 0,
            "kernel": None,
            "layers": {"coded": 0, "sliding": 0, "other": 2},
            "sliding_window": None,
        }
        assert metrics(server) == {
            "kv_bytes": n_bytes,
            "kv_f16_bytes": 2 * ELEMENTS * N_CELLS,
            "kv_bits_per_element": bits,
            "kv_zero_rows_total": 0,
        }


@pytest.mark.parametrize("arch", ["gemma2", "lfm2"])
def test_two_kinds_of_layers(serve: Serve, arch: str, tmp_path: Path) -> None:
    """Both halves of a cache with sliding windows are counted, recurrent state is not."""
    model = stand_ins.with_words(tmp_path / "words.gguf", tiny.build(tmp_path / "tiny.gguf", arch))
    with serve("-c", N_CELLS, "-np", 1, "-lv", 4, model=model, coded=False) as server:
        sizes = re.findall(r"K \(f16\): +([\d.]+) MiB, V \(f16\): +([\d.]+) MiB", server.log)
        reported = usage(server)
        assert (reported["type"], reported["bits"], reported["n_cells"]) == ("f16", 16, N_CELLS)
        assert reported["bytes"] == reported["bytes_f16"]
        layers = {"coded": 0, "sliding": 2, "other": 2} if arch == "gemma2" else {"coded": 0, "sliding": 0, "other": 2}
        assert reported["layers"] == layers
        assert reported["sliding_window"] == (16 if arch == "gemma2" else None)
        assert reported["bytes"] / MIB == pytest.approx(
            sum(float(k) + float(v) for k, v in sizes), abs=0.012 * len(sizes)
        )


def test_one_size_of_a_model_with_sliding_windows(serve: Serve, tmp_path: Path) -> None:
    """The log, /props, Llama and inspect."""
    plain = tiny.build(tmp_path / "tiny.gguf", "gemma2", head_size=64)
    model = stand_ins.with_words(tmp_path / "words.gguf", plain)
    n_ctx = 8 * N_CELLS
    with Llama(model, kv_cache="subkv", n_ctx=n_ctx, verbose=False) as llm:
        stats = llm.kv_stats()
        line = cache_line(stats)
    assert (stats.n_layer_coded, stats.n_layer_sliding, stats.n_layer_other, stats.n_swa) == (2, 2, 0, 16)
    with serve("-c", n_ctx, "-np", 1, model=model) as server:
        logged = re.search(r"coded K/V cache, .* of coded layers, ([\d.]+) MiB \(f16: ([\d.]+)\)", server.log)
        reported, log = usage(server), server.log
    assert logged
    assert reported["bytes"] == stats.bytes_all and reported["bytes_f16"] == stats.bytes_f16
    assert (reported["layers"], reported["sliding_window"]) == ({"coded": 2, "sliding": 2, "other": 0}, 16)
    assert float(logged[1]) == pytest.approx(stats.bytes_all / MIB, abs=0.06)
    assert float(logged[2]) == pytest.approx(stats.bytes_f16 / MIB, abs=0.06)
    inspected = CliRunner().invoke(inspect, [str(model), "-c", str(n_ctx)]).stdout
    found = re.search(r"takes ([\d.]+) MiB instead of ([\d.]+) MiB in f16", inspected)
    assert found
    assert float(found[1]) == pytest.approx(stats.bytes_all / MIB, abs=0.06)
    assert float(found[2]) == pytest.approx(stats.bytes_f16 / MIB, abs=0.06)
    for text in (line, log, inspected):
        assert "2 of 4 layers grow with the context, 2 slide over 16 tokens" in text


@pytest.mark.parametrize("arch", ["mamba", "bert"])
def test_no_cache(serve: Serve, arch: str, tmp_path: Path) -> None:
    model = stand_ins.with_words(tmp_path / "words.gguf", tiny.build(tmp_path / "tiny.gguf", arch))
    embeds = ["--embedding"] if arch == "bert" else []
    with serve("-c", N_CELLS, "-np", 1, "--metrics", *embeds, model=model) as server:
        nothing = dict.fromkeys(("bits", "bytes", "bytes_f16", "n_cells", "n_zero_rows"), 0)
        assert usage(server) == {
            "type": "none",
            **nothing,
            "times_smaller": {"f16": None, "q8_0": None},
            "kernel": None,
            "layers": {"coded": 0, "sliding": 0, "other": 0},
            "sliding_window": None,
        }
        assert set(metrics(server).values()) == {0}


def test_a_server_that_sleeps(serve: Serve, text: str) -> None:
    """Its cache is freed: 0 bytes; the type is still reported."""
    with serve("-c", N_CELLS, "-np", 1, "--metrics", "--sleep-idle-seconds", 1) as server:
        before, reported = metrics(server), usage(server)
        server.wait("sleep", "/props", lambda props: props["is_sleeping"])
        assert usage(server) == reported
        assert metrics(server) == before | {"kv_bytes": 0, "kv_f16_bytes": 0}
        server.complete(text[:300])
        assert metrics(server) == before


def test_stored_prompts(serve: Serve, text: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = ["-c", N_CELLS, "-np", 1, "--metrics"]

    def counted(server: Server) -> dict[str, int]:
        values = metrics(server)
        return {name.removeprefix("store_"): int(value) for name, value in values.items() if name.startswith("store_")}

    none = dict.fromkeys(
        (
            "hits_total",
            "tokens_restored_total",
            "prompts_written_total",
            "prompts_dropped_total",
            "prompts_damaged_total",
            "failures_total",
            "entries",
            "bytes",
        ),
        0,
    )
    with serve(*options, SUBKV_STORE=store) as server:
        assert counted(server) == none
        answer = server.complete(text[:300])
        wait_until("a stored prompt", lambda: counted(server)["prompts_written_total"] == 1)
        server.complete(text[:300])
        assert server.complete(text[:300])["tokens"] == answer["tokens"]
        n_bytes = sum(path.stat().st_size for path in store.iterdir())
        assert counted(server) == none | {"prompts_written_total": 1, "entries": 1, "bytes": n_bytes}
    with serve(*options, SUBKV_STORE=store) as server:
        n_cached = server.complete(text[:300])["timings"]["cache_n"]
        reported = counted(server)
        assert reported["hits_total"] == reported["entries"] == 1
        assert 0 < n_cached <= reported["tokens_restored_total"] + 1
        assert reported["prompts_damaged_total"] == reported["failures_total"] == 0
    for path in store.glob("*.piece"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    with serve(*options, SUBKV_STORE=store) as server:
        assert server.complete(text[:300])["timings"]["cache_n"] == 0
        # counters keep their last values while the store works
        wait_until("the damaged prompt", lambda: counted(server)["prompts_damaged_total"] == 1)
