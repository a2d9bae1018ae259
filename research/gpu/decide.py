"""Compares versions of the CUDA kernels with each other and with f16, on a GPU that is lent for minutes.

    python research/gpu/decide.py build before=COMMIT now=HEAD pairs=HEAD+SUBKV_WARP_PAIRS work=.    # nvcc, no GPU
    python research/gpu/decide.py run [-o FOLDER] [--seconds 540]        # there: torch, no compiler
    python research/gpu/decide.py run -m MODEL --programs BUILD/bin      # also whole models with their cache in RAM

`build` compiles kernels/cuda of every version for one architecture into build/decide (a few MiB each; `.`: the working
tree), with the macros after `+`. `run` times them in turns, each in a process of its own, which stays: a version's
kernels, structures and scripts are those of its commit. What is timed is a decoded token: a CUDA graph of 32 layers
that share their cells, with reads of 64 MiB between them, minus a graph of the reads alone. With a model, llama-bench
decodes it with weights on the GPU and the cache in RAM (-nkvo), f16 beside coded cells.

A step that fails, or does not answer in time, is recorded, and the others go on. Results are written after every step,
and the table of medians is printed last, also after SIGTERM and SIGINT. `build --arch emulated` and `run --dry` try all
of this without a GPU, on small shapes, whose times say nothing.

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
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NATIVE = [f"runtime/native/{name}" for name in ("include", "base", "bases", "contract", "capi", "cuda", "engine")]
PARTS = ["kernels", *NATIVE, "tests/kernels", "tests/compiled.py", "tests/each.py", "research/gpu"]
N_LAYER = 32
BETWEEN = 64 << 20  # bytes read between two layers
SHAPES = [(1, 2048), (1, 8192), (1, 32768), (1, 131072), (16, 2048), (16, 32768), (16, 131072)]  # sequences, cells
DRY_SHAPES = [(1, 1024), (2, 1024)]
ROUNDS = 7
F16 = "f16 (torch)"
IN_RAM = ("f16", "subkv")  # caches of llama-bench with -nkvo
DEPTHS = (2048, 8192, 32768)
TOOLS = {
    "compute-sanitizer": ["--tool", "racecheck", "--error-exitcode", "3"],
    "ncu": ["--set", "detailed", "-k", "regex:decode_kernel|combine_kernel|encode_window_kernel", "-c", "4"],
}
START, ANSWER = 180.0, 90.0  # seconds that a process has to load torch, and for another step

Call = tuple[str, ct.Structure]


def build(built: Path, versions: dict[str, str], arch: str) -> None:
    """versions: by name a commit, and macros after a + each; arch: of nvcc, or "emulated"."""
    make = "c.NVCC_FLAGS.extend(sys.argv[3:]); c.build_native(folder, c.nvcc(), sys.argv[2])"
    if arch == "emulated":
        make = "c.build_emulated(folder, *sys.argv[3:]); (folder / 'libemulated.so').rename(folder / 'libnative.so')"
    for name, version in versions.items():
        commit, *macros = version.split("+")
        folder = built / name
        folder.mkdir(parents=True, exist_ok=True)
        if commit == ".":
            subprocess.run(["cp", "-r", "--parents", *PARTS, str(folder)], cwd=ROOT, check=True)
        else:
            tar = subprocess.run(["git", "archive", commit, *PARTS], cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
                archive.extractall(folder, filter="data")
        program = f"import sys, pathlib, cuda_ops as c; folder = pathlib.Path(sys.argv[1]); {make}"
        outer = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        paths = ":".join(str(folder / part) for part in ("tests/kernels", "tests", "kernels/triton"))
        environment = outer | {"PYTHONPATH": paths, "SUBKV_CACHE": str(ROOT / "build" / "cache")}
        defines = [f"-D{macro}" for macro in macros]
        subprocess.run([sys.executable, "-c", program, str(folder), arch, *defines], check=True, env=environment)
        for part in folder.glob("*.o"):
            part.unlink()
        size = (folder / "libnative.so").stat().st_size
        print(f"{name}: {version}, {size / 2**20:.1f} MiB", flush=True)


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

    def __init__(self, built: Path, name: str, dry: bool) -> None:
        import torch

        self.torch = torch
        self.name, self.dry = name, dry
        folder = built / name if name != F16 else next(path for path in built.iterdir() if (path / "tests").exists())
        sys.path[:0] = [str(folder / part) for part in ("research/gpu", "tests/kernels", "tests")]
        if importlib.util.find_spec("pytest") is None:  # which compiling needs, not running
            sys.modules["pytest"] = ModuleType("pytest")
        self.ops, self.c = importlib.import_module("gpu_ops"), importlib.import_module("cuda_ops")
        if dry:
            self.ops.DEVICE, self.ops.N_HEAD, self.ops.GROUP = "cpu", 1, 2
        memory = self.c.HostMemory if dry else self.c.DeviceMemory
        self.library = self.c.Library(folder / "libnative.so", memory) if name != F16 else None
        self.n_layer = 1 if dry else N_LAYER
        self.junk = torch.zeros(256 if dry else BETWEEN // 4, dtype=torch.int32, device=self.ops.DEVICE)
        self.graphs: dict[str, Any] = {}
        self.kept: Any = None

    def device(self) -> dict[str, Any]:
        cuda = self.torch.cuda
        return {"device": "CPU" if self.dry else cuda.get_device_name(), "torch": self.torch.__version__}

    def prepare(self, n_stream: int, n_cells: int) -> dict[str, Any]:
        """Captures the graphs of a shape; returns checksums of the output of a layer."""
        self.graphs, self.kept = {}, None
        if not self.dry:
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
        if self.library is None:
            return {}
        out = self.kept.out.double()
        finite = bool(self.torch.isfinite(out).all())
        return {"sum": float(out.sum()), "size": float(out.abs().mean())} if finite else {"error": "NaN in the output"}

    def _runner(self, cuda: Any, calls: list[Call]) -> Callable[[], None]:
        """cuda: keeps the memory of its arguments."""

        def run(_: Any = cuda) -> None:
            stream = None if self.dry else ct.c_void_p(self.torch.cuda.current_stream().cuda_stream)
            for name, args in calls:
                self.library.run(name, args, stream)  # type: ignore[union-attr]

        return run

    def _capture(self, layer: Callable[[], Any] | None) -> Callable[[], Any]:
        """What runs all layers: a graph of them."""

        def all_layers() -> None:
            for _ in range(self.n_layer):
                self.junk.sum()
                if layer:
                    layer()

        if self.dry:
            all_layers()
            return all_layers
        side = self.torch.cuda.Stream()
        with self.torch.cuda.stream(side):
            all_layers()
        side.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            all_layers()
        replay: Callable[[], Any] = graph.replay
        return replay

    def _milliseconds(self, calls: list[Callable[[], Any]]) -> list[float]:
        """Of each call; they run one after the other."""
        if self.dry:
            marks = [time.perf_counter()]
            for call in calls:
                call()
                marks.append(time.perf_counter())
            return [1000 * (end - start) for start, end in zip(marks, marks[1:], strict=False)]
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        self.torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in zip(events, events[1:], strict=False)]

    def time(self, n: int) -> dict[str, Any]:
        """Microseconds of a layer: n runs of the graph with layers, each beside one of the reads."""
        found = []
        for _ in range(n):
            with_layers, reads = self._milliseconds([self.graphs["layers"], self.graphs["reads"]])
            found.append(1000 * (with_layers - reads) / self.n_layer)
        return {"us": found}

    def _cold(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Microseconds of a call, with a cold cache of the device."""
        if self.dry:
            return {"us": [1000 * ms for _ in range(3) for ms in self._milliseconds([call])]}
        ms = importlib.import_module("gpu_report").interleaved_ms({"": call}, 10)[""]
        return {"us": [1000 * x for x in ms]} if isinstance(ms, list) else {"error": ms}

    def encode(self, n: int) -> dict[str, Any]:
        """Microseconds of n rows' codes."""
        if self.library is None:
            return {}
        work = self.ops.Workload(self.ops.BANDS["4.3 bits"], 1, max(n, 2), 1024 if self.dry else 8192)
        cuda = self.ops.Cuda(self.library, work)
        return self._cold(self._runner(cuda, encode_calls(self.c, cuda, n)))

    def few(self, n: int) -> dict[str, Any]:
        """Microseconds of attention of n tokens of one sequence at 8,192 cells."""
        work = self.ops.Workload(self.ops.BANDS["4.3 bits"], 1, n, 1024 if self.dry else 8192)
        calls = self.ops.Cuda(self.library, work).calls() if self.library else self.ops.baseline(work)
        return self._cold(list(calls.values())[-1])  # the whole

    def once(self) -> None:
        """A layer of a token, for compute-sanitizer and ncu."""
        cuda = self.ops.Cuda(self.library, self.ops.Workload(self.ops.BANDS["4.3 bits"], 1, 1, 2048))
        for calls in (token_calls(self.c, cuda), encode_calls(self.c, cuda, 1)):
            self._runner(cuda, calls)()
        self.torch.cuda.synchronize()


def serve(built: Path, name: str, dry: bool) -> None:
    """Answers requests [method, argument…] with a line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    worker: Worker | None = None
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            worker = worker or Worker(built, name, dry)
            answer = getattr(worker, method)(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


class Process:
    """A worker, from outside: asked again in a new process after an error, because one of CUDA stays."""

    def __init__(self, built: Path, name: str, dry: bool) -> None:
        self.name = name
        self.command = [sys.executable, str(Path(__file__).resolve()), "--built", str(built), "work", name]
        self.command += ["--dry"] if dry else []
        self.child: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()
        self.gave_up = ""

    def _start(self) -> subprocess.Popen[str]:
        self.lines = lines = queue.Queue()
        child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def read() -> None:
            assert child.stdout
            for line in child.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        return child

    def ask(self, limit: float, *request: Any) -> dict[str, Any]:
        """The answer, or an error after `limit` seconds."""
        if limit <= 0 or self.gave_up:
            return {"error": self.gave_up or "no time left"}
        limit = min(limit, START if self.child is None else ANSWER)
        try:
            self.child = self.child or self._start()
            assert self.child.stdin
            print(json.dumps(request), file=self.child.stdin, flush=True)
            answer: dict[str, Any] = json.loads(self.lines.get(timeout=limit))
        except queue.Empty:
            self.gave_up = f"no answer in {limit:.0f} s"  # the next step might hang, too
            answer = {"error": self.gave_up}
        except (OSError, ValueError):
            answer = {"error": "the process has ended"}
        if "error" in answer:
            self.close()
        return answer

    def close(self) -> None:
        if self.child:
            self.child.kill()
            self.child.wait()
        self.child = None


class Ended(Exception):
    """A signal ends the program."""


class Run:
    """Steps of one run, and their results."""

    def __init__(self, built: Path, output: Path, seconds: float, dry: bool) -> None:
        self.built, self.output, self.dry = built, output, dry
        self.end = time.monotonic() + seconds
        self.results: list[dict[str, Any]] = []
        found = built.iterdir() if built.is_dir() else ()
        self.names = sorted(path.name for path in found if (path / "libnative.so").exists())
        if not self.names:
            sys.exit(f"{built}: expected kernels of a version, found none; `decide.py build NAME=COMMIT` compiles them")
        self.workers = [Process(built, name, dry) for name in (*self.names, F16)]

    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, **of: Any) -> None:
        self.results.append(of)
        print(json.dumps(of), flush=True)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            (self.output / "decide.json").write_text(json.dumps(self.results, indent=1) + "\n")
        except OSError as error:
            print(f"{self.output}: {error}", file=sys.stderr, flush=True)

    def tokens(self) -> None:
        """A decoded token in every shape, all versions in turns."""
        for worker in self.workers:
            self.add(version=worker.name, **worker.ask(self.left(), "device"))
        for shape in DRY_SHAPES if self.dry else SHAPES:
            ready = []
            for worker in self.workers:
                answer = worker.ask(self.left(), "prepare", *shape)
                self.add(version=worker.name, shape=shape, prepared=answer)
                ready += [] if "error" in answer else [worker]
            times: dict[str, list[float]] = {worker.name: [] for worker in ready}
            for repetition in range(ROUNDS):
                shift = repetition % max(1, len(ready))
                for worker in ready[shift:] + ready[:shift]:
                    if worker.child and self.left() > 0:  # a process that ended has no graphs
                        times[worker.name] += worker.ask(self.left(), "time", 1 if self.dry else 5).get("us", [])
            for name, us in times.items():
                self.add(version=name, shape=shape, us=us)

    def rows(self) -> None:
        for what, method, numbers in (("rows", "encode", (1, 128, 512)), ("tokens", "few", (2, 8, 31))):
            for n in numbers[:2] if self.dry else numbers:
                for worker in self.workers:
                    self.add(version=worker.name, **{what: n}, **worker.ask(self.left(), method, n))

    def tests(self) -> None:
        """The tests of the CUDA kernels, with the compiled ones of every version."""
        if importlib.util.find_spec("pytest") is None:
            self.add(step="tests", skipped="no package pytest")
            return
        which = "native and window_stores" if self.dry else "native"
        for i, name in enumerate(self.names):
            folder = (self.built / name).resolve()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/kernels"]
            paths = ":".join(str(folder / part) for part in ("tests/kernels", "tests", "kernels/triton"))
            environment = {"SUBKV_TEST_NATIVE": f"{folder}/libnative.so", "PYTHONPATH": paths}
            environment["SUBKV_CACHE"] = str(ROOT / "build" / "cache")
            limit = self.left() / 4 / (len(self.names) - i)
            answer = told([*command, "-k", which, "tests/kernels/test_cuda.py"], limit, folder, environment)
            self.add(version=name, step="tests", **answer)

    def cache_in_ram(self, model: Path | None, programs: Path) -> None:
        """Tokens/s of llama-bench with all weights on the GPU and the cache in RAM, a process per depth."""
        bench = programs / "llama-bench"
        if model is None or not bench.exists():
            why = "no -m MODEL" if model is None else f"no {bench}; --programs names its folder"
            self.add(step="cache in RAM", skipped=why)
            return
        depths = DRY_SHAPES[0][1:] if self.dry else DEPTHS
        for i, depth in enumerate(depths):
            command = [bench, "-m", model, "-ngl", "99", "-nkvo", "1", "-fa", "1", "-ctk", "f16", "-ctv", "f16"]
            command += ["-p", "0", "-n", "2" if self.dry else "32", "-d", str(depth), "-r", "2", "-o", "jsonl"]
            for cache in IN_RAM:
                command[command.index("-ctk") + 1] = command[command.index("-ctv") + 1] = cache
                limit = self.left() / 4 / (len(depths) - i)  # of each cache; half of the time is for the tools
                answer = told([str(word) for word in command], limit)
                for line in answer.pop("output").splitlines():
                    if line.startswith("{"):
                        row = json.loads(line)
                        answer |= {"kinds": [row["type_k"], row["type_v"]], "tokens_per_s": row["samples_ts"]}
                self.add(version=cache, in_ram=depth, **answer)

    def tools(self) -> None:
        found = [tool for tool in TOOLS if shutil.which(tool)] if not self.dry else []
        for i, tool in enumerate(found):
            for j, name in enumerate(self.names):
                once = [tool, *TOOLS[tool], sys.executable, str(Path(__file__).resolve())]
                limit = self.left() / (len(self.names) * (len(found) - i) - j)
                self.add(version=name, tool=tool, **told([*once, "--built", str(self.built), "once", name], limit))

    def all(self, model: Path | None, programs: Path) -> None:
        def stop(*_: Any) -> None:
            raise Ended

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        steps: list[Callable[[], None]] = [self.tokens, self.rows, self._close, self.tests]
        steps += [lambda: self.cache_in_ram(model, programs), self.tools]
        try:
            for step in steps:
                try:
                    step()
                except Exception as error:
                    if isinstance(error, Ended):
                        raise
                    self.add(error=f"{type(error).__name__}: {str(error)[:300]}")
        except Ended:
            self.add(error="ended by a signal")
        finally:
            self._close()
            print(table(self.results), flush=True)

    def _close(self) -> None:
        for worker in self.workers:
            worker.close()


def told(
    command: list[str], limit: float, folder: Path | None = None, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """The end of what a program printed, and its exit status; it has `limit` seconds."""
    outputs: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    if limit <= 0:
        return {"error": "no time left", "output": ""}
    try:
        done = subprocess.run(
            command, timeout=max(limit, 1), cwd=folder, env=os.environ | (environment or {}), check=False, **outputs
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return {"error": f"no end in {limit:.0f} s", "output": text[-6000:]}
    return {"status": done.returncode, "output": done.stdout[-6000:]}


def problems(results: list[dict[str, Any]]) -> list[str]:
    """A line for each failure of a version, with the first step that had it."""
    found: dict[tuple[str, str], str] = {}
    sums: dict[str, dict[str, float]] = {}
    for step in results:
        prepared = step.get("prepared", {})
        if "sum" in prepared:
            sums.setdefault(str(step["shape"]), {})[step["version"]] = prepared["sum"]
        error = step.get("error") or step.get("skipped") or prepared.get("error")
        if error or step.get("status"):
            what = [
                f" {name} {step[name]}"
                for name in ("step", "tool", "shape", "rows", "tokens", "in_ram")
                if name in step
            ]
            key = (step.get("version", "run"), error or f"status {step['status']}")
            found.setdefault(key, "".join(what))
    lines = [f"{version}{step}: {error}" for (version, error), step in found.items()]
    return lines + [f"outputs differ at {shape}: {of}" for shape, of in sums.items() if len(set(of.values())) > 1]


def table(results: list[dict[str, Any]]) -> str:
    """Failures, then medians, a line per shape or number of rows, with the ratio of speed to f16's."""
    medians: dict[str, dict[str, float]] = {}
    for step in results:
        if values := step.get("us") or step.get("tokens_per_s"):
            if "in_ram" in step:
                what = f"cache in RAM, {step['in_ram']} cells, tokens/s"
            elif "shape" in step:
                what = "{} x 1, {} cells, us".format(*step["shape"])
            else:
                what = f"encode {step['rows']}, us" if "rows" in step else f"{step['tokens']} tokens, 8192 cells, us"
            medians.setdefault(what, {})[step["version"]] = statistics.median(values)
    lines = problems(results)
    for what, of in medians.items():
        base = of.get(F16, of.get(IN_RAM[0]))
        parts = []
        for name, value in of.items():
            over, under = (value, base) if "tokens/s" in what else (base, value)
            parts.append(f"{name} {value:.1f}" + (f" ({over / under:.2f})" if over and under else ""))
        lines.append(f"{what:<24} {' · '.join(parts)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--built", type=Path, default=ROOT / "build" / "decide", help="folder of the compiled versions")
    commands = parser.add_subparsers(dest="command", required=True)
    builds = commands.add_parser("build", help="compile versions, NAME=COMMIT each")
    builds.add_argument("versions", nargs="+")
    builds.add_argument("--arch", default="sm_90")
    runs = commands.add_parser("run", help="time them on this machine's GPU")
    runs.add_argument("-o", "--output", type=Path, default=Path("."))
    runs.add_argument("--seconds", type=float, default=540)
    runs.add_argument("-m", "--model", type=Path, help="a model for llama-bench")
    runs.add_argument("--programs", type=Path, default=ROOT / "build" / "gpu" / "bin", help="the folder of llama-bench")
    works, once = (commands.add_parser(command) for command in ("work", "once"))
    for command in (works, once):
        command.add_argument("name")
    for command in (runs, works):
        command.add_argument("--dry", action="store_true", help="on the CPU, small shapes")
    given = parser.parse_args()
    if given.command == "build":
        build(given.built, dict(version.split("=", 1) for version in given.versions), given.arch)
    elif given.command == "run":
        Run(given.built, given.output, given.seconds, given.dry).all(given.model, given.programs)
    elif given.command == "work":
        serve(given.built, given.name, given.dry)
    else:
        Worker(given.built, given.name, False).once()
    return 0


if __name__ == "__main__":
    sys.exit(main())
