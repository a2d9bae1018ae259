"""Whole graphs on llama.cpp's Vulkan backend: barriers between its nodes and subkv's, and messages without a device or
with a device that is too small.

Needs a build with -DGGML_VULKAN=ON and a Vulkan device, such as lavapipe. Every test is a separate process, because
the environment chooses the devices.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compiled import preloaded

from subkv.native import library as _lib

HERE = Path(__file__).resolve().parent
LAYER = "VK_LAYER_KHRONOS_validation"

pytestmark = pytest.mark.skipif(
    not (_lib.lib_dir() / "libggml-vulkan.so").is_file(), reason="a build without Vulkan (-DGGML_VULKAN=ON)"
)

# a layout of a tiny model's layers
OPENED = """
import random, sys
from pathlib import Path
import engine
from engine import C, Refused, session
model = engine.Model(Path(sys.argv[1]))
n_layer, n_head_kv = C.llama_model_n_layer(model.handle), C.llama_model_n_head_kv(model.handle)
layout = engine.signed_permutations([(il, n_head_kv, 32, 32) for il in range(n_layer)], [(8, 8), (8, 6), (16, 4)],
                                    [(32, 4)], arch="llama", block_count=n_layer, path=Path(sys.argv[2]))
tokens = [random.Random(7).randrange(10, model.n_vocab) for _ in range(60)]
"""
GRAPHS = """
for flash_attn in (0, 1):
    with session(model, layout, window=(4, 8, 4), flash_attn=flash_attn) as s:
        s.decode(tokens, pieces=PIECES)
        assert s.stats().n_layer_device == n_layer
        print(SUBKV.subkv_context_devices(s.ctx).decode())
""".replace("SUBKV", "engine.SUBKV")
BATCHES = [40, *[1] * 10, 10]
LARGE = """
try:
    with session(model, layout, OPTIONS):
        print("fine")
except Refused as error:
    print(error)
"""
# the programs' messages about -ngl 99, and the devices of layers then
WITHOUT = """
import runtime.options as options
options.note = print
options.gpu_layers(99)
with session(model, layout) as s:
    print(bool(C.llama_supports_gpu_offload()), s.stats().n_layer_device)
"""


def python(*args: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    """Runs a process in which llama.cpp uses the first Vulkan device; env: changes of the environment (None: unset)."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "GGML_VK_VISIBLE_DEVICES": "0", "PYTHONPATH": path, **env}
    here = {name: value for name, value in given.items() if value is not None}
    return subprocess.run([sys.executable, *args], env=here, capture_output=True, text=True, check=False)


def start(code: str, model: Path, tmp_path: Path, **env: str | None) -> subprocess.CompletedProcess[str]:
    return python("-c", OPENED + code, str(model), str(tmp_path / "layout.gguf"), **env)


def run(code: str, model: Path, tmp_path: Path, **env: str | None) -> str:
    """The output of a process of start() that succeeded."""
    done = start(code, model, tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def graphs(pieces: list[int]) -> str:
    """GRAPHS for a text in batches of these sizes."""
    return GRAPHS.replace("PIECES", str(pieces)).replace("tokens, ", f"tokens[:{sum(pieces)}], ")


def preload(name: str, tmp_path: Path) -> str:
    """Compiles a library of vulkan/ that is loaded between llama.cpp's backend and Vulkan."""
    return preloaded(HERE / f"vulkan/{name}.cpp", tmp_path)


def ours(tmp_path: Path) -> dict[str, str]:
    """The environment in which only barriers of subkv's dispatches are checked (vulkan/barriers.cpp)."""
    return {"LD_PRELOAD": preload("barriers", tmp_path), "SUBKV_LIBRARY": str(_lib.lib_dir() / "libsubkv.so")}


@pytest.fixture
def hazards(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a process under the validation layer's synchronisation validation: its errors."""
    found = (
        subprocess.run(["vulkaninfo", "--summary"], capture_output=True, text=True, check=False)
        if shutil.which("vulkaninfo")
        else None
    )
    if found is None or LAYER not in found.stdout:
        pytest.skip("no vulkaninfo, or no validation layer (Debian: vulkan-tools vulkan-validationlayers)")

    def errors(process: Callable[..., object], **env: str) -> list[str]:
        log = tmp_path / "validation.txt"
        settings = {
            "debug_action": "VK_DBG_LAYER_ACTION_LOG_MSG",
            "log_filename": str(log),
            "report_flags": "error",
            "enables": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT",
            "enable_message_limit": "false",
        }
        text = "".join(f"khronos_validation.{key} = {value}\n" for key, value in settings.items())
        (tmp_path / "vk_layer_settings.txt").write_text(text)
        layer = {"VK_INSTANCE_LAYERS": LAYER, "VK_LAYER_SETTINGS_PATH": str(tmp_path)}
        process(**env, **layer)
        return re.findall(r"SYNC-HAZARD-[A-Z-]+", log.read_text())

    return errors


@pytest.fixture
def decode(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """Decodes batches of this many tokens, for hazards()."""
    return lambda pieces: partial(run, graphs(pieces), tiny_model("llama"), tmp_path)


def test_a_graph_has_no_hazards(hazards: Callable[..., list[str]], decode: Callable[..., Any]) -> None:
    assert hazards(decode([1] * 20)) == []


def test_a_graph_of_batches_has_no_hazards_of_ours(
    hazards: Callable[..., list[str]], decode: Callable[..., Any], tmp_path: Path
) -> None:
    """llama.cpp's matrix products bind more than they write: between its own dispatches there are barriers here."""
    assert hazards(decode(BATCHES), **ours(tmp_path)) == []


def test_missing_barriers_of_a_graph_are_reported(
    hazards: Callable[..., list[str]], decode: Callable[..., Any], tmp_path: Path
) -> None:
    """The preloaded library removes the barriers after subkv's dispatches."""
    assert "SYNC-HAZARD-READ-AFTER-WRITE" in hazards(decode(BATCHES), **ours(tmp_path), SUBKV_LOSE="1")


@pytest.mark.parametrize(
    "chosen", ["tail_and_decode or copy_a_sequence or save_and_restore or not_taken_for", ""], ids=["some", "all"]
)
def test_sequences_and_states_have_no_hazards_of_ours(
    hazards: Callable[..., list[str]], tmp_path: Path, chosen: str
) -> None:
    """The tests of one tiny model: tails removed, sequences copied and side by side, states written and read."""

    def sequences(**env: str) -> None:
        quiet = ["-q", "-p", "no:cacheprovider", "-k", chosen]
        done = python("-m", "pytest", *quiet, str(HERE / "test_sequences.py"), **env)
        assert done.returncode == 0, done.stdout

    assert hazards(sequences, **ours(tmp_path)) == []


def test_libsubkv_links_no_vulkan() -> None:
    assert b"libvulkan" not in (_lib.lib_dir() / "libsubkv.so").read_bytes()
    assert b"libvulkan" in (_lib.lib_dir() / "libggml-vulkan.so").read_bytes()


def test_the_device_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    output = run(graphs(BATCHES), tiny_model("llama"), tmp_path)
    assert re.fullmatch(r"(Vulkan0 \(.+\)\n){2}", output)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        # a mask of 256 MiB
        ("n_ctx=1 << 16, n_ubatch=1024", r"n_ubatch, n_ctx: tensors of at most \d+ bytes expected .* smaller batches"),
        # keys of 184 MiB
        ("n_ctx=1 << 22", r"n_ctx: at most \d+ bytes of K or V per layer expected on Vulkan0, .* a smaller context"),
    ],
    ids=["batch", "context"],
)
def test_tensors_that_the_device_cannot_bind_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, options: str, refusal: str
) -> None:
    output = run(LARGE.replace("OPTIONS", options), tiny_model("llama"), tmp_path)
    if output == "fine\n":
        pytest.skip("this device binds more than 128 MiB")
    assert re.match(refusal, output), output


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        ("patch", r"layer 0: its cache would be on Vulkan0, for which there are no coefficient kernels .*-ngl 0"),
        ("bases", r"layer 1: its bases, \d+ bytes, do not fit on Vulkan0"),
    ],
)
def test_a_backend_or_a_memory_that_lacks_something_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, what: str, refusal: str
) -> None:
    env = {"LD_PRELOAD": preload("refusals", tmp_path), "SUBKV_LIBRARY": str(_lib.lib_dir() / "libsubkv.so")}
    output = run(LARGE.replace("OPTIONS", ""), tiny_model("llama"), tmp_path, SUBKV_REFUSE=what, **env)
    assert re.match(refusal, output), output


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VK_ICD_FILENAMES", "/nowhere.json"),  # no driver
        ("GGML_VK_VISIBLE_DEVICES", "7"),  # a device that is not there
        ("GGML_VK_VISIBLE_DEVICES", None),  # lavapipe, which is a CPU
    ],
)
def test_without_a_device_layers_stay_on_the_cpu_with_a_message(
    tiny_model: Callable[..., Path], tmp_path: Path, variable: str, value: str | None
) -> None:
    output = run(WITHOUT, tiny_model("llama"), tmp_path, **{variable: value})
    if output.startswith("True"):
        pytest.skip("this machine has a GPU")
    assert re.fullmatch(
        r"-ngl 99: expected a GPU, found none \(the Vulkan backend sees none .*; all layers are on the CPU\nFalse 0\n",
        output,
    )


@pytest.mark.parametrize(
    "env", [{}, {"SUBKV_CARD": "1", "GGML_VK_VISIBLE_DEVICES": None}], ids=["asked for", "the only card"]
)
def test_a_device_without_16_bit_storage_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path, env: dict[str, str | None]
) -> None:
    """llama.cpp prefers other devices; if there are none, or GGML_VK_VISIBLE_DEVICES names it, the process ends."""
    done = start(WITHOUT, tiny_model("llama"), tmp_path, LD_PRELOAD=preload("no_16bit_storage", tmp_path), **env)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "does not support 16-bit storage" in done.stderr
