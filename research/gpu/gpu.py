"""Builds, tests and times the GPU kernels in one run, for a machine without network that is rented for minutes.

    python research/gpu/gpu.py [-o gpu.json] [--cells N,N,…] [--quick] [--engine] [--steps tests,ops,models]
                                [--backend vulkan]

Steps:
    tests    the tests of the CUDA and Triton kernels (or of the Vulkan kernels) on the GPU
    ops      times of every op, and of attention compared with torch's over f16 keys and values (Vulkan: compared with a
             copy in the device's memory)
    models   models with random weights: the longest context in 8 GiB (also without a GPU), and runtime.bench at depth
Results are written after every step. Steps that cannot run are reported and skipped.

Requirements: this repository, its extras `test` and `torch`, and nvcc for the CUDA kernels. Whole models also need a
pure-Python llama-cpp-python (LLAMA_BUILD=OFF), cmake, and SUBKV_LLAMA_CPP_SOURCE, the tree DIR/llama.cpp of a build of
this repository. --engine builds from it into build/gpu and resumes an interrupted build.
--backend vulkan needs glslc, Vulkan's headers and loader and a driver instead of nvcc, torch and triton. If the only
device is a CPU (lavapipe), set GGML_VK_VISIBLE_DEVICES=0 for whole models.
compute-sanitizer: compute-sanitizer --target-processes all python research/gpu/gpu.py --quick --steps tests
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "kernels"), str(ROOT / "tests"), str(ROOT / "kernels" / "triton"), str(BENCH)]
os.environ.setdefault("SUBKV_CACHE", str(ROOT / "build" / "cache"))  # compiled.py keeps files beside it

import cuda_ops as c  # noqa: E402
import vulkan_ops as v  # noqa: E402
from gpu_ops import BANDS  # noqa: E402
from gpu_report import Report, Step, gpu, interleaved_ms, missing  # noqa: E402

STEPS = ("tests", "ops", "models")
ENGINE = ROOT / "build" / "gpu"
LIMIT = 900.0  # seconds per part


def run_tests(file: str, ref: Path, only: str = "") -> Step:
    """Run pytest in a separate process, so that a crash does not stop other steps. ref: libref.so."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", f"tests/kernels/{file}"]
    command += ["--confcutdir=tests/kernels", *(["-k", only] if only else [])]  # without the fixtures of other tests
    paths = [
        str(ROOT / "tests"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]  # not the conftest there, which adds it
    env = os.environ | {"SUBKV_TEST_LIB": str(ref), "PYTHONPATH": os.pathsep.join(paths)}
    env |= {} if gpu() else {"TRITON_INTERPRET": "1"}
    env.setdefault("SUBKV_CACHE", str(ref.parent / "cache"))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return (lines or [done.stderr])[-1].strip("= "), {
        "notes": [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    }


def device_rates(cuda: Any) -> Step:
    """Copy bandwidth (bytes read and written) and f16 matrix rate: the roofs of research/notes/roofline.md."""
    import torch

    source, target = (torch.empty(2 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    a, b = (torch.randn(8192, 8192, dtype=torch.float16, device="cuda") for _ in range(2))
    times = interleaved_ms({"copy": lambda: target.copy_(source), "product": lambda: torch.matmul(a, b)})
    copy_ms, product_ms = (sorted(ms)[len(ms) // 2] if isinstance(ms, list) else float("nan") for ms in times.values())
    copy, rate = 2 * source.numel() / copy_ms / 1e6, 2 * 8192**3 / product_ms / 1e9
    name = cuda.get_device_name()
    return f"{name}: copy {copy:.0f} GB/s, f16 matrices {rate:.0f} TFLOP/s", {"copy_gbs": copy, "f16_tflops": rate}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("gpu.json"), help="results, rewritten after every step"
    )
    parser.add_argument("--cells", default="2048,8192,32768,131072", help="cells of the decode measurements, N,N,…")
    parser.add_argument("--quick", action="store_true", help="fewer tests, one layout of bands, smaller depths")
    parser.add_argument("--engine", action="store_true", help="build the native engine for whole models")
    parser.add_argument("--steps", default=",".join(STEPS), help="some of them, separated by commas")
    parser.add_argument("--backend", choices=("cuda", "vulkan"), default="cuda", help="kernels to test and time")
    given = parser.parse_args()
    vulkan = given.backend == "vulkan"
    cells = given.cells.split(",")
    if not all(n.isdecimal() and int(n) > 0 and int(n) % 1024 == 0 for n in cells):
        parser.error(f"--cells: positive multiples of 1024 expected, {given.cells} found")
    steps = given.steps.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"--steps: some of {', '.join(STEPS)} expected, {', '.join(sorted(unknown))} found")
    report = Report(given.output)
    with tempfile.TemporaryDirectory() as folder:
        if "tests" in steps and vulkan:
            report.run("tests of the Vulkan kernels", lambda: run_tests("test_vulkan.py", c.build_ref(Path(folder))))
        elif "tests" in steps:
            check(report, c.build_ref(Path(folder)), given.quick)
        if "ops" in steps:
            if vulkan:
                measure_vulkan(report, Path(folder), int(cells[-1]), given.quick)
            elif cuda := gpu():
                measure(report, cuda, Path(folder), given.cells, given.quick)
            else:
                report.add("times", "skipped: no GPU")
        if "models" in steps:
            models(report, Path(folder), given.quick, given.engine, vulkan)
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


def measure(report: Report, cuda: Any, folder: Path, n_cells: str, quick: bool) -> None:
    """Time every op: a process per layout of bands, and one for prefill."""
    report.run("device", lambda: device_rates(cuda))
    cuda.empty_cache()  # the parts need the memory
    common = ["--copy", str(report.steps[-1].get("copy_gbs", 0.0)), "--cells", n_cells]
    if compiler := c.nvcc():
        try:
            c.build_native(folder, compiler)
            common += ["--library", str(folder / "libnative.so")]
        except (subprocess.CalledProcessError, OSError) as error:
            report.add("build of the CUDA kernels", f"FAILED: {error}")
    for part in shapes(quick):
        command = [sys.executable, str(BENCH / "gpu_ops.py"), *common, "--bands", *part]
        report.follow(f"times of {' '.join(part)}", command, LIMIT)


def shapes(quick: bool) -> list[list[str]]:
    """Arguments of the parts: bands and shapes."""
    first, *others = BANDS
    parts = [[first, "--batch", "1,16"], [first, "--prefill"]]
    if not quick:
        parts += [[first, "--batch", "4"], *([name, "--batch", "1,4,16"] for name in others)]
    return parts


def measure_vulkan(report: Report, folder: Path, n_cells: int, quick: bool) -> None:
    """Time every op on the first Vulkan device, in a process per layout of bands."""
    if reason := v.missing():
        report.add("times", f"skipped: {reason}")
        return
    library = v.build(folder)
    common = ["--library", str(library), "--cells", str(n_cells), *(["-r", "5"] if quick else [])]
    for part in shapes(quick):
        command = [sys.executable, str(BENCH / "gpu_vulkan.py"), *common, "--bands", *part]
        report.follow(f"times of {' '.join(part)}", command, LIMIT)


def build_engine(vulkan: bool) -> Step:
    """Build the native engine into build/gpu, with CUDA for this GPU or with Vulkan."""
    options = ["-DGGML_VULKAN=ON"] if vulkan else ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    command = ["cmake", "-S", str(ROOT), "-B", str(ENGINE), *options]
    if shutil.which("ninja") and not (ENGINE / "CMakeCache.txt").exists():
        command += ["-G", "Ninja"]
    if not vulkan and (compiler := c.nvcc()):
        command.append(f"-DCMAKE_CUDA_COMPILER={compiler}")
    if source := os.environ.get("SUBKV_LLAMA_CPP_SOURCE"):
        command.append(f"-DSUBKV_LLAMA_CPP_SOURCE={Path(source).resolve()}")
    for step in (command, ["cmake", "--build", str(ENGINE), "--parallel", str(os.cpu_count() or 1)]):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError((done.stdout + done.stderr).strip()[-300:])
    return f"built in {ENGINE}", {}


def models(report: Report, folder: Path, quick: bool, engine: bool, vulkan: bool) -> None:
    """The longest context in 8 GiB, and decoding at depth."""
    env = dict(os.environ)
    if engine:
        report.run(f"build of the engine with {'Vulkan' if vulkan else 'CUDA'}", lambda: build_engine(vulkan))
        if (ENGINE / "bin").is_dir():
            env["SUBKV_LIB_PATH"] = str(ENGINE / "bin")
    if reason := next(filter(None, map(missing, ("gguf", "llama_cpp", "click", "tqdm"))), None):
        report.add("whole models", reason)
        return
    script = [sys.executable, str(BENCH / "gpu_models.py")]
    at = ["--folder", str(folder)]
    report.follow("longest contexts", [*script, "contexts", *at], LIMIT, env=env)
    if not vulkan and not gpu():
        report.add("decoding of a whole model", "skipped: no GPU")
        return
    how = ["--depth", "4096,32768", "-r", "2"] if quick else ["--depth", "4096,32768,131072", "-r", "3"]
    report.follow("decoding of a whole model", [*script, "bench", *how, *at], LIMIT, env=env)


if __name__ == "__main__":
    sys.exit(main())
