"""kernels/cuda compiles without warnings for every supported architecture that this nvcc knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cuda_ops as c
import pytest

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
NVCC = c.nvcc()


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc on the PATH, in CUDACXX or /usr/local/cuda")
@pytest.mark.parametrize("source", sorted(c.ROOT.glob("kernels/cuda/*.cu")), ids=lambda path: path.name)
def test_compiles(source: Path, tmp_path: Path) -> None:
    assert NVCC is not None
    listed = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    known = [arch for arch in ARCHITECTURES if arch in listed]
    assert known, f"{NVCC}: one of {', '.join(ARCHITECTURES)} expected, {', '.join(listed)} found"
    codes = [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in known]
    # without optimisation, which takes ten times as long
    command = [
        NVCC,
        *c.NVCC_FLAGS,
        "-O0",
        "-Xcicc=-O0",
        "-Xptxas=-O0",
        *codes,
        "--threads=0",
        "-c",
        str(source),
        "-o",
        "out.o",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
