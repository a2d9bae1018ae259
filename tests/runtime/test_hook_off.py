"""Guarantee 1: without a registered hook, and in ordinary contexts next to one, logits are bit-identical to stock's."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from subkv.native import library as _lib

STOCK = _lib.lib_dir() / "stock"
CALIBRATION = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct.calib.safetensors"

RUN = """
import ctypes, hashlib, json, sys
import numpy as np
mode, model, types = sys.argv[1:]
if mode == "patched-used":  # a coefficient context lived in this process before
    from subkv.native import library as _lib
    subkv = _lib.load()
from llama_cpp import llama_cpp as C
quiet = C.llama_log_callback(lambda *_: None)  # llama.cpp keeps the pointer
C.llama_log_set(quiet, None)
C.llama_backend_init()
handle = C.llama_model_load_from_file(model.encode(), C.llama_model_default_params())
n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(handle))
if mode == "patched-used":
    obs = subkv.subkv_observer_new(0)
    assert subkv.subkv_observe(obs)
    C.llama_free(C.llama_init_from_model(handle, C.llama_context_default_params()))
out = {}
tokens = [int(t) % n_vocab for t in np.random.default_rng(5).integers(10, 10**6, 96)]
for flash in (-1, 0, 1):
    for type_k, type_v in json.loads(types):
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 256, 256, 64, 2
        params.n_threads = params.n_threads_batch = 2
        params.flash_attn_type, params.type_k, params.type_v = flash, type_k, type_v
        ctx = C.llama_init_from_model(handle, params)
        if not ctx:
            out[f"{flash} {type_k} {type_v}"] = "refused"
            continue
        digest = hashlib.sha256()
        for seq, start, n in ((0, 0, 70), (0, 70, 1), (1, 0, 9), (0, 71, 1)):
            batch = C.llama_batch_init(n, 0, 1)
            batch.n_tokens = n
            for i in range(n):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = tokens[start + i], start + i, 1, 1
                batch.seq_id[i][0] = seq
            assert C.llama_decode(ctx, batch) == 0
            digest.update(np.ctypeslib.as_array(C.llama_get_logits(ctx), (n, n_vocab)).tobytes())
            C.llama_batch_free(batch)
        size = C.llama_state_seq_get_size(ctx, 0)
        buf = (ctypes.c_uint8 * size)()
        digest.update(bytes(buf[: C.llama_state_seq_get_data(ctx, buf, size, 0)]))
        C.llama_memory_seq_rm(C.llama_get_memory(ctx), 0, 40, -1)
        digest.update(str(C.llama_memory_seq_pos_max(C.llama_get_memory(ctx), 0)).encode())
        out[f"{flash} {type_k} {type_v}"] = digest.hexdigest()
        C.llama_free(ctx)
print(json.dumps(out))
"""


F16, Q4_0, Q8_0 = 1, 2, 8
TYPES = [(F16, F16), (Q8_0, F16), (Q8_0, Q8_0), (Q4_0, Q4_0)]


def digests(mode: str, folder: Path, model: Path, types: list[tuple[int, int]]) -> dict[str, str]:
    """SHA-256 of logits and sequence states by flash attention setting and cache type, computed in a new process."""
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder)}
    env["LD_LIBRARY_PATH"] = str(_lib.lib_dir())  # stock libllama uses the same ggml
    done = subprocess.run(
        [sys.executable, "-c", RUN, mode, str(model), json.dumps(types)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "arch", ["llama", "qwen2", "gemma2", "gemma4", "bloom", "gpt-oss", "deepseek2", "lfm2", "demo"]
)
def test_bit_identical_to_stock(arch: str, tiny_model: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    if not STOCK.is_dir():
        pytest.skip(f"stock libllama: {STOCK} is missing (build with -DSUBKV_STOCK=ON)")
    libraries = [next(iter(folder.glob("libllama.*"))) for folder in (STOCK, _lib.lib_dir())]
    codes = [hashlib.sha256(library.read_bytes()).hexdigest() for library in libraries]
    assert codes[0] != codes[1], "the stock library is the patched one"
    model = request.getfixturevalue("demo_model") if arch == "demo" else tiny_model(arch)
    types = TYPES if arch != "demo" else TYPES[:1]  # its forward passes take seconds
    stock = digests("stock", STOCK, model, types)
    assert len({v for v in stock.values() if v != "refused"}) > 1
    assert stock == digests("patched", _lib.lib_dir(), model, types)
    if arch != "lfm2":  # it refuses to be observed
        assert stock == digests("patched-used", _lib.lib_dir(), model, types)


def test_stock_computes_a_converted_model_like_the_base_model(demo_model: Path, tmp_path: Path) -> None:
    """Guarantee 5: stock llama.cpp loads the converted file, and computes the results of the base file."""
    if not STOCK.is_dir():
        pytest.skip(f"stock libllama: {STOCK} is missing (build with -DSUBKV_STOCK=ON)")
    converted = tmp_path / "converted.gguf"
    command = ["-m", "converter", "--bases", str(CALIBRATION), str(demo_model), "-o", str(converted)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    types = TYPES[::2]
    assert digests("stock", STOCK, converted, types) == digests("stock", STOCK, demo_model, types)
