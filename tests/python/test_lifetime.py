"""Several contexts, threads, forks, garbage, interrupts and the end of the interpreter."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opening import last_logits, opened, prompt

from subkv.base.errors import CacheError
from subkv.engine.llama import Llama
from subkv.native.binding import C

Models = Callable[..., Path]

LAYOUTS = (("--codec", "int8", "--n-recent", "16"), ("--kv-bits", "8", "--n-recent", "32", "--basis-k", "pca"))


def test_two_layouts_in_turn(coded_model: Models) -> None:
    paths = [coded_model(*layout) for layout in LAYOUTS]
    alone = []
    for path in paths:
        with opened(path) as llm:
            alone.append([last_logits(llm, prompt(60)), last_logits(llm, prompt(7))])
    with opened(paths[0]) as first, opened(paths[1]) as second:
        assert first.fingerprint() != second.fingerprint()
        for tokens, *expected in zip((prompt(60), prompt(7)), *alone, strict=True):
            for llm, logits in zip((first, second), expected, strict=True):
                np.testing.assert_array_equal(last_logits(llm, tokens), logits)


def test_one_object_in_two_threads(coded_model: Models) -> None:
    """llama.cpp's context belongs to one thread: every call from a second one is refused."""
    with opened(coded_model()) as llm:
        last_logits(llm, prompt(20))
        state = llm.save_state()
        inside, leave = threading.Event(), threading.Event()

        def work() -> None:
            with llm._ctx.exclusive():
                inside.set()
                leave.wait(60)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert inside.wait(60)
            calls: list[Callable[[], Any]] = [
                lambda: llm.eval([1]),
                lambda: llm.sample(),
                lambda: llm.save_state(),
                lambda: llm.load_state(state),
                llm.close,
            ]
            for call in calls:
                with pytest.raises(CacheError, match="one thread at a time"):
                    call()
        finally:
            leave.set()
            thread.join()
        llm.eval([1])


def test_closed_during_another_threads_generation(coded_model: Models) -> None:
    llm = Llama(coded_model(), n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)
    errors: list[Exception] = []
    begun = threading.Event()

    def generate() -> None:
        try:
            for _ in llm.generate(prompt(20), temp=0.0):
                begun.set()
                time.sleep(0.001)  # else the other thread hardly ever comes in between
        except CacheError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(60)
    while thread.is_alive():
        try:
            llm.close()
        except CacheError as error:
            assert "one thread at a time" in str(error)
    (error,) = errors
    assert "closed" in str(error) or "one thread at a time" in str(error)
    llm.close()
    with pytest.raises(CacheError, match="closed"):
        llm.eval([1])


def test_two_layouts_in_threads(coded_model: Models, tiny_model: Models) -> None:
    """Created, used and closed at once; each thread attaches its own layout and gets its own log."""
    paths = {coded_model(*layout): "subkv" for layout in LAYOUTS} | {tiny_model("llama"): "f16"}
    expected = []
    for path, cache in paths.items():
        with opened(path, kv_cache=cache) as llm:
            expected.append((llm.kv_stats(), last_logits(llm, prompt(60))))
    failed: list[Any] = []
    start = threading.Barrier(len(paths))

    def work(path: Path, stats: Any, logits: Any) -> None:
        try:
            start.wait()
            for _ in range(5):
                with opened(path, kv_cache=paths[path]) as llm:
                    assert llm.kv_stats() == stats
                    for _ in range(3):
                        llm.reset()
                        np.testing.assert_array_equal(last_logits(llm, prompt(60)), logits)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=(path, *values)) for path, values in zip(paths, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


#
# fork
#

FORK = Path(__file__).with_name("forked.py")
QUIET = ("-W", "ignore::DeprecationWarning")  # from Python 3.12 on os.fork warns of threads


def python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *QUIET, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("coded", [True, False])
def test_fork(coded_model: Models, tiny_model: Models, coded: bool) -> None:
    result = python(FORK.read_text(), *((coded_model(), "subkv") if coded else (tiny_model("llama"), "f16")))
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


#
# garbage
#


def freed_contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    freed: list[Any] = []
    free = C.llama_free
    monkeypatch.setattr(C, "llama_free", lambda ctx: (freed.append(ctx), free(ctx)))
    return freed


def test_an_unreferenced_object_is_freed(coded_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = freed_contexts(monkeypatch)
    gc.disable()  # by counting alone
    try:
        llm = Llama(coded_model(), n_ctx=256, prompt_cache=tmp_path, verbose=False)
        llm.create_completion(prompt(20), max_tokens=4)
        reference = weakref.ref(llm)
        del llm
        assert reference() is None
        assert len(freed) == 1
    finally:
        gc.enable()


def test_cyclic_garbage_is_freed(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # that of other tests
    freed = freed_contexts(monkeypatch)
    llm = Llama(coded_model(), n_ctx=256, verbose=False)
    llm.itself = llm  # type: ignore[attr-defined]
    del llm
    gc.collect()
    assert len(freed) == 1


LEAKS = """
import resource, sys
from subkv.engine.llama import Llama

def resident():
    with open("/proc/self/statm") as handle:
        return int(handle.read().split()[1]) * resource.getpagesize()

def use(i):
    llm = Llama(sys.argv[1], kv_cache=sys.argv[2], n_ctx=8192, n_threads=1, verbose=False)
    llm.eval(list(range(10, 200)))
    size = llm.kv_stats().bytes_kv
    if i % 2:
        llm.close()
    return size

for i in range(8):
    use(i)
before = resident()
sizes = [use(i) for i in range(30)]
grown = resident() - before
assert grown < 5 * sizes[0], (grown, sizes[0])  # thirty would be six times that; allocators settle slowly
"""


@pytest.mark.parametrize("coded", [True, False])
def test_contexts_do_not_pile_up(coded_model: Models, tiny_model: Models, coded: bool) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory: no /proc on this system")
    result = python(LEAKS, *((coded_model(), "subkv") if coded else (tiny_model("llama"), "f16")))
    assert (result.returncode, result.stderr) == (0, "")


def test_a_failed_construction_leaves_nothing(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = freed_contexts(monkeypatch)
    for _ in range(3):
        with pytest.raises(CacheError, match="prompt_cache"):
            Llama(coded_model(), prompt_cache=coded_model(), verbose=False)
    gc.collect()
    assert freed == []  # refused before anything was made


@pytest.mark.parametrize("generating", [True, False])
def test_the_interpreter_ends_with_a_live_object(coded_model: Models, generating: bool) -> None:
    code = """
import sys
from subkv.engine.llama import Llama
llm = Llama(sys.argv[1], kv_cache="subkv", n_ctx=256, verbose=False)
stream = llm.create_completion([10, 11, 12], max_tokens=50, stream=True)
if len(sys.argv) > 2:
    next(stream)
"""
    result = python(code, coded_model(), *(["generating"] if generating else []))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


#
# interrupts
#


@pytest.mark.parametrize("coded", [True, False])
def test_interrupts_leave_a_usable_object(coded_model: Models, tiny_model: Models, coded: bool) -> None:
    path, cache = (coded_model(), "subkv") if coded else (tiny_model("llama"), "f16")
    with opened(path, kv_cache=cache, n_ctx=1024) as fresh:
        expected = last_logits(fresh, prompt(150))
    with opened(path, kv_cache=cache, n_ctx=1024) as llm:
        for i in range(12):
            timer = threading.Timer(0.004 * i, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    llm.create_completion(prompt(400, i), max_tokens=100, temperature=0.0)
            timer.join()
            llm.reset()
            got = last_logits(llm, prompt(150))
            np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))


@pytest.mark.parametrize("after", [True, False])
def test_an_interrupted_batch_is_evaluated_again(
    coded_model: Models, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The interrupt comes before the cells are written, or after and before Python knows."""
    with opened(coded_model(), n_batch=32) as llm:
        expected = last_logits(llm, prompt(150))
        llm.reset()
        decode, n_left = llm._ctx.decode, [3]

        def interrupted(batch: Any) -> None:
            n_left[0] -= 1
            if n_left[0] or after:
                decode(batch)
            if not n_left[0]:
                raise KeyboardInterrupt

        monkeypatch.setattr(llm._ctx, "decode", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            llm.eval(prompt(150))
        monkeypatch.undo()
        assert llm.n_tokens == 64
        got = last_logits(llm, prompt(150)[64:])
        np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))


def test_cells_missing_before_the_end_are_noticed(coded_model: Models) -> None:
    """generate() removes cells first and counts them afterwards; an interrupt may come in between."""
    with opened(coded_model()) as llm:
        expected = last_logits(llm, prompt(100))
        llm.reset()
        llm.eval(prompt(90))
        assert llm._ctx.kv_cache_seq_rm(-1, 80, -1)
        got = last_logits(llm, prompt(100)[90:])
        np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))


def test_an_interrupted_load_leaves_an_empty_context(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(coded_model()) as llm:
        expected = last_logits(llm, prompt(60))
        llm.reset()
        llm.eval(prompt(90, 3))
        state = llm.save_state()
        llm.reset()
        llm.eval(prompt(50))
        set_data = C.llama_state_set_data

        def interrupted(*arguments: Any) -> None:
            set_data(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(C, "llama_state_set_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.load_state(state)
        monkeypatch.undo()
        assert llm.n_tokens == 0
        got = last_logits(llm, prompt(60))
        np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))
