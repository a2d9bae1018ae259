"""Attention over chosen cells, from a list of them and under a mask over all: both keep the promises."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import virtual
from engine import SUBKV
from llama_cpp import llama_cpp as C
from promises import Trial, bases

ON_NODE = C.ggml_backend_sched_eval_callback


def listed(trial: Trial, layout: Any) -> bool:
    """Whether a token reads a list of cells, rather than all tiles."""
    names = ctypes.CDLL(C._lib._name).ggml_get_name
    names.restype, names.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    found: list[bytes] = []

    @ON_NODE
    def see(node: Any, ask: bool, _: Any) -> bool:
        found.append(names(node))
        return not ask

    with trial.coded(layout, on_node=see) as s:
        s.decode(trial.tokens)
        s.decode(trial.others[:1], pos=len(trial.tokens))
    return b"subkv_chosen_cells" in found


@pytest.mark.parametrize(("heads", "n_chosen", "of_a_list"), [(4, 16, False), (64, 8, True)])
def test_by_a_list_and_under_a_mask(heads: int, n_chosen: int, of_a_list: bool, tmp_path: Path) -> None:
    """Where many query heads share a row, a token's cells are gathered; where few do, that costs more than it saves."""
    keys = {"attention.head_count": heads, "attention.indexer.top_k": n_chosen}
    with virtual.model("deepseek32", **keys) as model:
        layout = bases(model, tmp_path, 16)
        try:
            trial = Trial(model)
            assert listed(trial, layout) == of_a_list
            floor = trial.floor()
            found = trial.promises(layout, floor)
            assert trial.reach() > 4 * floor
            assert max(found[name] for name in ("equals f16", "splits", "rollback", "state")) < 2 * floor, found
        finally:
            SUBKV.subkv_layout_free(layout)
