"""The AVX-512 files use only instructions that dispatch.cpp checks, and the check is right.

Their code shares headers, and one file has inline assembly, which compiler flags do not check.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import ops
import pytest
from compiled import objects

ROOT = Path(__file__).resolve().parents[2]
BASE = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
VNNI = re.compile(r"\tvpdp[a-z]+ ")
VBMI = re.compile(r"\tv(pmultishiftqb|permb|perm[it]2b) ")
FILES = {
    "avx512_bw": ([], [], [VNNI, VBMI]),
    "avx512": (["-mavx512vnni", "-mavx512vbmi"], [VNNI, VBMI], []),
}  # flags beside BASE, instructions that must be there, instructions that must not
MISSING = [tool for tool in ("c++", "objdump", "nm") if shutil.which(tool) is None]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86-64 compiler")
@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
@pytest.mark.parametrize("name", FILES)
def test_instructions(name: str, tmp_path: Path) -> None:
    flags, present, absent = FILES[name]
    options = ["-O2", "-std=c++17", f"-I{ROOT}/kernels/include", *BASE, *flags]
    (built,) = objects([ROOT / f"kernels/cpu/{name}.cpp"], options, tmp_path)
    code = subprocess.run(["objdump", "-d", built], check=True, capture_output=True, text=True).stdout
    assert [p.pattern for p in present if not p.search(code)] == []
    assert [match.group() for p in absent for match in p.finditer(code)] == []
    # the linker keeps one copy of a function in two files, possibly that for the newer processor
    symbols = subprocess.run(["nm", "-C", built], check=True, capture_output=True, text=True).stdout
    assert re.findall(r"^\S+ [VWu] .*", symbols, re.MULTILINE) == []


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="needs Linux, x86-64")
@pytest.mark.skipif(not ops.library_name(), reason="needs libsubkv")
def test_versions_match_the_processor() -> None:
    """Compared with Linux's flags, which consider the registers that the kernel saves."""
    flags = set(re.findall(r"\S+", Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n")[0]))
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    needed = {
        "ref": set[str](),
        "avx2": avx2,
        "avx2vnni": avx2 | {"avx_vnni"},
        "avx512bw": avx512,
        "avx512": avx512 | {"avx512_vnni", "avx512vbmi"},
    }
    assert list(ops.versions()) == [name for name, instructions in needed.items() if instructions <= flags]
