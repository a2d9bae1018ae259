"""available_memory of the native code gives what that of Python gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from compiled import CXX, ROOT
from each import each

from subkv.engine import memory

BASE = ROOT / "runtime" / "native" / "base"
PROGRAM = """
#include "available_memory.h"
#include <cstdio>
int main(int, char ** folders) {
    std::printf("%lld", (long long) subkv::available_memory(folders[1], folders[2]));
}
"""
MEMINFO = "MemTotal: 900000 kB\nMemAvailable:   600000 kB\nSwapFree:        1000 kB\n"
LIMITS = (
    "Limit  Soft Limit  Hard Limit  Units\n"
    "Max address space  {}  unlimited  bytes\n"
    "Max data size  unlimited  unlimited  bytes\n"
)
STATUS = "Name:\tx\nVmSize:\t  40000 kB\nVmData:\t  20000 kB\n"
SYSTEMS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "machine": ({"self/cgroup": "0::/\n"}, {}),
    "v2": (
        {"self/cgroup": "0::/a/b\n"},
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "5\n",
            "a/b/memory.stat": "anon 1\n",
            "a/memory.max": "300000000\n",
            "a/memory.current": "200000000\n",
            "a/memory.stat": "anon 1\ninactive_file 7000\nactive_file 500\n",
        },
    ),
    "v1": (
        {"self/cgroup": "3:cpu,cpuacct:/c\n2:memory:/c\n"},
        {
            "memory/c/memory.limit_in_bytes": "50000000\n",
            "memory/c/memory.usage_in_bytes": "40000000\n",
            "memory/c/memory.stat": "total_inactive_file 9\n",
        },
    ),
    "over its limit": (
        {"self/cgroup": "0::/a\n"},
        {"a/memory.max": "10\n", "a/memory.current": "90000000\n", "a/memory.stat": "anon 1\n"},
    ),
    "address space": ({"self/cgroup": "0::/\n", "self/limits": LIMITS.format(500_000_000), "self/status": STATUS}, {}),
    "no limit": ({"self/cgroup": "0::/\n", "self/limits": LIMITS.format("unlimited"), "self/status": STATUS}, {}),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "main.cpp").write_text(PROGRAM)
    command = [CXX, "-std=c++17", "-O1", f"-I{BASE}", folder / "main.cpp", BASE / "available_memory.cpp"]
    subprocess.run([*map(str, command), "-o", str(folder / "program")], check=True)
    return folder / "program"


def available(program: Path, *folders: Path) -> int:
    return int(subprocess.run([program, *folders], capture_output=True, text=True, check=True).stdout)


@each("name", SYSTEMS)
def test_it_equals_python(name: str, program: Path, tmp_path: Path) -> None:
    proc, cgroup = tmp_path / name / "proc", tmp_path / name / "cgroup"
    files, groups = SYSTEMS[name]
    for folder, texts in ((proc, {"meminfo": MEMINFO} | files), (cgroup, groups)):
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    expected = memory.available_memory(proc, cgroup)
    assert expected is not None
    expected += memory.SMALL if name == "address space" else 0  # Python keeps it for llama.cpp's small blocks
    assert available(program, proc, cgroup) == expected
    assert (expected < 600_000 << 10) == (name not in ("machine", "no limit"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_this_machine(program: Path, tmp_path: Path) -> None:
    assert 0 < available(program, Path("/proc"), Path("/sys/fs/cgroup")) < 1 << 50
    assert available(program, tmp_path, tmp_path) == (1 << 63) - 1
