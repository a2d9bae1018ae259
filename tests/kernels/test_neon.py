"""The NEON version against the reference, cross-compiled and run in an emulator.

Debian's packages: g++-aarch64-linux-gnu, qemu-user.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT}/kernels/include"]
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
def test_neon_agrees_with_the_reference(tmp_path: Path) -> None:
    sources = [*ROOT.glob("kernels/ref/*.cpp"), *ROOT.glob("kernels/cpu/*.cpp"), ROOT / "tests/kernels/check.cpp"]
    neon = [path for path in sources if path.name.startswith("neon")]
    others = [path for path in sources if path not in neon]
    for paths, flags in ((neon, ["-march=armv8.2-a+dotprod"]), (others, [])):
        subprocess.run([COMPILER, *FLAGS, *flags, "-c", *map(str, paths)], cwd=tmp_path, check=True)
    objects = [str(path) for path in tmp_path.glob("*.o")]
    subprocess.run([COMPILER, "-static", *objects, "-o", "check"], cwd=tmp_path, check=True)
    done = subprocess.run([EMULATOR, "./check", "60"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "neon: 60 rounds" in done.stdout
