"""Adaptive bases in the engine keep the guarantees of a cache with static bases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine
import forge
import numpy as np
import pytest
from each import each
from engine import SUBKV, Refused, agree, distance, last_error, session

from subkv.format.adapt import HeadStats

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 24, 8)
# a new basis every 32 tokens for any gain, so that many chunks are in use and merged
EAGER = "kv,block=16,length=32,warm=32,max_chunks=3,gain=100,reuse=0,merge=1"

FD = "kv,block=16,length=32,warm=32,gain=1,max_chunks=4,kind=fd"
ANCHORED = ",window=48,lookahead=12"
MANY = EAGER.replace("max_chunks=3", "max_chunks=12")


def window_of(adapt: str) -> tuple[int, int, int]:
    """WINDOW, and what is looked ahead at."""
    return (4, 24 + 12 * (ANCHORED in adapt), 8)


@pytest.fixture(scope="module")
def layout(make_layout: Callable[..., Any]) -> Any:
    return make_layout(BANDS, BANDS, mean=0.5)


@pytest.fixture(scope="module")
def text(model: engine.Model) -> list[int]:
    """320 tokens of no meaning."""
    return model.random_tokens(320, seed=11)


def head_stats(s: engine.Session, il: int = 0, head: int = 0, value: bool = True) -> HeadStats:
    out = HeadStats()
    assert SUBKV.subkv_get_adapt_stats(s.ctx, il, head, value, out), last_error()
    return out


@pytest.fixture(scope="module")
def noise(model: engine.Model, text: list[int], layout: Any) -> float:
    """How far codes of these bands are from the f16 cache: median over tokens."""
    with session(model, n_ctx=512) as s:
        exact = s.decode(text)
    with session(model, layout, window=WINDOW, n_ctx=512) as s:
        return far(exact, s.decode(text))


def far(a: engine.Logits, b: engine.Logits) -> float:
    """Largest difference of a token's logits relative to their spread, median over tokens past the exact window."""
    return float(np.median(np.abs(a - b).max(1)[50:]) / a.std())


def test_bases_that_never_change_are_the_static_ones(
    model: engine.Model, text: list[int], layout: Any, noise: float
) -> None:
    """Rows are coded from the exact window's halves, so a few codes flip, and some of their neighbours on the path."""
    with session(model, layout, window=WINDOW, n_ctx=512) as s:
        expected = s.decode(text)
    with session(model, layout, window=WINDOW, n_ctx=512, adapt="kv,block=16,warm=1000000") as s:
        found = s.decode(text, pieces=[100, *[1] * 40, 180])
        assert head_stats(s).n_opened == 0 and head_stats(s).n_blocks > 10
    assert far(expected, found) < 0.3 * noise


@pytest.mark.parametrize("adapt", [EAGER, EAGER.replace("kv", "v"), FD, EAGER + ANCHORED])
def test_splits_of_the_prompt_give_equal_quality(
    model: engine.Model, text: list[int], layout: Any, adapt: str, noise: float
) -> None:
    """The number of threads has no effect. Splits change llama.cpp's keys by rounding, which changes the eigenvectors
    of a
    random model a lot, because it has no preferred directions. Codes then differ, at the same chunks, within their
    step.
    """
    window = window_of(adapt)
    with session(model, layout, window=window, n_ctx=512, n_ubatch=256, adapt=adapt) as s:
        expected = s.decode(text)
        opened, blocks = head_stats(s).n_opened, head_stats(s).n_blocks
    assert opened >= 4
    runs: list[tuple[int, list[int] | None, int]] = [(16, None, 2), (7, None, 1), (256, [90, *[1] * 50, 180], 3)]
    for n_ubatch, pieces, threads in runs:
        with session(model, layout, window=window, n_ctx=512, n_ubatch=n_ubatch, threads=threads, adapt=adapt) as s:
            found = s.decode(text, pieces=pieces)
            assert head_stats(s).n_blocks == blocks
            if "gain=100" in adapt:
                assert head_stats(s).n_opened == opened
        assert far(expected, found) < noise, (n_ubatch, threads)
    with session(model, layout, window=window, n_ctx=512, n_ubatch=256, threads=1, adapt=adapt) as s:
        assert np.array_equal(expected, s.decode(text))


@pytest.mark.parametrize("flash_attn", [0, 1])
def test_exact_codes_in_any_chunks_equal_the_f16_cache(
    model: engine.Model, text: list[int], make_layout: Callable[..., Any], flash_attn: int
) -> None:
    """Guarantee 2: chunks with lossless rotations give the ordinary softmax, up to half precision."""
    with session(model, n_ctx=512, flash_attn=flash_attn) as s:
        expected = s.decode(text)
    with session(model, n_ctx=512, type_k=0, type_v=0) as s:
        bound = 8 * distance(expected, s.decode(text))
    with session(model, make_layout(scale=3.0), window=WINDOW, n_ctx=512, flash_attn=flash_attn,
                 adapt=MANY) as s:  # fmt: skip
        found = s.decode(text, pieces=[120, *[1] * 30, 170])
        assert head_stats(s).n_chunks >= 6
    assert distance(expected, found) < bound


def test_adapting_is_not_the_same_as_not(model: engine.Model, text: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW, n_ctx=512) as s:
        static = s.decode(text)
    with session(model, layout, window=WINDOW, n_ctx=512, adapt=EAGER) as s:
        assert not agree(static, s.decode(text))


@pytest.mark.parametrize("adapt", [EAGER, EAGER + ANCHORED])
def test_remove_a_tail_and_decode_again(model: engine.Model, text: list[int], layout: Any, adapt: str) -> None:
    with session(model, layout, window=window_of(adapt), n_ctx=512, adapt=adapt) as s:
        expected = s.decode(text[:240], pieces=[200, *[1] * 40])
        s.clear()
        s.decode(text[:200])
        s.decode([t ^ 1 for t in text[200:208]], 200)
        assert s.rm(0, 200)
        found = s.decode(text[200:240], 200, pieces=[1] * 40)
        assert agree(expected[200:], found)
        assert not s.rm(0, 150)
        assert "seq_rm" in last_error()
        assert s.rm(0, -1)
        assert agree(expected[:200], s.decode(text[:200]))


def test_a_copied_sequence_continues_identically(model: engine.Model, text: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW, n_ctx=512, adapt=MANY) as s:
        expected = s.decode(text[:240], pieces=[180, 60])
    with session(model, layout, window=WINDOW, n_seq_max=2, n_ctx=1024, adapt=MANY) as s:
        s.decode(text[:180], 0, 0)
        s.cp(0, 1)
        s.decode([t ^ 1 for t in text[180:240]], 180, 0)
        assert agree(expected[180:], s.decode(text[180:240], 180, 1))
        s.rm(0, -1)
        assert agree(expected[:180], s.decode(text[:180], 0, 0))
        found = s.decode_batch([(text[180], 180, 0), (text[240], 240, 1)])
        assert distance(expected[180:181], found[:1]) < 0.1  # rounding of another batch, and the bases it gave


def test_a_state_without_exact_rows_is_not_continued(model: engine.Model, text: list[int], layout: Any) -> None:
    """Also if only the first tokens of a batch attend to them: their cells are not coded yet."""
    with session(model, layout, window=WINDOW, n_ctx=512, adapt=MANY) as s:
        s.decode(text[:100])
        state = forge.without_recent_rows(s.state(0), WINDOW)
        assert s.set_state(state, 0) == len(state), last_error()
        with pytest.raises(
            AssertionError, match="sequence 0 at position 100 attends exactly to position 77, whose exact row"
        ):
            s.decode(text[100:140], 100)


@pytest.mark.parametrize("adapt", [EAGER, EAGER + ANCHORED])
@pytest.mark.parametrize("seq", [None, 0])
def test_save_and_restore(model: engine.Model, text: list[int], layout: Any, seq: int | None, adapt: str) -> None:
    window = window_of(adapt)
    with session(model, layout, window=window, n_ctx=512, adapt=adapt) as s:
        expected = s.decode(text[:240], pieces=[200, 40])
        s.clear()
        s.decode(text[:200])
        state = s.state(seq)
        assert state == s.state(seq)
    with session(model, layout, window=window, n_ctx=512, adapt=adapt) as s:
        s.decode(text[30:90])
        assert s.set_state(state, seq) == len(state)
        assert agree(expected[200:], s.decode(text[200:240], 200))
    other_window = adapt.replace("window=48", "window=49") if "window" in adapt else adapt + ",window=48"
    for other in (None, "v,block=16", "kv,block=8", adapt.replace("length=32", "length=64"), other_window):
        with session(model, layout, window=window, n_ctx=512, adapt=other) as s:
            assert s.set_state(state, seq) == 0
            expected_bases = f"adaptive bases ({other.split(',')[0]},kind=" if other else "static bases expected"
            assert expected_bases in last_error() and "a state of other bases found" in last_error()


def test_bytes_are_counted(model: engine.Model, text: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW, n_ctx=512) as s:
        static = s.stats()
    with session(model, layout, window=WINDOW, n_ctx=512, adapt=FD.replace("kv", "v")) as s:
        before = s.stats()
        s.decode(text)
        after = s.stats()
        heads = engine.C.llama_model_n_head_kv(model.handle)
        layers = engine.C.llama_model_n_layer(model.handle)
        parts = [head_stats(s, il, h) for il in range(layers) for h in range(heads)]
        assert not SUBKV.subkv_get_adapt_stats(s.ctx, 0, 0, False, parts[0])
    assert before.bytes_codes - static.bytes_codes == 512 * heads * layers  # the chunk of every cell and head
    assert before.bytes_per_token - static.bytes_per_token == heads * layers
    assert static.bytes_chunks == static.n_chunks == 0
    assert after.n_chunks == sum(p.n_chunks for p in parts) > 0
    assert after.bytes_chunks == sum(p.bytes_bases + p.bytes_sketch for p in parts) > 0
    assert after.bpe > before.bpe or after.bytes_chunks <= before.bytes_chunks


def test_rows_that_are_not_finite_are_counted(model: engine.Model, text: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW, n_ctx=512, adapt=EAGER) as s:
        s.decode(text)
        assert s.stats().n_zero_rows == 0 and head_stats(s).n_nonfinite == 0
        assert np.isfinite(s.decode(text[:20], 320)).all()


@each(
    ("adapt", "options", "message"),
    [
        ("v,block=32", {}, "block: expected at most n_recent less n_rollback, 16, .* found 32"),
        ("v,block=8,lookahead=9", {}, "lookahead: expected at most n_recent less n_rollback and block, 8, .* found 9"),
        ("v,block=16", {"n_seq_max": 2, "unified": True}, "expected one sequence, or a cache for each"),
        ("v,block=16,max_chunks=0", {}, r"max_chunks: expected 1\.\.255, found 0"),
        ("v,block=16,rank=64", {}, "rank: expected 0..32, found 64"),
        ("v,block=16,rank=16,rows=8", {}, "rows: expected 16"),
    ],
)
def test_refused(model: engine.Model, layout: Any, adapt: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message), session(model, layout, window=WINDOW, adapt=adapt, **options):
        pass
