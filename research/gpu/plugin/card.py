"""Time the prototype on a GPU, beside a CUDA backend that others built: f16, f16 through the device, and coded.

    python research/gpu/plugin/card.py FOLDER MODEL --plugin build/cuda/bin/libggml-subkv-gpu.so [--depths 512,8192]

FOLDER as for counts.py. Prints for each depth the median time of 64 tokens, the GPU's memory of the process, and how$
many of 64 greedy tokens are those of f16.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from counts import RUNS, decode, environment, link_libraries, open_context

N_TOKENS = 64
UBATCH = 512


def gpu_memory() -> str:
    """Of this process; "?": nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "?"
    lines = [line.split(",") for line in found.splitlines()]
    return next((used.strip() for pid, used in lines if int(pid) == os.getpid()), "?")


def child(folder: Path, device: str, model: str, depth: int) -> dict[str, Any]:
    C, context = open_context(folder, device, model, depth + 2 * N_TOKENS, UBATCH)
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(C.llama_get_model(context)))
    rng, logits = random.Random(1), None
    for first in range(0, depth, UBATCH):
        logits = decode(C, context, [rng.randrange(n_vocab) for _ in range(min(UBATCH, depth - first))], first)
    times, tokens = [], []
    for i in range(N_TOKENS):
        tokens.append(max(range(n_vocab), key=lambda token: logits[token]))
        start = time.perf_counter()
        logits = decode(C, context, [tokens[-1]], depth + i)
        times.append(time.perf_counter() - start)
    return {"ms": 1000 * statistics.median(times), "memory": gpu_memory(), "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--plugin", type=Path, required=True)
    parser.add_argument("--depths", default="512,8192")
    parser.add_argument("--device", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device:
        print(json.dumps(child(args.folder, args.device, args.model, int(args.depths))))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        link_libraries(args.folder, folder)
        for depth in args.depths.split(","):
            f16: list[int] = []
            for device, subkv in RUNS:
                command = [sys.executable, __file__, str(folder), args.model, "--plugin", str(args.plugin)]
                command += ["--depths", depth, "--device", device]
                env = environment(folder, subkv, args.plugin)
                done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
                if done.returncode != 0:
                    sys.exit(done.stderr[-2000:])
                found = json.loads(done.stdout.splitlines()[-1])
                f16 = f16 or found["tokens"]
                same = sum(x == y for x, y in zip(f16, found["tokens"], strict=True))
                title = f"{device} SUBKV={subkv}" if subkv else device
                print(
                    f"{depth:>8} cells, {title:16} {found['ms']:8.3f} ms, {found['memory']}, {same} tokens", flush=True
                )


if __name__ == "__main__":
    main()
