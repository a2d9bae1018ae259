"""Random programs (tests/runtime/machine.py) on an architecture of each family that keeps cells in a way of its own.

SUBKV_PROGRAMS=1000 pytest tests/architectures/test_programs.py -k gemma4
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import virtual
from machine import run_programs
from promises import bases

RECURRENT = {"recurrent": True}
SLIDING = {"sliding": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek2": {},  # latent attention
    "qwen2vl": {},  # M-RoPE
    "gemma4": SLIDING,  # readers of others' rows, heads of two sizes
    "gemma3n": SLIDING,
    "gpt-oss": SLIDING,  # attention sinks
    "llama4": SLIDING,  # chunks
    "falcon-h1": RECURRENT,  # both in one layer
    "granitehybrid": RECURRENT,
    "nemotron_h": RECURRENT | {"n_rs_seq": 6},
    "kimi-linear": RECURRENT,  # latent attention beside recurrent layers
    "bailingmoe3": RECURRENT | {"n_rs_seq": 6},
    "deepseek32": {},  # chosen cells
    "dots3note": SLIDING,  # chosen cells beside a sliding window
    "qwen4exp": RECURRENT,  # chosen cells beside recurrent layers
    # not glm5-next: about once in 500 programs an assertion of llama.cpp's set_input_kpool ends the process
    "minimax-m3": {},  # chosen by every KV head
}


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("arch", FAMILIES)
def test_programs(arch: str, unified: bool, tmp_path: Path) -> None:
    with virtual.model(arch) as model:
        run_programs(model, bases(model, tmp_path, 16), 4, unified=unified, **FAMILIES[arch])
