"""runtime.bench: llama-bench's fields and ours, interleaving, output formats, refusals."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each
from llama_source import read_version
from tqdm import tqdm

from runtime import bench
from subkv.base.errors import CacheError
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.native.binding import C

Models = Callable[..., Path]
LLAMA_BENCH = {
    "build_commit", "model_filename", "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads",
    "type_k", "type_v", "n_gpu_layers", "flash_attn", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns",
    "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts",
}  # fmt: skip
PINNED = read_version(Path(__file__).resolve().parents[2] / "runtime" / "llama.cpp")
OURS = {"kv_bytes_per_token", "kv_read_gbs", "read_bandwidth_gbs", "bpe", "median_ts"}


@pytest.fixture(autouse=True)
def small_bandwidth_array(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = bench.read_bandwidth
    monkeypatch.setattr(bench, "read_bandwidth", lambda n_threads: measure(n_threads, mib=8, repetitions=1))


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(bench.main, [str(a) for a in arguments])


def test_json(tiny_model: Models, coded_model: Models) -> None:
    depths = [0, 100]
    result = run(
        "-m", coded_model(), "-p", "8", "-n", "2,3", "-d", "0,100", "-ctk", "f16,subkv", "-r", 3, "-t", 2, "-o", "json"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    objects = json.loads(result.stdout)
    assert len(objects) == len(depths) * 3 * 2
    tests = {(o["n_prompt"], o["n_gen"], o["n_depth"], o["type_k"]) for o in objects}
    assert len(tests) == len(objects)
    for o in objects:
        assert o.keys() >= LLAMA_BENCH | OURS
        assert o["build_commit"] == PINNED["commit"]
        assert len(o["samples_ns"]) == len(o["samples_ts"]) == 3
        n = o["n_prompt"] + o["n_gen"]
        assert o["samples_ts"] == pytest.approx([1e9 * n / ns for ns in o["samples_ns"]])
        assert o["avg_ts"] == pytest.approx(statistics.fmean(o["samples_ts"]))
        assert o["median_ts"] == pytest.approx(statistics.median(o["samples_ts"]))
        assert o["read_bandwidth_gbs"] > 0
        if o["n_gen"]:
            cells = o["n_depth"] + o["n_gen"] / 2
            assert o["kv_read_gbs"] == pytest.approx(o["kv_bytes_per_token"] * cells * o["median_ts"] / 1e9)
        else:
            assert o["kv_read_gbs"] is None
    coded = {o["kv_bytes_per_token"] for o in objects if o["type_k"] == "subkv"}
    stock = {o["kv_bytes_per_token"] for o in objects if o["type_k"] == "f16"}
    assert len(coded) == len(stock) == 1
    assert max(coded) < max(stock)


def test_parallel_sequences(tiny_model: Models, coded_model: Models) -> None:
    result = run(
        "-m", coded_model(), "-p", 4, "-n", 3, "-d", "0,90", "-ctk", "f16,subkv", "-np", 3, "-r", 2, "-o", "json"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    objects = json.loads(result.stdout)
    assert {o["test"] for o in objects} == {"pp4", "tg3 x3", "pp4 @ d90", "tg3 x3 @ d90"}
    for o in objects:
        n = o["n_prompt"] + 3 * o["n_gen"]
        assert o["samples_ts"] == pytest.approx([1e9 * n / ns for ns in o["samples_ns"]])


@pytest.mark.parametrize("arch", ["lfm2", "qwen35", "mamba"])
def test_recurrent_state_is_restored(tiny_model: Models, arch: str) -> None:
    """After a repetition a context is as before it, and every repetition of a hybrid begins at its depth."""
    path, caches = tiny_model(arch), "f16" if arch == "mamba" else "f16,subkv"  # bases of the weights alone
    result = run("-m", path, "-p", "8", "-n", "3", "-d", "20,200", "-ctk", caches, "-r", 2, "-t", 1, "-np", 2)
    assert result.exit_code == 0, result.output
    with Model(path) as model:
        tokens = bench.Tokens(model)
        for cache in caches.split(","):
            with model.context(parse_cache(cache, path), ContextOptions(256, n_threads=1)) as context:
                bench.prompt(context, tokens, 0, 150)
                context.mark(150)
                logits = []
                for n in (1, 5, 20):
                    context.decode([7], 150, 0)
                    logits.append(context.logits(1).copy())
                    bench.generate(context, tokens, 151, n)
                    context.drop_tail(150)
                    assert C.llama_memory_seq_pos_max(context.memory, 0) == 149
                assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_a_tail_without_a_mark_stays(tiny_model: Models, arch: str) -> None:
    path = tiny_model(arch)
    with Model(path) as model, model.context(parse_cache("f16", path), ContextOptions(256, n_threads=1)) as context:
        tokens = bench.Tokens(model)
        bench.prompt(context, tokens, 0, 100)
        context.mark(100)
        context.decode([7], 100, 0)
        expected = context.logits(1).copy()
        bench.generate(context, tokens, 101, 9)
        with pytest.raises(CacheError, match="n_rollback: expected a tail that can be removed exactly"):
            context.drop_tail(99)
        assert C.llama_memory_seq_pos_max(context.memory, 0) == 109
        context.drop_tail(100)
        context.decode([7], 100, 0)
        assert np.array_equal(expected, context.logits(1))


def test_markdown_and_csv(tiny_model: Models) -> None:
    arguments = ("-m", tiny_model("llama"), "-p", "4", "-n", "0", "-ctk", "f16,q8_0", "-fa", "on,off", "-r", 2, "-t", 1)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    head = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    assert head == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "type_k",
        "type_v",
        "fa",
        "KV B/token",
        "test",
        "t/s",
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:] if line.startswith("|")]
    assert [(row[5], row[7], row[9]) for row in rows] == [
        ("f16", "1", "pp4"),
        ("f16", "0", "pp4"),
        ("q8_0", "1", "pp4"),
    ]
    assert "q8_0 -fa off: skipped, expected 'on' or 'auto' for a q8_0 V cache, found 'off'" in result.stderr
    table = list(csv.DictReader(io.StringIO(run(*arguments, "-o", "csv").stdout)))
    assert [row["type_k"] for row in table] == ["f16", "f16", "q8_0"]
    assert float(table[0]["avg_ts"]) > 0


def test_caches_take_turns(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    generate = bench.generate

    def spy(context: Any, *arguments: Any) -> None:
        order.append(context.choice.name)
        generate(context, *arguments)

    monkeypatch.setattr(bench, "generate", spy)
    result = run("-m", tiny_model("llama"), "-p", "0", "-n", "1", "-ctk", "f16,q8_0", "-r", 2, "-t", 1)
    assert result.exit_code == 0, result.output
    assert order == ["f16", "q8_0"] + ["f16", "q8_0", "q8_0", "f16"]  # the warm-up, then rounds with changing starts


def stopped_at(n: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the signal when tokens are to be generated for the n-th time; the first times warm up."""
    calls, generate = itertools.count(1), bench.generate

    def stopping(*arguments: Any) -> None:
        if next(calls) == n:
            os.kill(os.getpid(), number)
        generate(*arguments)

    monkeypatch.setattr(bench, "generate", stopping)


@each("form", ["md", "csv", "json"])
@each(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_shows_its_results(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, form: str
) -> None:
    """In the second repetition at the second depth: f16 has one more sample there than q8_0."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stopped_at(2 + 2 * 3 + 2 + 2, number, monkeypatch)
    arguments = ("-p", "0", "-n", "2", "-d", "0,20", "-ctk", "q8_0,f16", "-r", 3, "-t", 1)
    result = run("-m", tiny_model("llama"), *arguments, "-o", form)
    assert result.exit_code == code, result.output
    assert result.stderr.splitlines()[-1] == f"stopped by {number.name} after 9 of 12 runs"
    if form == "json":
        rows = json.loads(result.stdout)
        assert [(o["type_k"], o["n_depth"], len(o["samples_ns"])) for o in rows] == [
            ("q8_0", 0, 3), ("f16", 0, 3), ("q8_0", 20, 1), ("f16", 20, 2),
        ]  # fmt: skip
    elif form == "csv":
        table = list(csv.DictReader(io.StringIO(result.stdout)))
        assert [(row["type_k"], row["test"]) for row in table] == [
            ("q8_0", "tg2"), ("f16", "tg2"), ("q8_0", "tg2 @ d20"), ("f16", "tg2 @ d20"),
        ]  # fmt: skip
    else:
        assert result.stdout.count("| tg2") == 4
        assert "standard deviation of 1 to 3 interleaved repetitions" in result.stdout
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("form", "printed"), [("md", ""), ("csv", ""), ("json", "[]\n")])
def test_a_bench_interrupted_before_any_result(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch, form: str, printed: str
) -> None:
    stopped_at(1, signal.SIGTERM, monkeypatch)
    result = run("-m", tiny_model("llama"), "-p", "4", "-n", "0", "-ctk", "f16", "-r", 5, "-t", 1, "-o", form)
    assert (result.exit_code, result.stdout) == (143, printed)
    assert result.stderr.splitlines()[-1] == "stopped by SIGTERM after 0 of 5 runs"


@each("flash_attn", ["on", "off"])
@each("cache", ["f16", "q8_0", "subkv"])
def test_copies_fill_as_evaluated_batches(coded_model: Models, cache: str, flash_attn: str) -> None:
    """The same number of cells at the same positions, and states of the same size; every copy has a separate cell."""
    if (cache, flash_attn) == ("q8_0", "off"):
        pytest.skip("llama.cpp has no such cache")
    requested = ContextOptions(2 * (504 + 8), n_batch=32, n_ubatch=32, n_threads=1, flash_attn=flash_attn, n_seq_max=3)
    bar = tqdm(disable=True)
    with Model(coded_model()) as model:
        tokens, choice = bench.Tokens(model), parse_cache(cache, model.path).with_rollback(8)
        with model.context(choice, requested) as evaluated, model.context(choice, requested) as copied:
            evaluated.can_repeat = False
            assert copied.can_repeat
            for context in (evaluated, copied):
                config = bench.Config(cache, context, flash_attn)
                for depth in (10, 100, 504):
                    bench.fill(config, tokens, depth, 2, bar)
            for seq in (0, 1):
                states = {C.llama_state_seq_get_size(context.handle, seq) for context in (evaluated, copied)}
                assert len(states) == 1
                for bound in (C.llama_memory_seq_pos_min, C.llama_memory_seq_pos_max):
                    assert bound(copied.memory, seq) == bound(evaluated.memory, seq)
                assert C.llama_memory_seq_pos_max(copied.memory, seq) == 503
            assert C.llama_memory_seq_pos_max(copied.memory, 2) == -1
            bench.generate(copied, tokens, 504, 8, 2)
            assert np.isfinite(copied.logits(2)).all()
            with pytest.raises(CacheError, match="cannot evaluate 1 tokens"):  # no cell is shared
                copied.decode(tokens.take(1), 0, 0, seq=2)


@each(
    ("arguments", "code", "message"),
    [
        (["-p", "0", "-n", "0"], 2, "-p, -n: expected a length above 0"),
        (["-p", "x"], 2, "expected numbers separated by commas, found 'x'"),
        (["-d", "-5"], 2, "expected numbers that are not negative"),
        (["-fa", "sometimes"], 2, "-fa: expected on, off or auto, found 'sometimes'"),
        (["-ctk", "q4_0", "-fa", "off"], 1, "-fa: expected 'on' or 'auto' for a q4_0 V cache, found 'off'"),
        (["-ctk", "f16:x.gguf"], 1, "-ctk: expected a file only after 'subkv:'"),
    ],
)
def test_refusals(tiny_model: Models, arguments: list[str], code: int, message: str) -> None:
    result = run("-m", tiny_model("llama"), *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
