"""Guarantee 1 for every architecture: without a coded cache the patched llama.cpp computes the stock results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import report
import virtual

from subkv.native import library

# need other keys or tokens than those of tests/tiny.py, or an encoder's run first
NO_FILE = {"apertus", "phi3", "chameleon", "qwen3tts", "t5"}
STOCK = library.lib_dir() / "stock"
RUN = """
import ctypes, hashlib, json, sys
from pathlib import Path
import numpy as np
from llama_cpp import llama_cpp as C
quiet = C.llama_log_callback(lambda *_: None)  # llama.cpp keeps the pointer
C.llama_log_set(quiet, None)
C.llama_backend_init()
found = {}
for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    model = C.llama_model_load_from_file(str(path).encode(), C.llama_model_default_params())
    assert model, path.stem
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    tokens = np.random.default_rng(5).integers(10, n_vocab - 2, 60)
    for kind in (1, 8):  # f16, q8_0
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 256, 128, 32, 2
        params.n_threads = params.n_threads_batch = 1
        params.type_k = kind
        context = C.llama_init_from_model(model, params)
        if not context:
            found[f"{path.stem} {kind}"] = "refused"
            continue
        digest = hashlib.sha256()
        for seq, first, n in ((0, 0, 50), (0, 50, 1), (1, 0, 9)):
            batch = C.llama_batch_init(n, 0, 1)
            batch.n_tokens = n
            for i in range(n):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = tokens[first + i], first + i, 1, 1
                batch.seq_id[i][0] = seq
            assert C.llama_decode(context, batch) == 0, path.stem
            digest.update(np.ctypeslib.as_array(C.llama_get_logits(context), (n, n_vocab)).tobytes())
            C.llama_batch_free(batch)
        state = (ctypes.c_uint8 * C.llama_state_seq_get_size(context, 0))()
        digest.update(bytes(state[: C.llama_state_seq_get_data(context, state, len(state), 0)]))
        found[f"{path.stem} {kind}"] = digest.hexdigest()
        C.llama_free(context)
    C.llama_model_free(model)
print(json.dumps(found))
"""


def digests(libraries: Path, models: Path) -> dict[str, str]:
    """SHA-256 of logits and of a state by architecture and type of K, computed in a new process."""
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(libraries)}
    env["LD_LIBRARY_PATH"] = str(library.lib_dir())  # the stock libllama uses the same ggml
    command = [sys.executable, "-c", RUN, str(models)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_bit_identical_to_stock(tmp_path: Path) -> None:
    if not STOCK.is_dir():
        pytest.skip(f"stock libllama: {STOCK} is missing (build with -DSUBKV_STOCK=ON)")
    supported = {arch for arch, group, _ in report.written() if report.is_supported(group)}
    assert supported > NO_FILE
    for arch in supported - NO_FILE:
        virtual.write(tmp_path / f"{arch}.gguf", arch)
    stock = digests(STOCK, tmp_path)
    computed = {key for key, digest in stock.items() if digest != "refused"}
    assert {f"{arch} 1" for arch in supported - NO_FILE} <= computed
    assert digests(library.lib_dir(), tmp_path) == stock
