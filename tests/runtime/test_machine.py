"""Promise 4 as random programs, see machine.py. A campaign of more, and other ones in every run:

SUBKV_PROGRAMS=100000 pytest tests/runtime/test_machine.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import engine
import pytest
from engine import distance, session
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Machine
from test_variants import exact_layout

N_PROGRAMS = int(os.environ.get("SUBKV_PROGRAMS", "0"))


def bound(model: engine.Model, tokens: list[int]) -> float:
    """Twice what an f16 cache's logits differ by between attention kernels and splits, as in test_exact.py."""
    with session(model, flash_attn=0, threads=1) as s:
        one = s.decode(tokens)
    with session(model, flash_attn=0, threads=1) as s:
        split = s.decode(tokens, pieces=[20] * 10)
    with session(model, flash_attn=1, threads=1) as s:
        flash = s.decode(tokens)
    return 2 * max(distance(one, flash), distance(one, split))


@pytest.mark.parametrize(
    ("arch", "n", "options"),
    [
        ("llama", 40, {"unified": True}),
        ("llama", 40, {"unified": False}),
        ("llama", 30, {"unified": False, "adapt": True}),
        ("gemma2", 25, {"unified": True}),
        ("gemma2", 20, {"unified": False}),
        ("lfm2", 20, {"unified": True, "recurrent": True}),
        ("lfm2", 15, {"unified": False, "recurrent": True}),
        ("qwen35", 10, {"unified": True, "recurrent": True}),
    ],
)
def test_programs(
    tiny_model: Callable[..., Path], tokens: list[int], tmp_path: Path, arch: str, n: int, options: dict[str, bool]
) -> None:
    """gemma2: a sliding half beside the coded one; lfm2 and qwen35: recurrent state, of which llama.cpp has no sliding
    kind with layers that can be coded.
    """
    model = engine.Model(tiny_model(arch))
    layout, most = exact_layout(model, arch, tmp_path / "layout.gguf"), bound(model, tokens)
    run_state_machine_as_test(
        lambda: Machine(model, layout, most, **options),
        settings=settings(
            max_examples=N_PROGRAMS or n,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=not N_PROGRAMS,
            suppress_health_check=list(HealthCheck),
        ),
    )
    model.free()
