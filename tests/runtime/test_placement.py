"""Where the nodes of coded layers run: with their cache, wherever llama.cpp's options put it.

A node that runs elsewhere would write its rows into a copy. Needs a GPU, two emulated ones
(cmake -DSUBKV_EMULATE_CUDA=ON), or lavapipe (cmake -DGGML_VULKAN=ON, and GGML_VK_VISIBLE_DEVICES=0 when it runs).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import C, Refused, session
from test_variants import exact_layout

pytestmark = pytest.mark.skipif(
    not C.llama_supports_gpu_offload(), reason="no GPU, nor an emulated one (-DSUBKV_EMULATE_CUDA=ON)"
)

N_LAYER = 4
ALL = N_LAYER + 1  # and the output
WINDOW = (4, 16, 4)
KINDS = {"encode", "attend", "kqv_out", "store_window"}  # llama.cpp names the result of combine
JOINT = "store_attend"  # of one token on a CUDA device


class Tensor(ctypes.Structure):
    """The beginning of ggml_tensor."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p)]


class Places:
    """Collects the buffer type of the result of every node of coded layers: places[kind][il]."""

    def __init__(self) -> None:
        self.found: dict[str, dict[int, str]] = {}
        self.callback = C.ggml_backend_sched_eval_callback(self._on_node)
        self.name = engine.SUBKV.ggml_get_name
        self.name.argtypes, self.name.restype = [ctypes.c_void_p], ctypes.c_char_p
        self.place = engine.SUBKV.ggml_backend_buffer_name
        self.place.argtypes, self.place.restype = [ctypes.c_void_p], ctypes.c_char_p

    def _on_node(self, node: int, ask: bool, _user: Any) -> bool:
        name = self.name(node).decode()
        kind, _, il = name.removeprefix("subkv_").partition("-")
        if ask and kind in {*KINDS, JOINT} and il.isdecimal():  # not of views
            self.found.setdefault(kind, {})[int(il)] = self.place(Tensor.from_address(node).buffer).decode()
        return not ask  # the value is not needed; continue


def on_gpu(place: str) -> bool:
    return place.startswith(("CUDA", "EMULATED", "Vulkan")) and not place.endswith("_Host")


def gpus() -> list[str]:
    """Names of the GPUs that llama.cpp lists; Mesa's CPU driver counts as one."""
    lib = C._lib  # which is linked with the library of ggml that knows devices
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.argtypes, lib.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    describe, name = lib.ggml_backend_dev_description, lib.ggml_backend_dev_name
    for function in (describe, name):
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_char_p
    devices = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
    return [describe(device).decode() for device in devices if on_gpu(name(device).decode())]


@pytest.mark.parametrize("flash_attn", [0, 1])
@pytest.mark.parametrize(
    ("arch", "n_gpu_layers", "offload_kqv"),
    [
        ("llama", -1, True),
        ("llama", N_LAYER, True),
        ("llama", 2, True),
        ("llama", 0, True),
        ("llama", -1, False),
        ("llama", 2, False),
        ("gpt-oss", -1, True),  # attention sinks are weights, which attract nodes
        ("gpt-oss", 3, True),
        ("gpt-oss", -1, False),
    ],
)
def test_nodes_run_on_the_device_of_their_cache(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    arch: str,
    n_gpu_layers: int,
    offload_kqv: bool,
    flash_attn: int,
) -> None:
    if arch == "gpt-oss" and flash_attn and any("llvmpipe" in name for name in gpus()):
        pytest.skip("gpt-oss with flash attention crashes in Mesa 22.3's lavapipe, with an f16 cache, too")
    path = tiny_model(arch, n_layer=N_LAYER)
    model, places = engine.Model(path, n_gpu_layers), Places()
    rng = random.Random(11)
    tokens = [rng.randrange(10, model.n_vocab) for _ in range(50)]
    layout = exact_layout(model, arch, tmp_path / "layout.gguf")
    options = {"flash_attn": flash_attn, "offload_kqv": offload_kqv}
    with session(model, **options) as s:
        expected = s.decode(tokens)
    with session(model, layout, window=WINDOW, on_node=places.callback, **options) as s:
        found = s.decode(tokens, pieces=[40, *[1] * 5, 5])
        stats = s.stats()
    model.free()

    joint = places.found.pop(JOINT, {})
    assert places.found.keys() == KINDS
    first = ALL - (ALL if n_gpu_layers < 0 else n_gpu_layers)
    coded = places.found["encode"]
    assert len(coded) == stats.n_layer_coded
    assert stats.n_layer_device == sum(map(on_gpu, coded.values()))
    for il, place in coded.items():
        assert on_gpu(place) == (offload_kqv and il >= first), (il, place)
        if on_gpu(place):  # that GPU and no other
            assert {by_layer[il] for by_layer in places.found.values()} == {place}
        else:
            assert not any(on_gpu(by_layer[il]) for by_layer in places.found.values())
    assert joint == {il: place for il, place in coded.items() if place.startswith(("CUDA", "EMULATED"))}
    if offload_kqv and n_gpu_layers < 0:  # shared out evenly
        assert len(set(coded.values())) == min(len(gpus()), len(coded))
    # exact codes; CUDA's kernels for many tokens round to halves
    difference = np.abs(expected - found).max() / expected.std()
    assert difference < 2e-2, difference


def test_a_cache_in_ram_beside_weights_on_the_gpu(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any]
) -> None:
    """-nkvo: the bytes and logits of the CPU, as far as the GPU computes the rest alike."""
    bands = [(8, 8), (8, 6), (16, 4)]
    path, layout = tiny_model("llama"), make_layout(bands, bands)
    tokens = [random.Random(16).randrange(10, 200) for _ in range(60)]
    found = []
    for n_gpu_layers in (0, 1, -1):
        model = engine.Model(path, n_gpu_layers)
        with session(model, layout, window=WINDOW, offload_kqv=False) as s:
            logits = s.decode(tokens, pieces=[40, *[1] * 10, 10])
            assert s.stats().n_layer_device == 0 < s.stats().n_layer_coded
            found.append((logits, s.state(0)))
        model.free()
    for logits, state in found[1:]:
        if any(name.startswith("EMULATED") for name in gpus()):
            assert np.array_equal(logits, found[0][0]) and state == found[0][1]
        assert np.abs(logits - found[0][0]).max() < 2e-2 * found[0][0].std()


def test_adaptive_bases_are_refused_on_the_gpu(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any]
) -> None:
    model = engine.Model(tiny_model("llama"))
    with (
        pytest.raises(Refused, match=r"^adapt: .*cache on \w+, .*-ngl 0"),
        session(model, make_layout(), window=(4, 64, 16), adapt="v"),
    ):
        pass
    with session(model, make_layout(), window=(4, 64, 16), adapt="v", offload_kqv=False) as s:
        s.decode([1, 2, 3])
    model.free()


def test_a_batch_of_more_tokens_than_kernels_take_is_refused(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any]
) -> None:
    model = engine.Model(tiny_model("llama"))
    layout, size = make_layout(), 1 << 16
    with (
        pytest.raises(Refused, match=rf"^n_ubatch: at most 65535 \w+ .*, a batch of {size} .*-ub.*-ngl 0"),
        session(model, layout, window=WINDOW, n_ctx=size, n_ubatch=size),
    ):
        pass
    model.free()


def test_heads_above_256_elements(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = engine.Model(tiny_model("llama", n_head=2, n_head_kv=1, head_size=512))
    layout = exact_layout(model, "llama", tmp_path / "layout.gguf")
    tokens = [random.Random(13).randrange(10, model.n_vocab) for _ in range(50)]
    with session(model, flash_attn=0) as s:
        expected = s.decode(tokens)
    with session(model, layout, window=WINDOW, flash_attn=0) as s:
        found = s.decode(tokens, pieces=[40, *[1] * 5, 5])
        assert s.stats().n_layer_device == s.stats().n_layer_coded
    assert np.abs(expected - found).max() < 2e-2 * expected.std()
    model.free()


def test_latent_attention_on_the_gpu(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The numbers of the CPU."""
    model = engine.Model(tiny_model("deepseek2"))
    layers = engine.latent_layers([(32, 8), (16, 8)], d_k=48, d_v=32, n_layer=2)
    layout = engine.load_latent(tmp_path / "layout.gguf", layers, arch="deepseek2", block_count=2)
    tokens = [random.Random(14).randrange(10, model.n_vocab) for _ in range(150)]
    with session(model, layout, window=WINDOW, offload_kqv=False) as s:
        expected = s.decode(tokens)
        assert s.stats().n_layer_device == 0
    with session(model, layout, window=WINDOW) as s:
        found = s.decode(tokens, pieces=[100, *[1] * 10, 40])
        assert s.stats().n_layer_device == s.stats().n_layer_coded == 2
    assert np.abs(expected - found).max() < 2e-2 * expected.std()
    model.free()


def test_positions_on_the_gpu_shift_as_on_the_cpu(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any]
) -> None:
    """The same bytes, of cells and of the window; in pieces, so that cells of one tile move by different amounts."""
    model, layout = engine.Model(tiny_model("llama")), make_layout()
    rng = random.Random(15)
    states: list[bytes] = []
    for on_gpu in (True, False):
        with session(model, layout, window=WINDOW, offload_kqv=on_gpu) as s:
            if on_gpu:
                s.decode([rng.randrange(10, model.n_vocab) for _ in range(150)])
                states.append(s.state(0))
            assert s.set_state(states[0], 0) == len(states[0])
            assert s.stats().n_layer_device == (s.stats().n_layer_coded if on_gpu else 0)
            assert C.llama_memory_can_shift(s.memory) and s.rm(0, 8, 40) and s.rm(0, 100, 110)
            C.llama_memory_seq_add(s.memory, 0, 40, 100, -32)
            C.llama_memory_seq_add(s.memory, 0, 110, -1, -42)
            states.append(s.state(0))  # carries the shift out
            s.decode([10, 11, 12], C.llama_memory_seq_pos_max(s.memory, 0) + 1)
    assert states[1] == states[2] != states[0]
    model.free()


@pytest.mark.parametrize("from_gpu", [True, False])
def test_a_state_moves_between_gpu_and_cpu(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any], from_gpu: bool
) -> None:
    model, layout = engine.Model(tiny_model("llama")), make_layout()
    rng = random.Random(12)
    with session(model, layout, window=WINDOW, offload_kqv=from_gpu) as s:
        s.decode([rng.randrange(10, model.n_vocab) for _ in range(150)])
        state = s.state(0)
    with session(model, layout, window=WINDOW, offload_kqv=not from_gpu) as s:
        assert s.set_state(state, 0) == len(state)
        assert s.state(0) == state
        assert s.stats().n_layer_device == (0 if from_gpu else s.stats().n_layer_coded)
    model.free()


def test_split_tensors_are_refused(tiny_model: Callable[..., Path], make_layout: Callable[..., Any]) -> None:
    """-sm tensor: one device stands for all, and its tensors are parts."""
    model = engine.Model(tiny_model("llama"), split_mode=3)  # LLAMA_SPLIT_MODE_TENSOR, which llama-cpp-python lacks
    with session(model, flash_attn=1) as s:  # an f16 cache
        assert s.ctx
    with pytest.raises(Refused, match=r"-sm tensor splits its tensors over several devices.*-sm layer"):
        engine.Session(model, make_layout(), flash_attn=1)
    model.free()
