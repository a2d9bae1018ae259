"""Models with random weights: the longest context in a given memory, and decoding at depth. A part of gpu.py.

    python research/gpu/gpu_models.py contexts --memory 8 [-m M.gguf --bases SIDECAR.gguf] [--folder DIR]
    python research/gpu/gpu_models.py bench --depth 4096,32768,131072 -r 3 [-m M.gguf --bases SIDECAR.gguf]

Without -m, the program writes a model with the shape of an 8B Llama (reduced vocabulary) in Q4_0, 4 GB, and random
orthonormal bases of mixed bands to --folder. Sizes of contexts come from llama.cpp's accounting on the CPU, which
allocates nothing. Needs the native engine (installed, or SUBKV_LIB_PATH).
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "tests", ROOT / "tests" / "format", ROOT / "kernels" / "triton", Path(__file__).parent]
sys.path[:0] = [str(folder) for folder in FOLDERS]
sys.path += [str(ROOT / "python"), str(ROOT)]  # after an installed package, which includes its libraries

import tiny  # noqa: E402
import writer  # noqa: E402
from gpu_ops import BANDS  # noqa: E402
from gpu_report import emit, failed  # noqa: E402

SHAPE_8B = {
    "n_layer": 32,
    "n_embd": 4096,
    "n_head": 32,
    "n_head_kv": 8,
    "head_size": 128,
    "n_ff": 14336,
    "n_ctx_train": 1 << 20,
    "rope_freq_base": 500000.0,
    "dtype": "q4_0",
}
BUDGETED = ("f16", "q8_0", "q4_0", "subkv")
TIMED = ("f16", "q8_0", "subkv")
STEP = 1024  # granularity of the longest context, in tokens
MOST = 1 << 22


def make_model(folder: Path, **shape: Any) -> tuple[Path, Path]:
    """Write a Llama of this shape (tiny.DIMS) and a sidecar with its bases."""
    model = tiny.build(folder / "model.gguf", "llama", **shape)
    dims = tiny.DIMS | shape
    d = dims["head_size"]
    k, v = ([(n * d // 128, bits) for n, bits in bands] for bands in BANDS["4.3 bits"])
    coded = writer.random_layers(dims["n_layer"], dims["n_head_kv"], d, d, k, v, kind="orthonormal")
    return model, writer.write(folder / "bases.gguf", writer.metadata(coded, block_count=dims["n_layer"]))


def longest(fits: Callable[[int], bool]) -> int:
    """The largest multiple of STEP up to MOST that fits, if all smaller ones do; 0: none."""
    n_fit = bisect.bisect_left(range(STEP, MOST + 1, STEP), True, key=lambda n: not fits(n))
    return n_fit * STEP


def contexts(model: Path, bases: Path, budget: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Per cache: the longest context of one sequence in `budget` bytes, weights included, and its bytes by kind."""
    from subkv.engine.cache import choose_cache, flash_attention
    from subkv.engine.memory import needed
    from subkv.engine.request import CacheRequest
    from subkv.format.layout import Layout
    from subkv.native.binding import C

    for name in BUDGETED:
        coded = name == "subkv"
        choice = choose_cache(model, CacheRequest(name, bases=bases if coded else None))
        params = C.llama_context_default_params()
        params.n_batch, params.n_ubatch = 2048, 512
        params.flash_attn_type = flash_attention("on", choice)
        params.type_k, params.type_v = choice.type_k, choice.type_v
        fixed = {"weights": model.stat().st_size}
        if coded:
            with Layout(bases) as layout:
                fixed["bases"] = int(layout.description["bytes_bases"])

        def sizes(n_ctx: int, choice: Any = choice, params: Any = params, fixed: Any = fixed) -> dict[str, int]:
            params.n_ctx = n_ctx
            by_kind = needed(model, choice, params, n_ctx)
            if not by_kind["cells"]:
                raise RuntimeError(f"{choice.name}: llama.cpp cannot create a context of {n_ctx} tokens")
            return fixed | {kind: round(size) for kind, size in by_kind.items()}

        n_ctx = longest(lambda n: sum(sizes(n).values()) <= budget)
        yield name, {"n_ctx": n_ctx, **(sizes(n_ctx) if n_ctx else fixed)}


def emit_contexts(model: Path, bases: Path, gib: float) -> None:
    for name, numbers in contexts(model, bases, int(gib * 2**30)):
        parts = ", ".join(
            f"{kind} {size / 2**20:.0f} MiB" for kind, size in numbers.items() if kind != "n_ctx" and size
        )
        emit(f"longest context in {gib:g} GiB: {name}", f"{numbers['n_ctx']} tokens ({parts})", **numbers)


def engine_folder() -> Path:
    """The folder of the native engine. Raises ImportError if there is none."""
    from subkv.native.library import lib_dir

    return lib_dir()


def bench(model: Path, bases: Path, depth: int, repetitions: int, n_gpu_layers: int, n_gen: int = 32) -> None:
    """Run runtime.bench at a depth, with interleaved caches; ratios are to the fastest ordinary cache."""
    command = [sys.executable, "-m", "runtime.bench", "-m", model, "--bases", bases, "-ctk", ",".join(TIMED)]
    command += ["-fa", "on", "-ngl", n_gpu_layers, "-r", repetitions, "-o", "json"]
    command += ["-p", "512", "-n", n_gen, "-d", depth]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise RuntimeError(f"runtime.bench: exit status {done.returncode}: {reason}")
    objects = json.loads(done.stdout)
    for test in dict.fromkeys(o["test"] for o in objects):
        results = [o for o in objects if o["test"] == test]
        best = max(o["median_ts"] for o in results if o["type_k"] != "subkv")
        for o in results:
            ratio = f", {o['median_ts'] / best:.2f} times the best ordinary cache" if o["type_k"] == "subkv" else ""
            numbers = {k: v for k, v in o.items() if k not in ("test", "model_filename")}
            result = f"{o['median_ts']:.2f} tokens/s, {o['kv_bytes_per_token']} bytes per token, {o['kernel']}{ratio}"
            emit(f"whole model, {test}: {o['type_k']}", result, **numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["contexts", "bench"])
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--bases", type=Path)
    parser.add_argument("--folder", type=Path, help="folder for the model; default: a temporary one")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB")
    parser.add_argument("--depth", default="4096,32768,131072")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("-ngl", type=int, default=99, help="layers on the GPU")
    given = parser.parse_args()
    if (given.model is None) != (given.bases is None):
        parser.error("-m: expected --bases with it, found one without the other")
    on_gpu = given.part == "bench" and given.ngl
    what = "decoding of a whole model" if on_gpu else "whole models"
    try:
        engine = engine_folder()
    except ImportError as error:
        emit(what, f"skipped: {error}")
        return 0
    if on_gpu and not list(engine.glob("*ggml-cuda*")):
        emit(what, f"skipped: the engine in {engine} was built without CUDA; --engine builds one")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model, bases = given.model, given.bases
        if model is None:
            model, bases = folder / "model.gguf", folder / "bases.gguf"
            if not bases.exists():
                make_model(folder, **SHAPE_8B)
        if given.part == "contexts":
            emit_contexts(model, bases, given.memory)
            return 0
        ok = True
        for depth in given.depth.split(","):
            try:
                bench(model, bases, int(depth), given.repetitions, given.ngl)
            except Exception as error:
                ok = False
                emit(f"whole model at depth {depth}", failed(error))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
