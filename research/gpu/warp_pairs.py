"""Counts the instructions of the decode kernel, and of the one whose warps own pairs of tiles (kernels/cuda/pairs.cuh).

    python research/gpu/warp_pairs.py [BITS ...]    # nvcc, no GPU; without widths: all, and planned layouts

The PTX interpreter of tests/kernels runs both on a head of 128 elements and 4 query rows. Their results must agree.
"""

from __future__ import annotations

import ctypes as ct
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests/kernels", "tests", "kernels/triton")]
os.environ.setdefault("SUBKV_CACHE", str(ROOT / "build" / "cache"))

import cuda_ops as c  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402
import ptx  # noqa: E402
from cuda_calls import Call, Shape  # noqa: E402
from interpreted import compiled, last_launch  # noqa: E402
from test_ptx import PLANNED  # noqa: E402

STEP = 4 * 128  # cells: a pair of tiles for each warp of a block


def counted(emulated: c.Library, module: str, n_kv: int) -> int:
    """Instructions of all warps of a block; raises AssertionError if results differ from the emulated kernel's."""
    call = Call(emulated, "counted", Shape(group=4, n_kv=n_kv, n_split=1))
    emulated.run("project_queries", call.args)
    emulated.run("attend_decode", call.args)
    expected = [read().copy() for read in (call.m, call.z, call.acc)]
    job, shared = last_launch(emulated.lib)
    for at, width in ((call.args.m, 1), (call.args.z, 1), (call.args.acc, call.args.layer.width_v)):
        ct.memset(at, 0xFF, 4 * 4 * width)  # NaN
    kernel = ptx.Kernel(module, "decode_kernelILi1E")
    kernel.run((0, 0, 0), job, max(shared, 48 << 10), 128)
    for a, read in zip(expected, (call.m, call.z, call.acc), strict=True):
        assert np.abs(a - read()).max() < 1e-4 * np.abs(a).max()
    return sum(kernel.executed.values())


def main() -> None:
    widths = [int(arg) for arg in sys.argv[1:]]
    layouts = {f"{bits} bits": (((128, bits),), ((128, bits),)) for bits in widths or (2, 3, 4, 5, 6, 8)}
    if not widths:
        layouts["4.3 bits, planned"] = PLANNED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emulated = c.build_emulated(folder)
        modules = [compiled("attend_decode.cu", "compute_80", folder, *options) for options in ((), (c.WARP_PAIRS,))]
        for layout, (keys, values) in layouts.items():
            layers.LAYERS["counted"] = ([keys], [values])
            found = []
            for module in modules:
                few, many = (counted(emulated, module, n * STEP) for n in (1, 2))
                found.append((many - few) * ptx.LANES / (STEP * 2 * 128))
            print(f"{layout}: {found[0]:.2f} instructions per code, a pair per warp {found[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
