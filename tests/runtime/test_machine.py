"""Guarantee 4 in random programs, see machine.py. More programs, new ones in every run:

SUBKV_PROGRAMS=100000 pytest tests/runtime/test_machine.py tests/architectures/test_programs.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import pytest
from machine import run_programs
from test_variants import exact_layout


@pytest.mark.parametrize(
    ("arch", "n", "options"),
    [
        ("llama", 40, {"unified": True}),
        ("llama", 20, {"unified": True, "recent_bits": 10}),
        ("llama", 20, {"unified": False, "recent_bits": 10}),
        ("llama", 40, {"unified": False}),
        ("llama", 30, {"unified": False, "adapt": True}),
        ("gemma2", 25, {"unified": True, "sliding": True}),
        ("gemma2", 20, {"unified": False, "sliding": True}),
        ("lfm2", 20, {"unified": True, "recurrent": True}),
        ("lfm2", 15, {"unified": False, "recurrent": True}),
        ("lfm2", 20, {"unified": True, "recurrent": True, "n_rs_seq": 6}),
        ("qwen35", 10, {"unified": True, "recurrent": True}),
        ("qwen35", 10, {"unified": False, "recurrent": True, "n_rs_seq": 6}),
    ],
)
def test_programs(tiny_model: Callable[..., Path], tmp_path: Path, arch: str, n: int, options: dict[str, Any]) -> None:
    """gemma2: a sliding half next to the coded one; lfm2 and qwen35: recurrent state. llama.cpp has no recurrent models
    with
    sliding windows whose other layers can be coded.
    """
    model = engine.Model(tiny_model(arch))
    recent_bits = options.get("recent_bits", 16)
    others = {name: value for name, value in options.items() if name != "recent_bits"}
    run_programs(model, exact_layout(model, arch, tmp_path / "layout.gguf", recent_bits=recent_bits), n, **others)
    model.free()
