"""Counts the instructions of a prototype that gives a warp a pair of tiles, beside those of the decode kernel's widths.

    python research/gpu/warp_pairs.py [BITS ...]    # nvcc, no GPU

Both run in the PTX interpreter of tests/kernels on one head of 128 elements, 4 query rows and one band, and must agree.
"""

from __future__ import annotations

import ctypes as ct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests/kernels", "tests", "kernels/triton")]

import cuda_ops as c  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402
import ptx  # noqa: E402
from cuda_calls import Call, Shape  # noqa: E402
from test_ptx import Interpreted, compiled  # noqa: E402

PAIR = 128  # cells


def prototype(bits: int, folder: Path) -> str:
    out, source = folder / "pairs.ptx", ROOT / "research/gpu/warp_pairs.cu"
    flags = ["-std=c++17", "-O3", f"-DPAIR_BITS={bits}", f"-I{ROOT}/kernels/cuda", *c.INCLUDE]
    command = [str(c.nvcc()), *flags, "-ptx", "-arch=compute_80", str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return out.read_text("utf-8")


def counted(emulated: c.Library, module: str, part: str, n_kv: int, n_threads: int) -> int:
    """Instructions of all warps of a block; raises AssertionError if results differ from the emulated kernel's."""
    call = Call(emulated, "counted", Shape(group=4, n_kv=n_kv, n_split=1))
    emulated.run("project_queries", call.args)
    emulated.run("attend_decode", call.args)
    expected = [read().copy() for read in (call.m, call.z, call.acc)]
    job, shared = Interpreted(emulated, "").job()
    for at, width in ((call.args.m, 1), (call.args.z, 1), (call.args.acc, call.args.layer.width_v)):
        ct.memset(at, 0xFF, 4 * 4 * width)  # NaN
    kernel = ptx.Kernel(module, part)
    kernel.run((0, 0, 0), job, max(shared, 16 << 10), n_threads)
    for a, read in zip(expected, (call.m, call.z, call.acc), strict=True):
        assert np.abs(a - read()).max() < 1e-4 * np.abs(a).max()
    return sum(kernel.executed.values())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emulated = c.build_emulated(folder)
        kernel = compiled("attend_decode.cu", "compute_80", folder)
        for bits in [int(arg) for arg in sys.argv[1:]] or [2, 3, 4, 5, 6, 8]:
            layers.LAYERS["counted"] = ([((128, bits),)], [((128, bits),)])
            found = []
            for module, part, n in ((kernel, "decode_kernelILi1E", 128), (prototype(bits, folder), "pairs_kernel", 32)):
                few, many = (counted(emulated, module, part, n_kv, n) for n_kv in (2 * PAIR, 3 * PAIR))
                found.append((many - few) * ptx.LANES / (PAIR * 2 * 128))
            print(f"{bits} bits: {found[0]:.2f} instructions per code, a pair per warp {found[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
