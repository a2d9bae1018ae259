"""The prototype of research/gpu/plugin: the plug-in in a process whose GPU's backend lacks our patch.

Needs -DSUBKV_EMULATE_CUDA=ON -DSUBKV_STOCK=ON. The emulated GPU ends the process if no event orders the work of two
streams, if the host reads its memory, and if a kernel reads rows that have no memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_plugin
from each import each
from test_plugin import GPUS, LIBRARIES, MORE, SAME, TEXT, Run, decode

PROTOTYPE = LIBRARIES / "libggml-subkv-gpu.so"
N_LAYER = 2
pytestmark = pytest.mark.skipif(
    not (PROTOTYPE.is_file() and GPUS.is_file()),
    reason="the prototype beside an emulated GPU (-DSUBKV_EMULATE_CUDA=ON -DSUBKV_STOCK=ON): not built",
)
bases, model = test_plugin.bases, test_plugin.model


def patched(tmp_path: Path, model: Path, subkv: str | Path, *calls: Any, **params: Any) -> Run:
    preload = str(LIBRARIES / "libsubkv.so")
    return test_plugin.run(
        tmp_path, model, subkv, *calls, plugin=False, preload=preload, devices=["EMULATED0"], **params
    )


def plugged(tmp_path: Path, model: Path, subkv: str | Path, *calls: Any, **params: Any) -> Run:
    env = {"SUBKV_GPU": "EMULATED0", "SUBKV_GPU_COUNTS": "1"}
    given: dict[str, Any] = {"gpus": True, "file": PROTOTYPE, "devices": ["SUBKV"], "env": env} | params
    return test_plugin.run(tmp_path, model, subkv, *calls, **given)


def same(one: Run, other: Run) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(one.logits, other.logits, strict=True))


@each("name", ["a text", "a shift", "a copied stream", "sequences in one stream"])
def test_it_computes_as_the_patch(name: str, tmp_path: Path, model: Path, bases: Path) -> None:
    params, calls = SAME[name]
    windows = {"windows": params.get("n_seq_max", 1)}  # as many as the patch has: their rows are part of a prompt's
    expected = patched(tmp_path, model, bases, *calls, **params)
    found = plugged(tmp_path, model, bases, *calls, **params, **windows)
    assert "coded K/V cache" in expected.said and "coded K/V cache" in found.said
    assert same(expected, found) and len(found.logits) == sum(call[0] == "decode" for call in calls)


def test_a_layer_costs_one_cut(tmp_path: Path, model: Path, bases: Path) -> None:
    """In the graph of a token; and f16 rows take no memory. The first tokens are a prompt, whose flash attention is the
    backend's."""
    found = plugged(tmp_path, model, bases, decode(TEXT), decode(MORE[:1]))
    counts = re.findall(r"graph: (\d+) pieces, (\d+) cuts, (\d+) kernels, (\d+) pages of rows", found.log)
    assert [int(n) for n in counts[-1]] == [N_LAYER + 1, N_LAYER, 2 * N_LAYER, 0]


def test_a_restored_state_continues(tmp_path: Path, model: Path, bases: Path) -> None:
    state = str(tmp_path / "state")
    whole = plugged(tmp_path, model, bases, decode(TEXT), ["save", 0, state], decode(MORE))
    restored = plugged(tmp_path, model, bases, ["load", 0, state], decode(MORE))
    f16 = plugged(tmp_path, model, "off", decode(TEXT), ["save", 0], decode(MORE))
    assert whole.facts["state"] == f16.facts["state"] > 0
    apart = np.abs(restored.logits[-1] - whole.logits[1]).max()
    assert apart < 0.5 * np.abs(f16.logits[1] - whole.logits[1]).max()


ORDINARY: dict[str, tuple[dict[str, Any], str]] = {
    "off": ({}, ""),
    "a layer on the CPU": ({"layers": 2}, "ordinary f16 K/V cache: "),
    "the cache on the CPU": ({"offload_kqv": False}, ""),
    "all layers on the other GPU": ({"devices": ["EMULATED1", "SUBKV"], "split": [1, 0]}, ""),
    "another type": ({"type_k": 8, "type_v": 8}, "ordinary q8_0 K/V cache: its type was requested"),
    "flash attention off": ({"flash_attn_type": 0}, "ordinary f16 K/V cache: flash attention is off"),
    "a callback": ({"callback": True}, "ordinary f16 K/V cache: the program's evaluation callback"),
}


@each("name", ORDINARY)
def test_ordinary_caches(name: str, tmp_path: Path, model: Path) -> None:
    params, line = ORDINARY[name]
    calls = [decode(TEXT), decode(MORE)]
    found = plugged(tmp_path, model, "off" if name == "off" else "auto", *calls, **params)
    on_gpu = {"devices": ["EMULATED0"]} | {
        key: value for key, value in params.items() if key not in ("devices", "split")
    }
    expected = test_plugin.run(
        tmp_path, model, "off", *calls, plugin=False, preload=str(LIBRARIES / "libsubkv.so"), **on_gpu
    )
    assert line in found.said and "coded" not in found.said
    assert same(expected, found)
