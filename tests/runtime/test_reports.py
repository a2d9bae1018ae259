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


@pytest.mark.parametrize("n_rollback", [0, 1, 16, 40])
def test_pos_min_is_the_last_position_that_must_stay(
    n_rollback: int, model: engine.Model, make_layout: Callable[..., Any], tokens: Sequence[int]
) -> None:
    """Every tail after it can be removed, a longer one cannot; decoding then continues as if never decoded."""
    with session(model, make_layout(), window=(4, N_RECENT, n_rollback)) as s:
        for n in (1, 4, 5, 12, 13, 30, 70, 150):
            s.clear()
            s.decode(tokens[:n])
            pos_min, n_rs_seq = reports(s)
            assert n_rs_seq == max(1, n_rollback)
            assert 0 <= pos_min < n and (pos_min == 0 or pos_min < n - n_rs_seq)
            if pos_min > 0:
                assert not s.rm(0, pos_min)
                fresh = s.decode(tokens[100:101], n)
                s.clear()
                s.decode(tokens[:n])
                assert s.rm(0, pos_min + 1)
                again = s.decode([*tokens[pos_min + 1 : n], tokens[100]], pos_min + 1)
                assert engine.agree(fresh, again[-1:])


def test_a_truncated_sequence_reports_its_rest(
    model: engine.Model, make_layout: Callable[..., Any], tokens: Sequence[int]
) -> None:
    with session(model, make_layout()) as s:
        s.decode(tokens[:100])
        before, _ = reports(s)
        assert s.rm(0, 95)
        assert reports(s)[0] == before  # older rows do not come back
        assert s.rm(0, before + 1) and not s.rm(0, before)
        assert reports(s)[0] == before


def test_a_copied_sequence_reports_as_its_source(
    model: engine.Model, make_layout: Callable[..., Any], tokens: Sequence[int]
) -> None:
    with session(model, make_layout(), n_seq_max=2, unified=True) as s:
        s.decode(tokens[:100])
        s.cp(0, 1)
        assert reports(s, 1) == reports(s, 0) and reports(s, 0)[0] > 0


def test_adaptive_bases_keep_coded_positions(
    model: engine.Model, make_layout: Callable[..., Any], tokens: Sequence[int]
) -> None:
    options = {"window": (4, 64, 16), "adapt": "v,block=16,warm=16,length=32"}
    with session(model, make_layout(n_recent=64), **options) as s:
        s.decode(tokens[:150])
        pos_min, _ = reports(s)
        assert pos_min > 0
        assert not s.rm(0, pos_min)
        assert s.rm(0, pos_min + 1)
