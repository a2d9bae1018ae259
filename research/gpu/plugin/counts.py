"""Count the calls of CUDA per token with the prototype beside a CUDA backend that others built, without a GPU.

    python research/gpu/plugin/counts.py FOLDER MODEL [--plugin FILE] [--tokens 6]

FOLDER has the libraries of a llama.cpp for CUDA 13, as bins/linux-x64-cuda of npm's @node-llama-cpp/linux-x64-cuda.
FILE is the prototype for emulated GPUs. Kernels of CUDA do nothing (fake_cuda.cpp), so only calls and their order mean
something: a process that starts work which no event orders ends. Needs g++, nm and CUDA's headers.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
VERSIONS = """libcudart.so.13 { global: cuda*; __cuda*; };
libcublas.so.13 { global: cublas*; };
DRIVER { global: cu[A-Z]*; fake_cuda_report; };
"""


def symbols(library: Path, option: str, start: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", option, str(library)], capture_output=True, text=True, check=True).stdout
    return {name.split("@")[0] for name in (line.split()[-1] for line in listed.splitlines()) if name.startswith(start)}


RUNS = (("CUDA0", ""), ("SUBKV", "off"), ("SUBKV", "auto"))  # device, SUBKV
SHARED = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]


def link_libraries(folder: Path, to: Path) -> None:
    """In `to` the folder's libraries under the names that llama_cpp expects."""
    processor = sorted(folder.glob("libggml-cpu-haswell.so")) or sorted(folder.glob("libggml-cpu*.so"))[:1]
    for path in [*(p for p in folder.glob("*.so") if "-cpu" not in p.name), *processor]:
        (to / path.name).symlink_to(path.resolve())
    if not (to / "libggml.so").exists():
        (to / "libggml.so").symlink_to(next(folder.glob("libggml.*.so")).resolve())
    if (to / "libllama.so").exists():
        return
    from subkv.native import library

    llama = next(folder.glob("libllama.*.so"))  # may lack functions that llama_cpp looks up when it is imported
    theirs = symbols(llama, "--defined-only", "llama_")
    lacking = symbols(library.lib_dir() / "libllama.so", "--defined-only", "llama_") - theirs
    functions = "".join(f"int {name}() {{ return -1; }}\n" for name in sorted(lacking))
    (to / "lacking.cpp").write_text(f'extern "C" {{\n{functions}}}\n')
    link = ["-Wl,--no-as-needed,-rpath,$ORIGIN", f"-L{to}", f"-l:{llama.name}"]
    subprocess.run([*SHARED, "-o", str(to / "libllama.so"), str(to / "lacking.cpp"), *link], check=True)


def fake(folder: Path, to: Path) -> None:
    """CUDA's libraries, in to/cuda."""
    cublas = symbols(folder / "libggml-cuda.so", "--undefined-only", "cublas")
    (to / "cublas_names.h").write_text(f"#define CUBLAS(X) {' '.join(f'X({name})' for name in sorted(cublas))}\n")
    (to / "versions").write_text(VERSIONS)
    (to / "cuda").mkdir()
    made = to / "cuda" / "libcuda.so.1"
    options = [f"-I{to}", "-I/usr/local/cuda/include", f"-Wl,--version-script={to / 'versions'}"]
    subprocess.run([*SHARED, *options, "-o", str(made), str(HERE / "fake_cuda.cpp")], check=True)
    for name in ("libcudart.so.13", "libcublas.so.13"):
        (to / "cuda" / name).symlink_to(made.name)


def open_context(folder: Path, device: str, model: str, n_ctx: int, n_ubatch: int) -> tuple[Any, Any]:
    """llama_cpp's functions, and a context with all layers on the device."""
    for name in ("libggml-base.so", "libggml.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    from llama_cpp import llama_cpp as C

    ggml = ctypes.CDLL(str(folder / "libggml.so"))
    ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    find = ggml.ggml_backend_dev_by_name
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    C.llama_backend_init()
    of_model = C.llama_model_default_params()
    devices = (ctypes.c_void_p * 2)(find(device.encode()))
    assert devices[0], f"the device {device} expected, none found"
    of_model.devices, of_model.n_gpu_layers = ctypes.addressof(devices), 99
    loaded = C.llama_model_load_from_file(model.encode(), of_model)
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.flash_attn_type = n_ctx, n_ubatch, n_ubatch, 1
    context = C.llama_init_from_model(loaded, params)
    assert context, "no context"
    return C, context


def decode(C: Any, context: Any, tokens: list[int], first: int) -> Any:
    """The logits of the last token."""
    batch = C.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, first + i, 1, i + 1 == len(tokens)
        batch.seq_id[i][0] = 0
    assert C.llama_decode(context, batch) == 0
    C.llama_batch_free(batch)
    return C.llama_get_logits_ith(context, -1)


def environment(folder: Path, subkv: str, plugin: Path) -> dict[str, str]:
    env = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder)}
    return env | {"GGML_BACKEND_PATH": str(plugin), "SUBKV": subkv, "SUBKV_GPU": "CUDA0"} if subkv else env


def child(folder: Path, device: str, model: str, n_tokens: int) -> None:
    """Evaluate a prompt and tokens on the device; fake_cuda_report writes the counts of each."""
    C, context = open_context(folder, device, model, 1024, 64)
    cuda = ctypes.CDLL("libcuda.so.1")
    runs = [("a prompt of 40", list(range(100, 140)), 0)]
    runs += [(f"token {i + 1}", [200 + i], 40 + i) for i in range(n_tokens)]
    for title, tokens, first in runs:
        cuda.fake_cuda_report(b"before")
        decode(C, context, tokens, first)
        cuda.fake_cuda_report(title.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--plugin", type=Path, default=ROOT / "build" / "emulated" / "bin" / "libggml-subkv-gpu.so")
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device:
        child(args.folder, args.device, args.model, args.tokens)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        link_libraries(args.folder, folder)
        fake(args.folder, folder)
        for device, subkv in RUNS:
            env = environment(folder, subkv, args.plugin) | {"LD_LIBRARY_PATH": str(folder / "cuda")}
            command = [
                sys.executable,
                __file__,
                str(folder),
                args.model,
                "--device",
                device,
                "--tokens",
                str(args.tokens),
            ]
            done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", check=False)
            print(f"{device} {f'SUBKV={subkv}' if subkv else ''}")
            lines = re.findall(r"^(?:fake CUDA: (?!before).*|subkv: .*)$", done.stderr, re.MULTILINE)
            print("\n".join(f"    {line[:160]}" for line in lines))
            if done.returncode != 0:
                sys.exit(done.stderr[-2000:])


if __name__ == "__main__":
    main()
