"""An exact window of integers (subkv.recent_bits 10): its guarantees, and cases in which rows stay halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine
import pytest
from engine import agree, distance, last_error, session

pytestmark = pytest.mark.skipif(engine.C.llama_supports_gpu_offload(), reason="a cache on a GPU holds halves")

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 16, 8)

Make = Callable[..., Any]


@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_results_are_near_the_f16_cache(model: engine.Model, tokens: list[int], make_layout: Make, mean: float) -> None:
    """Codes are exact here, so only recent rows differ, by half a step of 1/511 of a row's largest element."""
    with session(model) as s:
        f16 = s.decode(tokens)
    with session(model, make_layout(recent_bits=10, mean=mean), window=(4, 16, 0)) as s:
        found = s.decode(tokens)
    assert 1e-4 < distance(f16, found) < 0.02


def test_sinks_are_halves(model: engine.Model, tokens: list[int], make_layout: Make) -> None:
    """A prompt of sinks only is that of a window of halves, to the bit."""
    found = []
    for bits in (16, 10):
        with session(model, make_layout(BANDS, BANDS, recent_bits=bits), window=(64, 16, 8)) as s:
            found.append(s.decode(tokens[:64], pieces=[40, *[1] * 24]))
    assert (found[0] == found[1]).all()


def test_a_rotated_row_is_rounded_once_more(model: engine.Model, tokens: list[int], make_layout: Make) -> None:
    """A context shift of integer rows deviates from that of halves only as much as the rows do."""
    found = []
    for bits in (16, 10):
        with session(model, make_layout(recent_bits=bits), window=(4, 64, 8)) as s:
            s.decode(tokens[:120])
            assert s.rm(0, 4, 40)
            engine.C.llama_memory_seq_add(s.memory, 0, 40, -1, -36)
            found.append(s.decode(tokens[120:150], 84))
    assert 1e-5 < distance(*found) < 0.03


def test_adaptive_bases_keep_halves(model: engine.Model, make_layout: Make) -> None:
    held = []
    for options in ({}, {"adapt": "kv,block=8"}):
        with session(model, make_layout(recent_bits=10), window=(4, 32, 8), **options) as s:
            held.append(s.stats().bytes_window)
    assert held[1] == pytest.approx(held[0] * 44 * 64 / (4 * 64 + 40 * 42))


def test_a_state_of_other_rows_is_refused(model: engine.Model, tokens: list[int], make_layout: Make) -> None:
    """The file's fingerprint tells them apart, and the state's head where a file has both (a GPU holds halves)."""
    with session(model, make_layout(BANDS, BANDS, recent_bits=10), window=WINDOW) as s:
        expected = s.decode(tokens[:90])
        s.clear()
        s.decode(tokens[:60])
        state = s.state(0)
    with session(model, make_layout(BANDS, BANDS), window=WINDOW) as s:
        assert not s.set_state(state, 0)
        assert "fingerprint" in last_error()
    with session(model, make_layout(BANDS, BANDS, recent_bits=10), window=WINDOW) as s:
        assert s.set_state(state, 0)
        assert agree(expected[60:], s.decode(tokens[60:90], 60))
