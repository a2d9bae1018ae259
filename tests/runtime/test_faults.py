"""Failures in the middle of an operation: every loss is reported, and the cache stays usable."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import pytest
from each import each
from engine import C, agree, last_error, session, two_states

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 16, 8)


@pytest.fixture(scope="module")
def layout(make_layout: Callable[..., Any]) -> Any:
    return make_layout(BANDS, BANDS)


def remove_at_once(s: engine.Session) -> None:
    assert s.rm(1, -1)


def remove_in_two_parts(s: engine.Session) -> None:
    assert s.rm(1, 20, 50) and s.rm(1, 0)


def keep_the_other(s: engine.Session) -> None:
    C.llama_memory_seq_keep(s.memory, 0)


@each("remove", [remove_at_once, remove_in_two_parts, keep_the_other])
def test_a_reused_sequence_does_not_keep_its_old_window(
    model: engine.Model, tokens: list[int], layout: Any, remove: Callable[[engine.Session], None]
) -> None:
    """Its old text had exact rows of the same positions as the text that is copied to it."""
    found = []
    for had_another_text in (False, True):
        with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
            if had_another_text:
                s.decode([t ^ 1 for t in tokens[:60]], 0, 1)
                remove(s)
            s.decode(tokens[:120], 0, 0)
            s.cp(0, 1, 0, 60)
            found.append(s.decode(tokens[60:80], 60, 1, pieces=[1] * 20))
    assert agree(*found)


def test_sequences_that_do_not_exist(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:41])[-1:]
        assert s.rm(0, -1)
        s.decode(tokens[:40])
        state = s.state(0)
        s.cp(0, 5)
        assert "seq_cp" in last_error()
        assert s.set_state(state, 5) == 0 and "sequence" in last_error()
        assert C.llama_state_seq_get_size(s.ctx, 5) == 0
        assert s.rm(5, -1)
        assert agree(expected, s.decode(tokens[40:41], 40))


def test_two_tokens_at_one_position_are_refused(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        batch = C.llama_batch_init(2, 0, 1)
        batch.n_tokens = 2
        for i in range(2):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = tokens[i], 0, 1, True
            batch.seq_id[i][0] = 0
        assert C.llama_decode(s.ctx, batch) != 0
        assert "position 0" in last_error()
        C.llama_batch_free(batch)


def test_an_aborted_decode_leaves_no_half_written_cells(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW, n_ubatch=64) as s:
        expected = s.decode(tokens[:150])
        s.clear()
        calls = [0]

        @C.ggml_abort_callback
        def stop_in_second_ubatch(_: Any) -> bool:
            calls[0] += 1
            return calls[0] > limit

        # calls of the callback in one ubatch
        limit = 10**9
        C.llama_set_abort_callback(s.ctx, stop_in_second_ubatch, None)
        s.decode(tokens[:64])
        limit, calls[0] = calls[0] + calls[0] // 2, 0
        s.clear()
        assert s.try_decode(tokens[:150], 0) == 2
        C.llama_set_abort_callback(s.ctx, ctypes.cast(None, C.ggml_abort_callback), None)
        # if a caller ignores the failure, the next decode reports it
        assert s.try_decode(tokens[128:150], 128) != 0 or C.llama_memory_seq_pos_min(s.memory, 0) == 128
        s.clear()
        assert agree(expected, s.decode(tokens[:150]))


def test_a_state_truncated_in_the_window_changes_nothing(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        state, other = two_states(s, tokens)
        assert s.set_state(state[:-1], 0) == 0
        assert s.state(0) == other


def test_a_context_state_of_other_sequences_is_refused_before_anything_is_touched(
    model: engine.Model, tokens: list[int], layout: Any
) -> None:
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True) as s:
        s.decode(tokens[:60])
        state = s.state()
    with session(model, layout, window=WINDOW, n_seq_max=3, unified=True) as s:
        expected = s.decode(tokens[:41])[-1:]
        assert s.rm(0, -1)
        s.decode(tokens[:40])
        assert s.set_state(state) == 0 and "sequences" in last_error()
        assert agree(expected, s.decode(tokens[40:41], 40))


def test_an_observer_stays_with_one_model(model: engine.Model, tiny_model: Callable[..., Path]) -> None:
    other = engine.Model(tiny_model("llama", head_size=64))
    obs = engine.SUBKV.subkv_observer_new(0)
    with session(model, observer=obs) as s:
        s.decode([1, 2, 3])
    with pytest.raises(engine.Refused, match="one model"), session(other, observer=obs):
        pass
    engine.SUBKV.subkv_observer_free(obs)
    other.free()
