"""Images on every architecture with M-RoPE that llama.cpp builds: exact codes give the results of f16."""

from __future__ import annotations

import itertools
from pathlib import Path

import guarantees
import pytest
import virtual
from engine import C, distance
from pictures import Vision

M_ROPE = (C.LLAMA_ROPE_TYPE_MROPE, C.LLAMA_ROPE_TYPE_IMROPE)
ARCHITECTURES = [
    "bailingmoe3",
    "glm4",
    "glm4moe",
    "hunyuan_vl",
    "paddleocr",
    "qwen2vl",
    "qwen35",
    "qwen35moe",
    "qwen3vl",
    "qwen3vlmoe",
    "qwen4exp",
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_pictures(arch: str, tmp_path: Path) -> None:
    """Latent attention, recurrent layers and selected cells are among them."""
    with virtual.model(arch) as model:
        assert C.llama_model_rope_type(model.handle) in M_ROPE
        vision = Vision("mrope", model, guarantees.bases(model, tmp_path, 16))
        logits = []
        for options in ({}, {"flash_attn": 1}, {"type_k": 0, "type_v": 0}):
            with vision.session(threads=1, **options) as s:
                logits.append(vision.decode(s, vision.parts))
        floor = max(distance(logits[0], other) for other in logits[1:])
        with vision.session(vision.exact, threads=1) as s:
            assert s.stats().n_layer_coded > 0
            assert distance(logits[0], vision.decode(s, vision.parts)) < 2 * floor
            s.clear()
            split = vision.decode(s, vision.parts, pieces=itertools.cycle([7, 20]))
            assert distance(logits[0], split) < 2 * floor
