"""Compares versions of the CUDA kernels with each other and with f16, on a GPU that is lent for minutes.

    python research/gpu/decide.py build before=COMMIT now=HEAD work=.    # here: nvcc, no GPU
    python research/gpu/decide.py run [-o FOLDER] [--seconds 540]        # there: torch, no compiler

`build` compiles kernels/cuda of every version for one architecture into build/decide (a few MiB each; `.`: the working
tree). `run` times them in turns, each in a process of its own, which stays: a version's kernels, structures and scripts
are those of its commit. What is timed is a decoded token: a CUDA graph of 32 layers that share their cells, with reads
of 64 MiB between them, minus a graph of the reads alone. Results are written after every step, and the table of medians
is printed last.

A step is kept if it saves 8 µs a layer at 2,048 cells (a shorter chain before the first product), or 3 (fewer waits in
short contexts), or if one token at 131,072 cells takes at most 110 µs a layer (H100).
"""

from __future__ import annotations

import argparse
import ctypes as ct
import importlib.util
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "decide"
NATIVE = [f"runtime/native/{name}" for name in ("base", "capi", "engine", "hook")]  # for headers
PARTS = ["kernels", *NATIVE, "tests/kernels", "tests/compiled.py", "research/gpu"]
N_LAYER = 32
BETWEEN = 64 << 20  # bytes read between two layers
SHAPES = [(1, 2048), (1, 8192), (1, 32768), (1, 131072), (16, 2048), (16, 32768), (16, 131072)]  # sequences, cells
ROUNDS = 7
F16 = "f16 (torch)"
TOOLS = {
    "compute-sanitizer": ["--tool", "racecheck", "--error-exitcode", "3"],
    "ncu": ["--set", "detailed", "-k", "regex:decode_kernel|combine_kernel|encode_window_kernel", "-c", "4"],
}

Call = tuple[str, ct.Structure]


def build(versions: dict[str, str], arch: str) -> None:
    """versions: commit by name."""
    for name, commit in versions.items():
        folder = BUILT / name
        folder.mkdir(parents=True, exist_ok=True)
        if commit == ".":
            subprocess.run(["cp", "-r", "--parents", *PARTS, str(folder)], cwd=ROOT, check=True)
        else:
            tar = subprocess.run(["git", "archive", commit, *PARTS], cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
                archive.extractall(folder, filter="data")
        program = "import sys, pathlib, cuda_ops as c; c.build_native(pathlib.Path(sys.argv[1]), c.nvcc(), sys.argv[2])"
        outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        paths = ":".join(str(folder / part) for part in ("tests/kernels", "tests", "kernels/triton"))
        environment = outer | {"PYTHONPATH": paths, "SUBKV_CACHE": str(ROOT / "build" / "cache")}
        subprocess.run([sys.executable, "-c", program, str(folder), arch], check=True, env=environment)
        for part in folder.glob("*.o"):
            part.unlink()
        size = (folder / "libnative.so").stat().st_size
        print(f"{name}: {commit}, {size / 2**20:.1f} MiB", flush=True)


def token_calls(c: Any, cuda: Any) -> list[Call]:
    """A layer's launches for one token of every sequence, as the engine of that version makes them. c: its cuda_ops."""
    combine = ("combine", cuda.combine)
    slots = cuda.work.n_stream * cuda.combine.slots_of_seq
    if hasattr(c, "StoreRows"):
        e = cuda.encode
        same = {name: getattr(e, name) for name in ("k", "v", "k_head", "k_token", "v_head", "v_token", "fresh")}
        tiles = {"k_tiles": cuda.attend.k_tiles, "v_tiles": cuda.attend.v_tiles}
        window, rows = cuda.combine.window, cuda.combine.slots
        store = c.StoreRows(**same, **tiles, window=window, slots=rows, n_slots=slots)
        if "attend" in dict(c.StoreAndAttend._fields_):  # combine then reads the exact keys
            return [("store_and_attend", c.StoreAndAttend(store=store, attend=cuda.attend)), combine]
        done = c.Combine.from_buffer_copy(cuda.combine)
        done.has_exact = True
        return [("store_and_attend", c.StoreAndAttend(store=store, args=done)), ("combine", done)]
    encoded = c.EncodeAndAttend(encode=cuda.encode, attend=cuda.attend)
    width = 2 * cuda.heads.layer.n_head_kv * cuda.heads.layer.d_k
    stored = c.Store(
        window=cuda.combine.window, fresh=cuda.encode.fresh, slots=cuda.combine.slots, n_slots=slots, width=width
    )
    return [("encode_and_attend", encoded), combine, ("store_window", stored)]


def encode_calls(c: Any, cuda: Any, n: int) -> list[Call]:
    """Codes of n rows: of a batch, or where codes are made later, of the window."""
    args = c.Encode.from_buffer_copy(cuda.encode)
    args.n_tok = n
    if not hasattr(c, "EncodeWindow") or n > c.WINDOW_ROWS:
        return [("encode", args)]
    rows = (ct.c_int32 * (2 * c.WINDOW_ROWS))(*[x for i in range(c.WINDOW_ROWS) for x in (i, i)])
    return [("encode_window", c.EncodeWindow(encode=args, window=cuda.combine.window, rows=rows))]


class Worker:
    """One version, in its process: answers lines of JSON on its standard input."""

    def __init__(self, name: str) -> None:
        import torch

        self.torch = torch
        self.name = name
        folder = BUILT / name if name != F16 else next(path for path in BUILT.iterdir() if (path / "tests").exists())
        sys.path[:0] = [str(folder / part) for part in ("research/gpu", "tests/kernels", "tests")]
        if importlib.util.find_spec("pytest") is None:  # which compiling needs, not running
            sys.modules["pytest"] = ModuleType("pytest")
        self.ops, self.c = importlib.import_module("gpu_ops"), importlib.import_module("cuda_ops")
        self.library = self.c.Library(folder / "libnative.so", self.c.DeviceMemory) if name != F16 else None
        self.junk = torch.empty(BETWEEN // 4, dtype=torch.int32, device="cuda")
        self.graphs: dict[str, Any] = {}
        self.kept: Any = None

    def prepare(self, n_stream: int, n_cells: int) -> dict[str, Any]:
        """Captures the graphs of a shape; returns a checksum of the output of a layer."""
        self.graphs, self.kept = {}, None
        self.torch.cuda.empty_cache()
        self.torch.manual_seed(0)
        work = self.ops.Workload(self.ops.BANDS["4.3 bits"], n_stream, 1, n_cells)
        if self.library is None:
            calls = self.ops.baseline(work)
            layer = next(iter(calls.values()))
            self.kept = calls
        else:
            cuda = self.ops.Cuda(self.library, work)
            self.kept = cuda
            layer = self._runner(cuda, token_calls(self.c, cuda))
        self.graphs["layers"] = self._capture(layer)
        self.graphs["reads"] = self._capture(None)
        out = self.kept.out.double() if self.library else self.torch.zeros(1)
        return {"sum": float(out.sum()), "size": float(out.abs().mean())}

    def _runner(self, cuda: Any, calls: list[Call]) -> Callable[[], None]:
        def run() -> None:
            stream = ct.c_void_p(self.torch.cuda.current_stream().cuda_stream)
            for name, args in calls:
                self.library.run(name, args, stream)  # type: ignore[union-attr]

        return run

    def _capture(self, layer: Callable[[], Any] | None) -> Any:
        def all_layers() -> None:
            for _ in range(N_LAYER):
                self.junk.sum()
                if layer:
                    layer()

        side = self.torch.cuda.Stream()
        with self.torch.cuda.stream(side):
            all_layers()
        side.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            all_layers()
        return graph

    def time(self, n: int) -> dict[str, Any]:
        """Microseconds of a layer: n runs of the graph with layers, each beside one of the reads."""
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(3)]
        found = []
        for _ in range(n):
            events[0].record()
            self.graphs["layers"].replay()
            events[1].record()
            self.graphs["reads"].replay()
            events[2].record()
            self.torch.cuda.synchronize()
            with_layers, reads = (events[i].elapsed_time(events[i + 1]) for i in range(2))
            found.append(1000 * (with_layers - reads) / N_LAYER)
        return {"us": found}

    def encode(self, n: int) -> dict[str, Any]:
        """Microseconds of n rows' codes."""
        if self.library is None:
            return {}
        work = self.ops.Workload(self.ops.BANDS["4.3 bits"], 1, max(n, 2), 8192)
        run = self._runner(None, encode_calls(self.c, self.ops.Cuda(self.library, work), n))
        ms = importlib.import_module("gpu_report").interleaved_ms({"encode": run}, 10)["encode"]
        return {"us": [1000 * x for x in ms]} if isinstance(ms, list) else {"error": ms}

    def few(self, n: int) -> dict[str, Any]:
        """Microseconds of attention of n tokens of one sequence at 8,192 cells."""
        ops, gpu_report = self.ops, importlib.import_module("gpu_report")
        work = ops.Workload(ops.BANDS["4.3 bits"], 1, n, 8192)
        calls = ops.Cuda(self.library, work).calls() if self.library else ops.baseline(work)
        name = list(calls)[-1]  # of the whole
        ms = gpu_report.interleaved_ms({name: calls[name]}, 10)[name]
        return {"us": [1000 * x for x in ms]} if isinstance(ms, list) else {"error": ms}

    def once(self) -> None:
        """A layer of a token, for compute-sanitizer and ncu."""
        cuda = self.ops.Cuda(self.library, self.ops.Workload(self.ops.BANDS["4.3 bits"], 1, 1, 2048))
        for calls in (token_calls(self.c, cuda), encode_calls(self.c, cuda, 1)):
            self._runner(cuda, calls)()
        self.torch.cuda.synchronize()

    def serve(self) -> None:
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = getattr(self, name)(*arguments)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(json.dumps(answer), flush=True)


class Process:
    """A worker, from outside."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "work", name]
        self.name = name
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *request: Any) -> dict[str, Any]:
        assert self.child.stdin and self.child.stdout
        try:
            print(json.dumps(request), file=self.child.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        except (OSError, ValueError):
            return {"error": "the process has ended"}
        return answer


def run(folder: Path, seconds: float) -> None:
    """Times all built versions, and f16."""
    end = time.monotonic() + seconds
    names = sorted(path.name for path in BUILT.iterdir() if (path / "libnative.so").exists())
    workers = [Process(name) for name in (*names, F16)]
    results: list[dict[str, Any]] = []

    def add(**of: Any) -> None:
        results.append(of)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "decide.json").write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(of), flush=True)

    for n_stream, n_cells in SHAPES:
        ready = []
        for worker in workers:
            answer = worker.ask("prepare", n_stream, n_cells)
            add(version=worker.name, shape=[n_stream, n_cells], prepared=answer)
            ready += [] if "error" in answer else [worker]
        times: dict[str, list[float]] = {worker.name: [] for worker in ready}
        for repetition in range(ROUNDS):
            if time.monotonic() > end:
                break
            for worker in ready[repetition % max(1, len(ready)) :] + ready[: repetition % max(1, len(ready))]:
                times[worker.name] += worker.ask("time", 5).get("us", [])
        for name, us in times.items():
            add(version=name, shape=[n_stream, n_cells], us=us)
    for n in (1, 128, 512):
        for worker in workers:
            if time.monotonic() < end:
                add(version=worker.name, rows=n, **worker.ask("encode", n))
    for n in (2, 8, 31):
        for worker in workers:
            if time.monotonic() < end:
                add(version=worker.name, tokens=n, **worker.ask("few", n))
    for worker in workers:
        worker.child.kill()
    for tool, options in TOOLS.items():
        for name in names if shutil.which(tool) and time.monotonic() < end else ():
            once = [tool, *options, sys.executable, str(Path(__file__).resolve()), "once", name]
            try:
                limit = max(1.0, end - time.monotonic())
                done = subprocess.run(once, capture_output=True, text=True, timeout=limit, errors="replace")
                add(version=name, tool=tool, status=done.returncode, output=(done.stdout + done.stderr)[-6000:])
            except subprocess.TimeoutExpired:
                add(version=name, tool=tool, status=-1, output="no time left")
    print(table(results), flush=True)


def table(results: list[dict[str, Any]]) -> str:
    """Medians in µs, a line per shape or number of rows, and of tokens the ratio to f16."""
    medians: dict[str, dict[str, float]] = {}
    for step in results:
        if step.get("us"):
            what = f"encode {step['rows']}" if "rows" in step else f"{step.get('tokens')} tokens, 8192 cells"
            what = "{} x 1, {} cells".format(*step["shape"]) if "shape" in step else what
            medians.setdefault(what, {})[step["version"]] = statistics.median(step["us"])
    lines = []
    for what, of in medians.items():
        base = of.get(F16)
        ratios = [f"{name} {us:.1f}" + (f" ({base / us:.2f})" if base else "") for name, us in of.items()]
        lines.append(f"{what:<24} {' · '.join(ratios)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    builds = commands.add_parser("build", help="compile versions, NAME=COMMIT each")
    builds.add_argument("versions", nargs="+")
    builds.add_argument("--arch", default="sm_90")
    runs = commands.add_parser("run", help="time them on this machine's GPU")
    runs.add_argument("-o", "--output", type=Path, default=Path("."))
    runs.add_argument("--seconds", type=float, default=540)
    for command in ("work", "once"):
        commands.add_parser(command).add_argument("name")
    given = parser.parse_args()
    if given.command == "build":
        build(dict(version.split("=", 1) for version in given.versions), given.arch)
    elif given.command == "run":
        run(given.output, given.seconds)
    else:
        worker = Worker(given.name)
        worker.serve() if given.command == "work" else worker.once()
    return 0


if __name__ == "__main__":
    sys.exit(main())
