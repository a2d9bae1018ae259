"""Random programs (tests/runtime/machine.py) on one architecture of each family with a special cell layout.

SUBKV_PROGRAMS=1000 pytest tests/architectures/test_programs.py -k gemma4
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import virtual
from guarantees import bases
from machine import Machine, run_programs

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
    "deepseek32": {},  # selected cells
    "dots3note": SLIDING,  # selected cells beside a sliding window
    "qwen4exp": RECURRENT,  # selected cells beside recurrent layers
    "glm5-next": RECURRENT,  # chosen pools of cells beside recurrent layers
    "minimax-m3": {},  # chosen by every KV head
}


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("arch", FAMILIES)
def test_programs(arch: str, unified: bool, tmp_path: Path) -> None:
    with virtual.model(arch) as model:
        run_programs(model, bases(model, tmp_path, 16), 4, unified=unified, **FAMILIES[arch])


def test_a_refused_checkpoint_empties_the_indexer(tmp_path: Path) -> None:
    """A checkpoint whose exact rows are lost empties the sequence in every part, not only in the coded cells."""
    with virtual.model("deepseek32") as model:
        program = Machine(model, bases(model, tmp_path, 16), 1.0, unified=False)
        program.decode_together(n=[1, 2, 0], word=0)
        program.mark(seq=1)
        program.go_back(which=0, seq=0)  # onto a sequence without one of the exact rows
        program.decode(seq=0, pieces=[3], word=1, start=0)
        program.teardown()


def test_a_refused_copy_leaves_the_indexer_unchanged(tmp_path: Path) -> None:
    """A copy that recurrent state refuses changes no part."""
    with virtual.model("qwen4exp") as model:
        program = Machine(model, bases(model, tmp_path, 16), 1.0, unified=True, recurrent=True)
        program.decode(seq=0, pieces=[13], word=1, start=0)
        program.decode(seq=1, pieces=[14], word=0, start=0)
        program.copy(src=0, dst=1, p0=0, n=0, all_of_it=True)  # its state is not of the last token in 1
        program.mark(seq=0)
        program.decode(seq=0, pieces=[1], word=0, start=0)
        program.go_back(which=0, seq=0)
        program.teardown()
