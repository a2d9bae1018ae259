"""Tiny seeded models of any architecture in memory; llama.cpp itself names the tensors.

    with model("gemma2") as m: …        # an engine.Model without a file

One dictionary holds the metadata of all architectures (DEFAULTS; FAMILIES has the differences): the loader ignores
keys that an architecture does not read. `llama_model_init_from_user` then creates every tensor of the architecture,
optional ones included, and requests the values of each.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine
import numpy as np
import numpy.typing as npt
import tiny
from engine import C
from families import DEFAULTS, FAMILIES

from subkv.native import library
from subkv.native.library import Signatures, declare

_ptr, _str, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_callback = ctypes.CFUNCTYPE(None, _ptr, _ptr)
_FUNCTIONS: Signatures = {
    "gguf_init_empty": (_ptr, []),
    "gguf_free": (None, [_ptr]),
    "gguf_set_val_str": (None, [_ptr, _str, _str]),
    "gguf_set_val_u32": (None, [_ptr, _str, ctypes.c_uint32]),
    "gguf_set_val_f32": (None, [_ptr, _str, ctypes.c_float]),
    "gguf_set_val_bool": (None, [_ptr, _str, ctypes.c_bool]),
    "gguf_set_arr_data": (None, [_ptr, _str, ctypes.c_int, _ptr, _size]),
    "ggml_get_name": (_str, [_ptr]),
    "ggml_backend_tensor_set": (None, [_ptr, _ptr, _size, _size]),
}
_GGML = declare(library.ggml(), _FUNCTIONS)
_LLAMA = declare(C._lib, {"llama_model_init_from_user": (_ptr, [_ptr, _callback, _ptr, C.llama_model_params])})
_ARRAYS = {bool: (7, np.uint8), int: (5, np.int32), float: (6, np.float32)}  # ggml's type of elements, ours


class _Tensor(ctypes.Structure):
    """The first members of ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", _ptr), ("ne", ctypes.c_int64 * 4))


# Names of weights: mean and standard deviation of the values; of a matrix, for inputs of variance 1.
VALUES: list[tuple[str, float, float]] = [
    (r"norm[^.]*\.weight$|norm$|_scale|scale\.weight|\.scale$", 1.0, 0.1),
    (r"rope_f", 1.3, 0.1),
    (r"ssm_a$", -1.0, 0.2),
    (r"ssm_dt\.bias", -2.0, 0.5),
    (r"attn_sinks", 2.0, 1.0),
    (r"attn_(q|k|qkv|q_b|k_b)\.weight", 0.0, 1.5),
    (r"attn_(q|k|v|qkv)\.bias", 0.0, 0.3),
    (r"\.bias$|exp_probs_b", 0.0, 0.1),
]


def values(seed: int, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A tensor's values, numpy order: by the seed and its own name and shape only."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, std = next(((m, s) for pattern, m, s in VALUES if re.search(pattern, name)), (0.0, 1.0))
    is_matrix = len(shape) > 1 and name.endswith((".weight", ".lora_a", ".lora_b"))
    if is_matrix and not mean and not name.startswith(("token_", "position_")):
        std /= np.sqrt(shape[-1])
    return (mean + std * rng.standard_normal(shape)).astype(np.float32)


def _metadata(arch: str, keys: dict[str, Any]) -> Any:
    """A gguf_context, to be freed."""
    ctx = _GGML.gguf_init_empty()
    _GGML.gguf_set_val_str(ctx, b"general.architecture", arch.encode())
    _GGML.gguf_set_val_str(ctx, b"tokenizer.ggml.model", b"no_vocab")
    for key, value in keys.items():
        name = (key if key.startswith(("xielu.", "tokenizer.")) else f"{arch}.{key}").encode()
        if isinstance(value, list):
            kind, dtype = _ARRAYS[type(value[0])]
            data = np.array(value, dtype)
            _GGML.gguf_set_arr_data(ctx, name, kind, data.ctypes.data, len(data))
        elif isinstance(value, bool):
            _GGML.gguf_set_val_bool(ctx, name, value)
        elif isinstance(value, int):
            _GGML.gguf_set_val_u32(ctx, name, value)
        elif isinstance(value, str):
            _GGML.gguf_set_val_str(ctx, name, value.encode())
        else:
            _GGML.gguf_set_val_f32(ctx, name, value)
    return ctx


class Model(engine.Model):
    """A model of an architecture; `shapes`: of its tensors in numpy order, by name."""

    def __init__(self, arch: str, seed: int = 0, n_gpu_layers: int = 0, **keys: Any) -> None:
        self.arch = arch
        self.keys = DEFAULTS | FAMILIES.get(arch, {}) | keys
        self.shapes: dict[str, tuple[int, ...]] = {}
        errors: list[BaseException] = []

        @_callback
        def fill(tensor: int, _user: Any) -> None:
            try:
                name = _GGML.ggml_get_name(tensor).decode()
                t = _Tensor.from_address(tensor)
                assert t.type == 0, f"{name}: expected float32, found type {t.type}"
                shape = tuple(reversed(t.ne))
                while len(shape) > 1 and shape[0] == 1:
                    shape = shape[1:]
                self.shapes[name] = shape
                data = values(seed, name, shape)
                _GGML.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
            except BaseException as error:
                errors.append(error)

        engine.LOG.clear()
        ctx = _metadata(arch, self.keys)
        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mtp = True  # in memory llama.cpp cannot leave them out
        self.handle = _LLAMA.llama_model_init_from_user(ctx, fill, None, params)
        _GGML.gguf_free(ctx)
        if errors:
            raise errors[0]
        assert self.handle, f"{arch} does not load: {''.join(engine.LOG[-3:])}"
        self.vocab = C.llama_model_get_vocab(self.handle)
        self.n_vocab = C.llama_vocab_n_tokens(self.vocab)


def write(path: Path, arch: str, seed: int = 0, drafting: bool = False, **keys: Any) -> Path:
    """The same model as a file, with the vocabulary of tests/tiny.py; returns its path.

    Unless drafting, the file omits layers that only predict further tokens, although llama.cpp counts some of their
    tensors.
    """
    with model(arch, seed, **keys, vocab_size=tiny.N_VOCAB) as m:
        n_layer = m.keys["block_count"] - m.keys.get("nextn_predict_layers", 0)
        left_out = () if drafting else tuple(f"blk.{il}." for il in range(n_layer, m.keys["block_count"]))
        tensors = {name: values(seed, name, ne) for name, ne in m.shapes.items() if not name.startswith(left_out)}
        return tiny.write(path, tiny.Model(arch, seed, {"dtype": "f32"}, m.keys, tensors), 0)


@contextmanager
def model(arch: str, seed: int = 0, **keys: Any) -> Iterator[Model]:
    """A Model that is freed on the way out."""
    m = Model(arch, seed, **keys)
    try:
        yield m
    finally:
        m.free()
