"""Rows of a run of tokens move behind another beginning (llama-subkv-programs.h), as on an f16 cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import engine
import pytest
from each import each
from engine import C, Logits, agree, distance, last_error
from moved import append, moves, run_of

WINDOW = (4, 16, 8)
N_AGAIN = 16  # the first tokens of a run
RUN = range(40, 200)  # of the old prompt
BEGINNINGS = {"longer": 75, "shorter": 11, "as long": 40, "none": 0}

session = functools.partial(engine.session, threads=1)


@pytest.fixture
def tokens(model: engine.Model) -> list[int]:
    return model.random_tokens(600, 1)


def by_hand(
    model: engine.Model, old: Sequence[int], first: int, begin: Sequence[int], rest: Sequence[int], **options: Any
) -> Logits:
    """An f16 cache: the run waits in a second sequence while the new beginning is evaluated. Logits of `rest`."""
    n, to = RUN.stop - first, len(begin)
    with session(model, n_ctx=512, n_seq_max=2, unified=True, **options) as s:
        s.decode(old)
        s.cp(0, 1, first, RUN.stop)
        assert s.rm(0, 0)
        C.llama_memory_seq_add(s.memory, 1, first, RUN.stop, to - first)
        if begin:
            s.decode(begin)
        s.cp(1, 0, to, to + n)
        assert s.rm(1, 0)
        return s.decode(rest, to + n)


@each("name", list(BEGINNINGS))
@pytest.mark.parametrize("source", ["sequence", "other sequence", "state"])
@pytest.mark.parametrize("unified", [False, True])
def test_a_run_moves_as_in_the_f16_cache(
    model: engine.Model, tokens: list[int], make_layout: Any, name: str, source: str, unified: bool
) -> None:
    """Exact codes. The run is a part of what the source has."""
    old, rest = tokens[:230], tokens[300:330]
    first = RUN.start + N_AGAIN
    begin = [*tokens[400 : 400 + BEGINNINGS[name]], *old[RUN.start : first]] if name != "none" else []
    expected = by_hand(model, old, first, begin, rest)
    again = by_hand(model, old, first, begin, rest, flash_attn=0)
    whole = [*begin, *old[first : RUN.stop]]
    with session(model, n_ctx=512) as s:
        s.decode(whole)
        evaluated = s.decode(rest, len(whole))
    with session(model, make_layout(), window=WINDOW, n_ctx=1024, n_seq_max=2, unified=unified) as s:
        from_seq = int(source == "other sequence")
        s.decode(tokens[500:537], seq=1 - from_seq)  # elsewhere in the cells
        s.decode(old, seq=from_seq)
        state = s.state(from_seq) if source == "state" else None
        with run_of(s, first, RUN.stop - first, seq=from_seq, state=state) as run:
            assert s.rm(0, 0)
            if begin:
                s.decode(begin, pieces=[3, len(begin) - 3])
            assert append(s, len(begin), run)
        assert C.llama_memory_seq_pos_max(s.memory, 0) == len(whole) - 1
        found = s.decode(rest, len(whole), pieces=[1, 9, len(rest) - 10])
    floor = max(distance(expected, again), 2e-3)
    assert distance(expected, evaluated) > 4 * floor, "the move changes nothing: the test proves nothing"
    assert distance(expected, found) < 2 * floor


def test_moved_rows_are_ordinary_ones(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    """They can be removed, evaluated again, copied, saved and moved again; another sequence notices nothing."""
    layout = make_layout([(32, 8)], [(32, 8)])
    with session(model, layout, window=WINDOW, n_ctx=2048, n_seq_max=3, unified=True) as s:
        s.decode(tokens[:100], seq=1)
        beside = s.decode(tokens[100:105], 100, seq=1)
        assert s.rm(1, 100)
        s.decode(tokens[:200])
        with run_of(s, 50, 100) as run:
            assert s.rm(0, 0)
            s.decode(tokens[300:320])
            assert append(s, 20, run)
        expected = s.decode(tokens[400:410], 120)
        assert s.rm(0, 120)
        state = s.state(0)
        assert agree(expected, s.decode(tokens[400:410], 120))
        assert s.set_state(state, 2) and agree(expected, s.decode(tokens[400:410], 120, seq=2))
        assert s.rm(0, 60) and s.rm(2, 0)
        s.cp(0, 2)
        assert agree(s.decode(tokens[400:410], 60), s.decode(tokens[400:410], 60, seq=2))
        assert agree(beside, s.decode(tokens[100:105], 100, seq=1))


def test_evaluated_again_a_run_is_exact(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    """Where evaluation resumes behind moved rows: the last ones have codes only."""
    with session(model, make_layout(), window=WINDOW, n_ctx=512) as s:
        s.decode(tokens[:150])
        with run_of(s, 50, 100) as run:
            assert s.rm(0, 20)
            assert append(s, 20, run)
        assert engine.SUBKV.subkv_resume(s.ctx, 0, 120) == 120 - (WINDOW[1] - 1)


REFUSED = {
    "a gap": (lambda s, run: append(s, 21, run), "position 20 expected"),
    "an overlap": (lambda s, run: append(s, 19, run), "position 20 expected"),
    "no room": (lambda s, run: [append(s, 20 + i * 100, run) for i in range(3)][-1], "100 free cells expected"),
    "another sequence": (lambda s, run: append(s, 0, run, seq=1), "sequence 0 to 0 expected"),
    "a large position": (lambda s, run: append(s, 1 << 30, run), "positions from 0 on expected"),
}


@each("name", list(REFUSED))
def test_refused_moves_change_nothing(model: engine.Model, tokens: list[int], make_layout: Any, name: str) -> None:
    call, why = REFUSED[name]
    with session(model, make_layout(), window=WINDOW, n_ctx=256) as s:
        s.decode(tokens[:100])
        with run_of(s, 0, 100) as run:
            assert s.rm(0, 20)
            engine.LOG.clear()
            assert not call(s, run)
            assert why in "".join(engine.LOG), engine.LOG
        end = C.llama_memory_seq_pos_max(s.memory, 0) + 1
        assert s.rm(0, 20) and end in (20, 220)
        expected = s.decode(tokens[20:30], 20)
        assert s.rm(0, 0)
        assert agree(s.decode(tokens[:30])[20:], expected)


def test_rows_that_are_not_there(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    with session(model, make_layout(), window=WINDOW) as s:
        s.decode(tokens[:100])
        assert s.rm(0, 40, 50)
        state = s.state(0)
        for first, n in ((0, 100), (45, 3), (90, 20), (-1, 5), (5, 0), (5, -1), (5, 1 << 30), ((1 << 31) - 2, 5)):
            for source in (None, state):
                with run_of(s, first, n, state=source) as run:
                    assert not run.value, (first, n)
        damaged = bytearray(state)
        damaged[len(state) // 2] ^= 1
        for source in (b"", state[:-1], state[:5], bytes(damaged)):
            with run_of(s, 0, 10, state=source) as run:
                assert not run.value
        with run_of(s, 0, 40, state=state) as run:
            assert run.value


def test_states_of_other_bases_are_refused(model: engine.Model, tokens: list[int], make_layout: Any) -> None:
    with session(model, make_layout(), window=WINDOW) as s:
        s.decode(tokens[:100])
        state = s.state(0)
    with session(model, make_layout([(32, 8)], [(32, 8)]), window=WINDOW) as s, run_of(s, 0, 50, state=state) as run:
        assert not run.value and "fingerprint" in "".join(engine.LOG)
    with session(model, make_layout(), window=WINDOW) as s, session(model, make_layout(), window=(4, 8, 8)) as other:
        s.decode(tokens[:100])
        with run_of(s, 0, 50) as run:
            assert not append(other, 0, run) and append(s, 100, run)


def refusal(s: engine.Session, tokens: Sequence[int]) -> str:
    """Of the rows of a sequence."""
    s.decode(tokens[:100])
    engine.LOG.clear()
    with run_of(s, 0, 50) as run:
        assert not run.value
    return "".join(engine.LOG)


def test_caches_whose_rows_do_not_move(
    model: engine.Model, tokens: list[int], make_layout: Any, tiny_model: Callable[..., Any], tmp_path: Any
) -> None:
    """Each gives its reason."""
    from test_hybrids import Coded
    from test_variants import exact_layout

    with session(model) as s:
        assert "not coded" in refusal(s, tokens)
    with session(model, make_layout([(32, 8)], [(32, 8)]), window=(4, 32, 8), adapt="kv,block=16,warm=1000000") as s:
        assert "adaptive" in refusal(s, tokens)
    with Coded(tiny_model("lfm2"), tmp_path).session() as s:
        assert "recurrent" in refusal(s, tokens)
    sliding = engine.Model(tiny_model("gemma2"))
    with session(sliding, exact_layout(sliding, "gemma2", tmp_path / "layout.gguf")) as s:
        assert "sliding" in refusal(s, sliding.random_tokens(100, 1))
    sliding.free()


def test_the_variable(monkeypatch: pytest.MonkeyPatch, model: engine.Model, make_layout: Any) -> None:
    layout = make_layout()
    for value, expected in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("SUBKV_STORE_MOVED", value) if value is not None else None
        with session(model, layout) as s:
            assert moves(s) == expected
    for value in ("2", "yes", "-1"):
        monkeypatch.setenv("SUBKV_STORE_MOVED", value)
        with pytest.raises(engine.Refused, match="SUBKV_STORE_MOVED: expected a number from 0 to 1"):
            engine.Session(model, layout)
    assert "SUBKV_STORE_MOVED" in last_error()
