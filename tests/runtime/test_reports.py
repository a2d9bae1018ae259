"""Reports of a coded context to programs of llama.cpp: how much of a sequence's tail can be removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import engine
import pytest
from engine import C, session

N_RECENT, N_ROLLBACK = 8, 16  # of make_layout, and the default


def reports(s: Any, seq: int = 0) -> tuple[int, int]:
    return int(C.llama_memory_seq_pos_min(s.memory, seq)), int(C.llama_n_rs_seq(s.ctx))


def test_an_ordinary_context_reports_as_upstream_does(model: engine.Model, tokens: Sequence[int]) -> None:
    with session(model) as s:
        assert reports(s) == (-1, 0)
        s.decode(tokens[:60])
        assert reports(s) == (0, 0)


@pytest.mark.parametrize("n_rollback", [0, 16])
def test_a_coded_context_reports_as_an_ordinary_one(
    n_rollback: int, model: engine.Model, make_layout: Callable[..., Any], tokens: Sequence[int]
) -> None:
    """Every tail can be removed: programs need no checkpoints."""
    with session(model, make_layout(), window=(4, N_RECENT, n_rollback), n_seq_max=2, unified=True) as s:
        assert reports(s) == (-1, 0)
        s.decode(tokens[:100])
        s.cp(0, 1)
        for n in (95, 60, 3):
            assert s.rm(0, n)
            assert reports(s) == reports(s, 1) == (0, 0)


def test_adaptive_bases_keep_coded_positions(
    model: engine.Model, make_layout: Callable[..., Any], tokens: Sequence[int]
) -> None:
    options = {"window": (4, 64, 16), "adapt": "v,block=16,warm=16,length=32"}
    with session(model, make_layout(n_recent=64), **options) as s:
        s.decode(tokens[:150])
        pos_min, n_rs_seq = reports(s)
        assert pos_min > 0
        assert not s.rm(0, pos_min)
        assert s.rm(0, pos_min + 1)
        assert reports(s) == (pos_min, n_rs_seq) and n_rs_seq == 16
