"""Devices of another process are refused, because subkv's nodes are functions of this process.

No RPC server is needed: llama.cpp takes a copy of the CPU device for remote if its registry is named RPC.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
from engine import C, Model, Refused, session
from test_variants import exact_layout

from subkv.native import library

N_DEVICE = 15 + 2  # pointers of ggml_backend_device: its functions, registry and context
GET_NAME = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
NAME = ctypes.create_string_buffer(b"RPC")


class Registry(ctypes.Structure):
    """ggml_backend_reg."""

    _fields_ = [("api_version", ctypes.c_int), ("get_name", GET_NAME), ("others", ctypes.c_void_p * 4)]


def _function(name: str, *arguments: Any) -> Any:
    found = getattr(ctypes.CDLL(str(library.lib_dir() / f"libggml{library.SUFFIX}")), name)
    found.argtypes, found.restype = list(arguments), ctypes.c_void_p
    return found


@pytest.fixture
def remote() -> Iterator[Any]:
    """A list of devices for llama_model_params."""
    cpu = _function("ggml_backend_dev_by_type", ctypes.c_int)(0)
    registry = _function("ggml_backend_dev_backend_reg", ctypes.c_void_p)(cpu)
    named = Registry.from_buffer_copy(Registry.from_address(registry))
    named.get_name = GET_NAME(lambda _: ctypes.addressof(NAME))
    device = (ctypes.c_void_p * N_DEVICE).from_buffer_copy((ctypes.c_void_p * N_DEVICE).from_address(cpu))
    assert device[N_DEVICE - 2] == registry
    device[N_DEVICE - 2] = ctypes.addressof(named)
    yield (ctypes.c_void_p * 2)(ctypes.addressof(device), None)
    del named, device


def loaded(path: Path, devices: Any) -> Model:
    params = C.llama_model_default_params()
    params.n_gpu_layers = 0
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    model = Model.__new__(Model)
    model.path = path
    model.handle = C.llama_model_load_from_file(str(path).encode(), params)
    assert model.handle, "".join(engine.LOG[-3:])
    model.vocab = C.llama_model_get_vocab(model.handle)
    model.n_vocab = C.llama_vocab_n_tokens(model.vocab)
    return model


def test_devices_of_another_process(tiny_model: Callable[..., Path], remote: Any, tmp_path: Path) -> None:
    near = Model(tiny_model("llama"))
    layout = exact_layout(near, "llama", tmp_path / "layout.gguf")
    model = loaded(near.path, remote)
    reason = r"its device CPU belongs to another process \(RPC\).*use an ordinary cache type"
    with pytest.raises(Refused, match=reason), session(model, layout):
        pass
    with session(model) as ordinary:  # nodes of llama.cpp may run there
        assert ordinary.decode([1, 2, 3]) is not None
    model.free()
    near.free()
