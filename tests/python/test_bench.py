"""runtime.bench: llama-bench's fields and ours, interleaving, output formats, refusals."""

from __future__ import annotations

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

from runtime import bench
from subkv.base.errors import CacheError
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.native.binding import C

Models = Callable[..., Path]
LLAMA_BENCH = {
    *("type_k", "type_v", "flash_attn", "n_prompt", "n_gen", "n_depth"),
    *("avg_ts", "stddev_ts", "samples_ns", "samples_ts"),
}
OURS = {
    *("cache", "n_parallel", "n_runs", "kv_bytes_per_token", "n_zero_rows", "bpe", "kernel", "median_ts"),
    *("clock_ghz", "additions_per_cycle"),
}


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(bench.main, [str(a) for a in arguments])


def random_tokens(model: Model) -> bench.Tokens:
    random = np.random.default_rng(1)
    return lambda n: random.integers(0, model.n_vocab, n, "int32")


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
        assert 0.1 < o["clock_ghz"] < 10 and 0.5 < o["additions_per_cycle"] < 10
        assert len(o["samples_ns"]) == len(o["samples_ts"]) == 3
        n = o["n_prompt"] + o["n_gen"]
        assert o["samples_ts"] == pytest.approx([1e9 * n / ns for ns in o["samples_ns"]])
        assert o["avg_ts"] == pytest.approx(statistics.fmean(o["samples_ts"]))
        assert o["median_ts"] == pytest.approx(statistics.median(o["samples_ts"]))
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
    result = run("-m", path, "-p", "8", "-n", "3", "-d", "0,20,200", "-ctk", caches, "-r", 2, "-t", 1, "-np", 2)
    assert result.exit_code == 0, result.output
    with Model(path) as model:
        tokens = random_tokens(model)
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
        tokens = random_tokens(model)
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


def test_table(tiny_model: Models) -> None:
    arguments = ("-m", tiny_model("llama"), "-p", "4", "-n", "0", "-ctk", "f16,q8_0", "-fa", "on,off", "-r", 2, "-t", 1)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()]
    assert lines[0] == ["cache", "fa", "KV B/token", "test", "t/s: median ± σ", "runs"]
    assert [(row[0], row[1], row[3], row[5]) for row in lines[2:]] == [
        ("f16 fa=on", "on", "pp4", "2"),
        ("f16 fa=off", "off", "pp4", "2"),
        ("q8_0 fa=on", "on", "pp4", "2"),
    ]
    assert "q8_0 -fa off: skipped, expected 'on' or 'auto' for a q8_0 V cache, found 'off'" in result.stderr


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


def interrupted_at(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when tokens are to be generated for the n-th time; the first times warm up, others are of prompts."""
    calls, generate = itertools.count(1), bench.generate

    def interrupted(*arguments: Any) -> None:
        if next(calls) == n:
            os.kill(os.getpid(), signal.SIGINT)
        generate(*arguments)

    monkeypatch.setattr(bench, "generate", interrupted)


def test_an_interrupted_bench_shows_its_results(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second repetition at the second depth: f16 has one more sample there than q8_0."""
    interrupted_at(2 + 2 * 3 + 2 + 2, monkeypatch)
    arguments = ("-p", "0", "-n", "2", "-d", "0,20", "-ctk", "q8_0,f16", "-r", 3, "-t", 1)
    result = run("-m", tiny_model("llama"), *arguments)
    assert result.exit_code == 130, result.output
    rows = [line.split("|") for line in result.stdout.splitlines()[2:]]
    assert [(row[1].strip(), row[4].strip(), int(row[6])) for row in rows] == [
        ("q8_0", "tg2", 3), ("f16", "tg2", 3), ("q8_0", "tg2 @ d20", 1), ("f16", "tg2 @ d20", 2),
    ]  # fmt: skip


def test_a_bench_interrupted_before_any_result(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_at(1, monkeypatch)
    result = run("-m", tiny_model("llama"), "-p", "4", "-n", "0", "-ctk", "f16", "-r", 5, "-t", 1, "-o", "json")
    assert (result.exit_code, result.stdout) == (130, "[]\n")


@each("flash_attn", ["on", "off"])
@each("cache", ["f16", "q8_0", "subkv"])
def test_copies_fill_as_evaluated_batches(coded_model: Models, cache: str, flash_attn: str) -> None:
    """The same number of cells at the same positions, and states of the same size; every copy has a separate cell."""
    if (cache, flash_attn) == ("q8_0", "off"):
        pytest.skip("llama.cpp has no such cache")
    requested = ContextOptions(2 * (504 + 8), n_batch=32, n_ubatch=32, n_threads=1, flash_attn=flash_attn, n_seq_max=3)
    with Model(coded_model()) as model:
        tokens, choice = random_tokens(model), parse_cache(cache, model.path).with_rollback(8)
        with model.context(choice, requested) as evaluated, model.context(choice, requested) as copied:
            evaluated.can_repeat = False
            assert copied.can_repeat
            for context in (evaluated, copied):
                for depth in (10, 100, 504):
                    bench.fill(context, tokens, depth, 2)
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
                copied.decode(tokens(1), 0, 0, seq=2)


@each(
    ("arguments", "code", "message"),
    [
        (["-p", "0", "-n", "0"], 2, "-p, -n: expected a length above 0"),
        (["-p", "8,x"], 2, "'x' is not a valid integer range"),
        (["-d", "-5"], 2, "-5 is not in the range x>=0"),
        (["-fa", "on,sometimes"], 2, "'sometimes' is not one of 'on', 'off', 'auto'"),
        (["-ctk", "q4_0", "-fa", "off"], 1, "-fa: expected 'on' or 'auto' for a q4_0 V cache, found 'off'"),
        (["-ctk", "f16:x.gguf"], 1, "-ctk: expected one of auto, subkv, f32"),
    ],
)
def test_refusals(tiny_model: Models, arguments: list[str], code: int, message: str) -> None:
    result = run("-m", tiny_model("llama"), *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
