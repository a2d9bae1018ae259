"""Runs calls of llama.cpp in a process of its own, with the libraries that the environment names; writes the logits.

python plugin_program.py MODEL OUTPUT.npz CALLS

CALLS is JSON: {"params": {...of llama_context_params}, "calls": [...], "first": MODEL}. first: a model that
decodes a token before, in a context that stays open. kill: the process kills itself at
the end. layers: n_gpu_layers. split: tensor_split. devices: names, instead of all devices. callback: an evaluation
callback sees every node. private: ggml is not visible to libraries that do not name it. The calls:

    ["decode", [[token, position, sequence], ...]]   appends the logits of all tokens
    ["rm", seq, p0, p1]  ["cp", src, dst, p0, p1]  ["add", seq, p0, p1, by]  ["clear"]
    ["try", tokens]                                  a decode that may fail
    ["lack", n]                                      the n-th allocation of other threads fails (failing_new.cpp)
                                                     0: none
    ["save", seq]  ["load", seq]                     a sequence's state; with a third element: in this file
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np


def _batch(C: Any, tokens: list[list[int]]) -> Any:
    batch = C.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
        batch.seq_id[i][0] = sequence
    return batch


def main() -> None:
    """Run the calls; prints a JSON object about them."""
    folder = Path(os.environ["LD_LIBRARY_PATH"].split(":")[0])
    asked = json.loads(sys.argv[3])
    for name in () if asked.get("private") else ("libggml-base.so", "libggml.so"):  # as in a program linked with them
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    from llama_cpp import llama_cpp as C

    C.llama_backend_init()
    registry = ctypes.CDLL(str(folder / "libggml.so"))
    static = hasattr(registry, "ggml_backend_cpu_init")  # else a program would be beside the libraries
    registry.ggml_backend_load_all_from_path(None if static else os.fsencode(folder))
    if "first" in asked:
        other = C.llama_model_load_from_file(asked["first"].encode(), C.llama_model_default_params())
        assert (
            C.llama_decode(C.llama_init_from_model(other, C.llama_context_default_params()), _batch(C, [[10, 0, 0]]))
            == 0
        )
    of_model = C.llama_model_default_params()
    of_model.n_gpu_layers = asked.get("layers", of_model.n_gpu_layers)
    split = (ctypes.c_float * C.llama_max_devices())(*asked.get("split", []))
    of_model.tensor_split = split if any(split) else None
    find = registry.ggml_backend_dev_by_name
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    devices = (ctypes.c_void_p * 9)(*[find(name.encode()) for name in asked.get("devices", [])])
    assert all(devices[: len(asked.get("devices", []))])
    of_model.devices = ctypes.addressof(devices) if devices[0] else None
    model = C.llama_model_load_from_file(sys.argv[1].encode(), of_model)
    assert model
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    params = C.llama_context_default_params()
    params.n_threads = params.n_threads_batch = 1
    for name, value in asked["params"].items():
        setattr(params, name, value)
    if asked.get("callback"):
        params.cb_eval = C.ggml_backend_sched_eval_callback(lambda node, ask, data: True)
    context = C.llama_init_from_model(model, params)
    result = {"context": bool(context), "failed": None, "state": 0}
    logits, states = [], {}
    for name, *of in asked["calls"] if context else []:
        memory = C.llama_get_memory(context)
        if name == "decode":
            if C.llama_decode(context, _batch(C, of[0])) != 0:
                result["failed"] = name
                break
            logits.append(np.ctypeslib.as_array(C.llama_get_logits(context), (len(of[0]), n_vocab)).copy())
        elif name == "try":
            result["tried"] = C.llama_decode(context, _batch(C, of[0]))
        elif name == "lack":
            ctypes.CDLL(None).fail_new_elsewhere(ctypes.c_long(of[0]))
        elif name == "save":
            states[of[0]] = (ctypes.c_uint8 * C.llama_state_seq_get_size(context, of[0]))()
            result["state"] = C.llama_state_seq_get_data(context, states[of[0]], len(states[of[0]]), of[0])
            if of[1:]:
                Path(of[1]).write_bytes(bytes(states[of[0]]))
        elif name == "load":
            data = Path(of[1]).read_bytes() if of[1:] else states[of[0]]
            state = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
            assert C.llama_state_seq_set_data(context, state, len(state), of[0]) == len(state)
        else:
            call = {"rm": "seq_rm", "cp": "seq_cp", "add": "seq_add", "clear": "clear"}[name]
            getattr(C, f"llama_memory_{call}")(memory, *(of or [True]))
    if asked.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    np.savez(sys.argv[2], *logits)
    status = Path("/proc/self/status").read_text()
    result["rss"] = int(status.split("VmRSS:")[1].split()[0]) << 10
    print(json.dumps(result))


if __name__ == "__main__":
    main()
