"""Contexts that do not fit are refused with the sizes, and no other contexts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from opening import opened

from subkv.base.errors import CacheError
from subkv.engine import memory
from subkv.engine.cache import MIB, choose_cache
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.engine.model import Model
from subkv.native.binding import C

Models = Callable[..., Path]

HUGE = 1 << 30  # tokens; 512 GiB of f16 for the tiny llama
REFUSED = re.compile(
    r"expected a context that fits in the \d+ MiB of memory available, found (\d+) tokens with (\w+): "
    r"cells (\d+) MiB (?:\+ exact window (\d+) MiB )?\+ compute buffers (\d+) MiB = (\d+) MiB"
)


def test_a_context_larger_than_memory(tiny_model: Models, coded_model: Models) -> None:
    for path, name in ((tiny_model("llama"), "f16"), (coded_model(), "subkv")):
        with pytest.raises(CacheError) as error:
            Llama(path, kv_cache=name, n_ctx=HUGE, verbose=False)
        assert error.value.key == "n_ctx"
        found = REFUSED.match(error.value.reason)
        assert found is not None, error.value.reason
        n_tokens, kind, cells, window, compute, total = found.groups(default="0")
        assert (int(n_tokens), kind) == (HUGE, name)
        assert abs(int(cells) + int(window) + int(compute) - int(total)) <= 2
        assert int(cells) > 50_000


def test_the_engine_refuses_as_well(coded_model: Models) -> None:
    path = coded_model()
    with Model(str(path)) as model, pytest.raises(CacheError, match="n_ctx: expected a context that fits"):
        model.context(choose_cache(path), ContextOptions(HUGE, 64, 64, 1))


def test_programs_name_the_flag(coded_model: Models, program: Callable[..., Any]) -> None:
    result = program("runtime.chat", "-m", coded_model(), "-c", HUGE, "-p", "x", "--single-turn")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("-c: expected a context that fits in the ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("cache", ["f16", "auto"])
@pytest.mark.parametrize("arch", sorted(tiny.ARCHS))
def test_estimate_equals_the_allocation(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch, arch: str, cache: str
) -> None:
    """Of every architecture llama.cpp's simulation and the real context agree."""
    check_sizes(tiny_model(arch), monkeypatch, 512, {"kv_cache": cache})


@pytest.mark.parametrize("options", [{}, {"n_recent": 32}, {"embedding": True}, {"n_ctx": 0}, {"kv_cache": "q8_0"}])
def test_coded_sizes(coded_model: Models, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    check_sizes(coded_model(), monkeypatch, options.get("n_ctx", 512), options)


def check_sizes(path: Path, monkeypatch: pytest.MonkeyPatch, n_ctx: int, options: dict[str, Any]) -> None:
    """Refused with one byte less than the real context needs; accepted with exactly as much."""
    with opened(path, **{"n_ctx": n_ctx} | options) as llm:
        expected = llm.kv_stats()
    monkeypatch.setattr(memory, "_bound", lambda *_: 1 << 60)
    estimates: list[dict[str, float]] = []
    simulate = memory._simulate
    monkeypatch.setattr(memory, "_simulate", lambda *arguments: estimates.append(simulate(*arguments)) or estimates[-1])
    with opened(path, **{"n_ctx": n_ctx} | options):
        pass
    (needed,) = estimates
    assert needed["cells"] + needed["exact window"] == expected.bytes_kv
    assert needed["exact window"] == expected.bytes_window
    monkeypatch.setattr(memory, "available_memory", lambda: int(sum(needed.values())) - 1)
    with pytest.raises(CacheError, match="n_ctx: expected a context that fits"):
        Llama(path, **{"n_ctx": n_ctx, "verbose": False} | options)
    monkeypatch.setattr(memory, "available_memory", lambda: int(sum(needed.values())) + 1)
    with opened(path, **{"n_ctx": n_ctx} | options):
        pass


def test_large_contexts_are_continued_from_smaller_ones(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    path, params = coded_model(), C.llama_context_default_params()
    exact = memory.needed(path, choose_cache(path), params, 16384)
    monkeypatch.setattr(memory, "N_SIMULATED", 4096)
    guess = memory.needed(path, choose_cache(path), params, 16384)
    assert guess["cells"] == exact["cells"]
    assert guess["exact window"] == exact["exact window"]
    # the log has two decimals, and the difference of two sizes counts six times
    assert guess["compute buffers"] <= exact["compute buffers"] + 14 * 0.005 * memory.MIB


def test_switched_off_and_unknown(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    params = C.llama_context_default_params()
    params.n_ctx = HUGE
    path = coded_model()
    choice = choose_cache(path)
    with pytest.raises(CacheError):
        memory.require_memory(path, choice, params)
    monkeypatch.setenv(memory.FIT, "off")
    memory.require_memory(path, choice, params)
    monkeypatch.delenv(memory.FIT)
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    memory.require_memory(path, choice, params)


def test_a_small_bound_skips_the_simulation(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(memory, "_simulate", lambda *_: pytest.fail("simulated"))
    with opened(coded_model()):
        pass


#
# how much there is
#

SMALL = 192 << 20  # the reserve of available_memory.cpp
MEMINFO = "MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
LIMITS = {
    "v2": ("0::/a/b\n", "", ("memory.max", "memory.current"), ""),
    "v1": (
        "5:cpu:/a/b\n4:hugetlb,memory:/a/b\n",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_",
    ),
}


@pytest.fixture(params=sorted(LIMITS))
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., int | None]:
    """limited({"a": (limit, usage, cached)}): available memory under these control groups."""
    line, root, names, total = LIMITS[request.param]
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self/cgroup").write_text(line)

    def available(groups: dict[str, tuple[str, int, int]]) -> int | None:
        for group, (limit, usage, cached) in groups.items():
            folder = cgroup / root / group
            folder.mkdir(parents=True, exist_ok=True)
            values = (limit, usage, f"{total}inactive_file {cached}\nanon 7")
            for name, value in zip((*names, "memory.stat"), values, strict=True):
                (folder / name).write_text(f"{value}\n")
        return memory.available_memory(proc, cgroup)

    return available


def test_available_memory(limited: Callable[..., int | None]) -> None:
    machine, swap = 4100 * 1024, 100 * 1024
    assert limited({}) == machine
    assert limited({"a/b": ("1000000", 400000, 50000)}) == 650000 + swap
    assert limited({"a": ("900000", 400000, 0)}) == 500000 + swap  # the least counts
    assert limited({"a": ("100", 900000, 0)}) == 0
    assert limited({"a": ("99999999999", 1, 0), "a/b": ("max", 1, 0)}) == machine


def test_limits_of_the_process(limited: Callable[..., int | None], tmp_path: Path) -> None:
    """ulimit -v and -d, minus the process's memory and a reserve for small allocations."""
    own = tmp_path / "proc/self"
    (own / "status").write_text("VmPeak:\t 900 kB\nVmSize:\t 800 kB\nVmData:\t 300 kB\n")
    for space, data, expected in (("unlimited", "unlimited", 4100 << 10), ("3000000", "unlimited", 3000000 - 819200)):
        lines = (f"Max address space{space:>20}{space:>20} bytes", f"Max data size{data:>20}{data:>20} bytes")
        (own / "limits").write_text("Limit  Soft Limit  Hard Limit  Units\n" + "\n".join(lines))
        assert limited({}) == max(0, expected - (SMALL if space != "unlimited" else 0))
    (own / "limits").write_text(f"Max data size {SMALL + (1 << 20)} unlimited bytes\n")
    assert limited({}) == (1 << 20) - (300 << 10)


def test_this_machine() -> None:
    free = memory.available_memory()
    if free is None:
        pytest.skip("available memory: this system does not say")
    assert free > 10 * MIB
