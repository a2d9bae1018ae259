"""kernels/cuda compiles without warnings.

For the newest of the named architectures that this nvcc knows, and for one on either side of the only number with which
the sources compare __CUDA_ARCH__; for all of them with SUBKV_GATES=1.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import cuda_ops as c
import pytest
from compiled import objects

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
TENSOR_CORES = "sm_80"  # with halves to m16n8k16, the number that sources compare with
NVCC = c.nvcc()
SOURCES = sorted(c.ROOT.glob("kernels/cuda/*.cu"))


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc on the PATH, in CUDACXX or /usr/local/cuda")
@pytest.mark.parametrize(
    "source,define",
    [*((path, "") for path in SOURCES), (c.ROOT / "kernels/cuda/attend_decode.cu", c.WARP_PAIRS)],
    ids=lambda of: of.name if isinstance(of, Path) else of,
)
def test_compiles(source: Path, define: str, tmp_path: Path) -> None:
    assert NVCC is not None
    listed = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    known = [arch for arch in ARCHITECTURES if arch in listed]
    if not os.environ.get("SUBKV_GATES"):
        known = [arch for arch in known if arch in (known[0], TENSOR_CORES, known[-1])]
    assert known, f"{NVCC}: one of {', '.join(ARCHITECTURES)} expected, {', '.join(listed)} found"
    codes = [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in known]
    # without optimisation, which takes ten times as long
    flags = [*c.NVCC_FLAGS, *filter(None, [define]), "-O0", "-Xcicc=-O0", "-Xptxas=-O0", *codes, "--threads=0"]
    assert objects([source], flags, tmp_path, NVCC)


def test_conditions_are_known() -> None:
    """ARCHITECTURES has one on each side of every number that sources compare with __CUDA_ARCH__."""
    sources = "".join(path.read_text("utf-8") for path in (c.ROOT / "kernels/cuda").glob("*.cu*"))
    numbers = set(re.findall(r"__CUDA_ARCH__ *[<>=]+ *(\d+)", sources))
    assert numbers == {TENSOR_CORES.removeprefix("sm_") + "0"}
