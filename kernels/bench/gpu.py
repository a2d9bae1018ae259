"""Builds, checks and times the GPU kernels in one go, for a machine that is rented for minutes and has no network.

    python kernels/bench/gpu.py [-o gpu.json] [--cells 131072] [--quick]

Correctness first: the tests of the CUDA and Triton kernels, on the GPU. Then times: attend against the device's
measured copy bandwidth, in bytes of codes. What has been found is written after every step; what cannot run here is
said and skipped. Needs PyTorch, numpy, pytest and hypothesis; nvcc for the CUDA kernels, Triton for Triton's. With
compute-sanitizer: compute-sanitizer --target-processes all python kernels/bench/gpu.py --quick
"""

from __future__ import annotations

import argparse
import ctypes as ct
import functools
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "kernels"), str(ROOT / "kernels" / "triton")]

import cuda_ops as c  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402

# The shape of an 8B Llama: 8 KV heads of 128, groups of 4. Mixed bands take 71 + 67 bytes per cell and head.
N_HEAD, GROUP, D = 8, 4, 128
BANDS = {
    "4.3 bits": (((16, 8), (48, 5), (64, 3)), ((16, 6), (96, 4), (16, 3))),
    "8 bits": (((128, 8),), ((128, 8),)),
    "3 bits": (((128, 3),), ((128, 3),)),
}
BATCHES = (1, 4, 16)
PREFILL = 512


class Report:
    """Results so far, on disk after every step, and the table on the screen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[dict[str, Any]] = []

    def add(self, step: str, result: str, **numbers: Any) -> None:
        self.steps.append({"step": step, "result": result, **numbers})
        print(f"{step:<44} {result}", flush=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps({"host": platform.node(), "steps": self.steps}, indent=1) + "\n")
        temporary.replace(self.path)

    def run(self, step: str, work: Callable[[], tuple[str, dict[str, Any]]]) -> None:
        """A step that fails is reported, and the next one runs."""
        start = time.monotonic()
        try:
            result, numbers = work()
        except Exception as error:
            result, numbers = f"FAILED: {type(error).__name__}: {str(error)[:300]}", {}
        self.add(step, result, seconds=round(time.monotonic() - start, 1), **numbers)


def missing(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"skipped: no package {name}"


def gpu() -> Any | None:
    """torch.cuda where it has a device."""
    if missing("torch"):
        return None
    import torch

    return torch.cuda if torch.cuda.is_available() else None


def run_tests(file: str, ref: Path, only: str = "") -> tuple[str, dict[str, Any]]:
    """pytest in a process of its own: a kernel that crashes takes no other step along. ref: libref.so."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", f"tests/kernels/{file}"]
    command += ["--confcutdir=tests/kernels", *(["-k", only] if only else [])]  # what other tests need is not there
    env = os.environ | {"SUBKV_TEST_LIB": str(ref)} | ({} if gpu() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return (lines or [done.stderr])[-1].strip("= "), {
        "notes": [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    }


def median_ms(cuda: Any, call: Callable[[], None], n: int = 20) -> float:
    """Milliseconds of a call on the device, median of n after three warm-ups."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(n):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def device_rates(cuda: Any) -> tuple[str, dict[str, Any]]:
    """Copy bandwidth (bytes read and written) and f16 matrix rate: the roofs of kernels/ROOFLINE.md."""
    import torch

    source, target = (torch.empty(2 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * source.numel() / median_ms(cuda, lambda: target.copy_(source)) / 1e6
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device="cuda") for _ in range(2))
    rate = 2 * 8192**3 / median_ms(cuda, lambda: torch.matmul(a, b)) / 1e9
    name = cuda.get_device_name()
    return f"{name}: copy {copy:.0f} GB/s, f16 matrices {rate:.0f} TFLOP/s", {"copy_gbs": copy, "f16_tflops": rate}


class Workload:
    """Random rows of a layer for every stream, and queries; times say nothing about what is in them."""

    def __init__(self, bands: tuple[Any, Any], n_stream: int, n_tps: int, n_cells: int) -> None:
        import torch

        self.n_stream, self.n_tps, self.n_cells = n_stream, n_tps, n_cells
        self.sides = [layers.Side.make([b] * N_HEAD, D, i) for i, b in enumerate(bands)]
        self.rows = []
        for side in self.sides:
            one = torch.from_numpy(side.random_rows(1024, np.random.default_rng(0), 0)).cuda()
            self.rows.append(one.repeat(n_stream, n_cells // 1024, 1).reshape(n_stream, n_cells, -1))
        self.bytes = sum(int(rows.numel()) for rows in self.rows)

    def line(self, ms: float, copy_gbs: float | None) -> tuple[str, dict[str, Any]]:
        gbs = self.bytes / ms / 1e6
        share = f", {100 * gbs / copy_gbs:.0f}% of the copy" if copy_gbs else ""
        return f"{ms * 1000:.0f} us, {gbs:.0f} GB/s of codes{share}", {"ms": ms, "gbs": gbs, "bytes": self.bytes}


def time_cuda(cuda: Any, library: c.Library, work: Workload, kernel: str, copy_gbs: float | None) -> Any:
    import torch

    heads = c.Heads(library.memory(), work.sides[0], work.sides[1], GROUP)
    n_tok, layer = work.n_stream * work.n_tps, heads.layer
    blocks = N_HEAD * work.n_stream * max(1, work.n_tps * GROUP // 64)
    n_split = max(1, min(1024 // blocks, work.n_cells // 256))
    n_rows = N_HEAD * n_tok * GROUP
    floats = torch.zeros(n_rows * (n_split * (2 + layer.width_v) + layer.width_k + 1), device="cuda")
    q = torch.randn(n_tok, N_HEAD * GROUP, D, device="cuda")
    mask = torch.zeros(n_tok, work.n_cells, dtype=torch.float16, device="cuda")
    cell_pos = torch.arange(work.n_cells, dtype=torch.int32, device="cuda").repeat(work.n_stream, 1)
    tokens = torch.zeros(n_tok, 4, dtype=torch.int32, device="cuda")
    tokens[:, 0] = work.n_cells
    part = n_split * n_rows
    at = floats.data_ptr()
    args = c.Attend(
        layer=layer,
        q=q.data_ptr(),
        q_head=D,
        q_token=N_HEAD * GROUP * D,
        k_rows=work.rows[0].data_ptr(),
        v_rows=work.rows[1].data_ptr(),
        k_stride=work.rows[0].stride(1),
        v_stride=work.rows[1].stride(1),
        k_stream=work.rows[0].stride(0),
        v_stream=work.rows[1].stride(0),
        mask=mask.data_ptr(),
        mask_half=True,
        cell_pos=cell_pos.data_ptr(),
        tokens=tokens.data_ptr(),
        n_sink=4,
        n_recent=128,
        n_kv=work.n_cells,
        n_stream=work.n_stream,
        n_tps=work.n_tps,
        split=-(-work.n_cells // n_split // 64) * 64,
        n_split=n_split,
        m=at,
        z=at + 4 * part,
        acc=at + 8 * part,
        qt=at + 4 * part * (2 + layer.width_v),
        shift=at + 4 * (part * (2 + layer.width_v) + n_rows * layer.width_k),
    )
    stream = ct.c_void_p(torch.cuda.current_stream().cuda_stream)
    library.run("project_queries", args)
    ms = median_ms(cuda, lambda: library.run(kernel, args, stream))
    return work.line(ms, copy_gbs)


def time_triton(cuda: Any, work: Workload, copy_gbs: float | None) -> Any:
    import torch

    import subkv_triton as st

    codecs = []
    for side in work.sides:
        bands = [[(b.n, b.bits, b.ratio) for b in h.codec.bands[: h.codec.n_bands]] for h in side.heads]
        bases = [h.encode for h in side.heads]
        codecs.append(st.Codecs.make(bands, bases, bases, None, "cuda"))
    qt = torch.randn(work.n_stream, work.n_tps, N_HEAD, GROUP, codecs[0].width, device="cuda")
    bias = torch.zeros(work.n_stream, work.n_tps, work.n_cells, device="cuda")
    ms = median_ms(cuda, lambda: st.attend(*codecs, *work.rows, qt, bias) and None)
    return work.line(ms, copy_gbs)


def time_shape(
    report: Report, cuda: Any, library: c.Library | None, name: str, shape: tuple[int, int, int], copy_gbs: float | None
) -> None:
    """Every kernel on one workload: bands by name, (streams, tokens of each, cells)."""
    n_stream, n_tps, n_cells = shape
    what = f"{name}, {n_stream} x {n_tps} tokens, {n_cells} cells"
    work = Workload(BANDS[name], n_stream, n_tps, n_cells)
    if library is not None:
        for kernel in ("attend_decode", "attend_tiles") if n_tps == 1 else ("attend_tiles",):
            timed = functools.partial(time_cuda, cuda, library, work, kernel, copy_gbs)
            report.run(f"CUDA {kernel}: {what}", timed)
    if not missing("triton"):
        report.run(f"Triton attend: {what}", lambda: time_triton(cuda, work, copy_gbs))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("gpu.json"), help="results, rewritten after every step"
    )
    parser.add_argument("--cells", type=int, default=131072, help="cells of the decode measurements")
    parser.add_argument("--quick", action="store_true", help="one test of each kind, one shape")
    given = parser.parse_args()
    if given.cells <= 0 or given.cells % 1024:
        parser.error(f"--cells: a positive multiple of 1024 expected, {given.cells} found")
    report = Report(given.output)
    with tempfile.TemporaryDirectory() as folder:
        check(report, c.build_ref(Path(folder)), given.quick)
        if cuda := gpu():
            measure(report, cuda, Path(folder), given.cells, given.quick)
        else:
            report.add("times", "skipped: no GPU")
    return 1 if any("FAILED" in step["result"] or "failed" in step["result"] for step in report.steps) else 0


def check(report: Report, ref: Path, quick: bool) -> None:
    cuda, compiler = gpu(), c.nvcc()
    report.add("GPU", cuda.get_device_name() if cuda else "none that PyTorch sees: the kernels run on the CPU")
    if compiler:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        report.add("nvcc", (re.search(r"V[\d.]+", text) or [text])[0])
    else:
        report.add("nvcc", "none: CUDA's kernels run on the CPU only")
    where = "native" if cuda and compiler else "emulated"
    report.run(
        f"tests of the CUDA kernels, {where}",
        lambda: run_tests("test_cuda.py", ref, f"{where} and stores" if quick else where),
    )
    if reason := missing("torch") or missing("triton"):
        report.add("tests of the Triton kernels", reason)
    else:
        report.run("tests of the Triton kernels", lambda: run_tests("test_triton.py", ref, "large" if quick else ""))
    if compiler and not quick:
        report.run("compile for every architecture", lambda: run_tests("test_cuda_compile.py", ref))


def measure(report: Report, cuda: Any, folder: Path, n_cells: int, quick: bool) -> None:
    report.run("device", lambda: device_rates(cuda))
    copy_gbs = report.steps[-1].get("copy_gbs")
    library = None
    if compiler := c.nvcc():
        try:
            library = c.build_native(folder, compiler)
        except (subprocess.CalledProcessError, OSError) as error:
            report.add("build of the CUDA kernels", f"FAILED: {error}")
    shapes = [(name, (batch, 1, n_cells)) for name in BANDS for batch in BATCHES] + [("4.3 bits", (1, PREFILL, 8192))]
    for name, shape in shapes[:1] if quick else shapes:
        try:
            time_shape(report, cuda, library, name, shape, copy_gbs)
        except Exception as error:
            report.add(f"{name}, {shape}", f"FAILED: {type(error).__name__}: {str(error)[:300]}")
        cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
