"""Planted rows: a cache holds them as if the tokens at their positions had computed them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import SUBKV, C, agree, distance, last_error, observe_values, observed, session
from numpy.typing import NDArray
from test_variants import exact_layout, shape_of

from research.warmstart.planter import Planter
from subkv.base.errors import SubkvError

Rows = list[tuple[NDArray[Any], NDArray[Any]]]  # by layer: k [n, n_head_kv, d_k], v [n, n_head_kv, d_v]

N = 100  # tokens of the prompt before its last one
DUMMIES = [5] * N
BANDS = [(8, 8), (8, 6), (16, 4)]
EAGER = "kv,block=16,length=32,warm=32,max_chunks=3,gain=100,reuse=0,merge=1"

# name -> options of a Session; "coded": with bases
CACHES: dict[str, dict[str, Any]] = {
    "f16": {},
    "f16-flash": {"flash_attn": 1},
    "q8_0": {"flash_attn": 1, "type_k": 8, "type_v": 8},
    "coded": {"coded": True, "window": (4, 16, 8)},
    "coded-no-window": {"coded": True, "window": (0, 0, 0)},
    "adaptive": {"coded": True, "window": (4, 24, 8), "adapt": EAGER},
}


@pytest.fixture(params=sorted(CACHES))
def cache(request: pytest.FixtureRequest, make_layout: Callable[..., Any]) -> dict[str, Any]:
    """Options of a Session, by kind of cache."""
    options = dict(CACHES[request.param])
    return {**options, "layout": make_layout(BANDS, BANDS, mean=0.5)} if options.pop("coded", False) else options


@contextmanager
def sampling(n: int, first: int = 0) -> Iterator[Any]:
    """An observer that samples keys and values at n positions."""
    obs = SUBKV.subkv_observer_new(0)
    where = (ctypes.c_int32 * n)(*range(first, first + n))
    assert SUBKV.subkv_observer_mode(obs, 2, where, n, None, 0)
    try:
        yield obs
    finally:
        SUBKV.subkv_observer_free(obs)


def sampled(obs: Any) -> Rows:
    """The observer's samples."""
    rows: Rows = []
    for il in range(SUBKV.subkv_observer_n_layer(obs)):
        s = observed(obs, il)
        k = observe_values(obs, il, "ks", (s.n_key, s.n_head_kv, s.d_k))
        rows.append((k, observe_values(obs, il, "vs", (s.n_key, s.n_head_kv, s.d_v))))
    return rows


def rows_of(
    model: engine.Model, tokens: list[int], first: int = 0, pieces: list[int] | None = None, **options: Any
) -> Rows:
    """Post-RoPE keys and values of a text that begins at position `first`."""
    with sampling(len(tokens), first) as obs, session(model, observer=obs, **options) as s:
        s.decode(tokens, first, pieces=pieces)
        return sampled(obs)


@contextmanager
def planted(model: engine.Model, **options: Any) -> Iterator[tuple[engine.Session, Planter]]:
    """A Session whose computations a planter observes."""
    planter = Planter()
    with planter.attach():
        s = engine.Session(model, **options)
    try:
        yield s, planter
    finally:
        s.close()


@pytest.mark.parametrize("pieces", [[N, 1], [40, 1, N - 40]])
def test_planted_rows_are_those_of_the_prompt(
    model: engine.Model, tokens: list[int], cache: dict[str, Any], pieces: list[int]
) -> None:
    """Also in one batch with the token that reads them, and cut into ubatches and calls."""
    text = tokens[: N + 1]
    with session(model, **cache) as s:
        expected = s.decode(text, pieces=pieces)[-1:]
    rows = rows_of(model, text, pieces=pieces, **cache)
    rows = [(k[:N], v[:N]) for k, v in rows]
    with planted(model, **cache) as (s, _):
        assert distance(expected, s.decode([*DUMMIES, text[N]])[-1:]) > 0.1
    with planted(model, **cache) as (s, planter):
        with planter.planting(rows):
            assert agree(expected, s.decode([*DUMMIES, text[N]], pieces=pieces)[-1:])
        # the planter is done: later tokens read the cache
        following = s.decode(tokens[N + 1 : N + 9], N + 1)
    with session(model, **cache) as s:
        s.decode(text, pieces=pieces)
        assert agree(s.decode(tokens[N + 1 : N + 9], N + 1), following)


def test_nothing_planted_changes_no_bit(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    with session(model, **cache) as s:
        expected = s.decode(tokens[: N + 10], pieces=[N, *[1] * 10])
    with planted(model, **cache) as (s, planter), planter.planting([]):
        assert np.array_equal(expected, s.decode(tokens[: N + 10], pieces=[N, *[1] * 10]))


@pytest.mark.parametrize("arch", ["bloom", "qwen2", "gemma2", "gpt-oss"])
def test_every_attention_layer_is_planted(tiny_model: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """Sliding ones too, fused q, k, v, attention sinks: cells hold the rows as given, and every cache the same."""
    model = engine.Model(tiny_model(arch))
    n = 12  # within the sliding window
    text = [10 + i * 7 % (model.n_vocab - 20) for i in range(n + 1)]
    own = shape_of(model)
    rng = np.random.default_rng(2)
    rows: Rows = [
        (rng.standard_normal((n, *own[0][1:3])), rng.standard_normal((n, own[0][1], own[0][3])))
        for _ in range(C.llama_model_n_layer(model.handle))
    ]
    assert (len(own) < len(rows)) == (arch in ("gemma2", "gpt-oss"))
    with session(model, flash_attn=1) as s:
        unplanted = s.decode(text)[-1:]
    with planted(model, flash_attn=1) as (s, planter):
        with planter.planting(rows):
            s.decode(DUMMIES[:n])
        state = s.state(0)
        for row in [x for pair in rows for x in pair]:
            assert row.astype(np.float16).tobytes() in state  # values of consecutive cells are not transposed
        expected = s.decode(text[n:], n)
    assert distance(expected, unplanted) > 0.1
    layout = exact_layout(model, arch, tmp_path / "layout.gguf")
    for options in ({}, {"layout": layout, "window": (2, 4, 4)}, {"layout": layout, "window": (0, 0, 0)}):
        with planted(model, **options) as (s, planter):
            with planter.planting(rows):
                s.decode(DUMMIES[:n])
            assert distance(expected, s.decode(text[n:], n)) < 0.02, options
    model.free()


def test_a_sequence_may_begin_anywhere(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    first = 1000
    rows = rows_of(model, tokens[:N], first, **cache)
    with session(model, **cache) as s:
        s.decode(tokens[:N], first)
        expected = s.decode(tokens[N : N + 5], first + N)
    with planted(model, **cache) as (s, planter):
        with planter.planting(rows):
            s.decode(DUMMIES, first)
        assert agree(expected, s.decode(tokens[N : N + 5], first + N))


def test_state_and_removal(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    rows = rows_of(model, tokens[:N], **cache)
    with session(model, **cache) as s:
        s.decode(tokens[:N])
        expected = s.decode(tokens[N : N + 5], N)
        assert s.rm(0, N - 4)
        other = [t ^ 1 for t in tokens[N - 4 : N + 5]]
        removed = s.decode(other, N - 4)
    with planted(model, **cache) as (s, planter):
        with planter.planting(rows):
            s.decode(DUMMIES)
        states = s.state(0), s.state()
        s.decode(tokens[N : N + 5], N)
        assert s.rm(0, N - 4)
        assert agree(removed, s.decode(other, N - 4))
    for seq, state in zip((0, None), states, strict=True):
        with session(model, **cache) as s:  # one without a planter
            assert s.set_state(state, seq), last_error()
            assert agree(expected, s.decode(tokens[N : N + 5], N))


def test_other_sequences_stay_as_they_were(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    rows = rows_of(model, tokens[:N], **cache)
    texts = tokens[: N + 4], tokens[90:170]
    alone = []
    for text in texts:
        with session(model, **cache) as s:
            alone.append(s.decode(text)[-4:])
    for unified in (False,) if "adapt" in cache else (False, True):  # adaptive bases need a cache for each sequence
        with planted(model, n_seq_max=2, unified=unified, n_ctx=512, **cache) as (s, planter):
            s.decode(texts[1][:-4], 0, 1)
            with planter.planting(rows):
                s.decode(DUMMIES, 0, 0)
            for i in range(4, 0, -1):
                found = s.decode_batch([(text[-i], len(text) - i, seq) for seq, text in enumerate(texts)])
                for seq in range(2):
                    assert agree(alone[seq][-i][None], found[seq][None])


def test_an_observer_records_planted_rows(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    rows = rows_of(model, tokens[:40], **cache)
    with sampling(50) as obs, planted(model, observer=obs, **cache) as (s, planter):
        with planter.planting(rows):
            s.decode(DUMMIES[:50])
        read = sampled(obs)
    for il in range(len(rows)):
        for side in range(2):
            assert np.array_equal(rows[il][side], read[il][side][:40])
            assert np.abs(read[il][side][40:]).max() > 0


def test_one_planter_of_two_contexts(model: engine.Model, tokens: list[int]) -> None:
    rows = rows_of(model, tokens[:N])
    with session(model) as s:
        expected = s.decode(tokens[: N + 1])
    planter = Planter()
    with planter.attach():
        sessions = [engine.Session(model) for _ in range(2)]
    for s in sessions:
        with planter.planting(rows):
            s.decode(DUMMIES)
        assert agree(expected[-1:], s.decode(tokens[N : N + 1], N))
    for s in sessions:
        s.clear()
        assert np.array_equal(expected, s.decode(tokens[: N + 1]))
        s.close()


#
# errors
#


def test_rows_that_do_not_arrive(model: engine.Model) -> None:
    k = np.zeros((3, 2, 32))
    cases: list[tuple[Any, int, str]] = [
        ([(k, k)], 2, "model: layer 0: expected 3 rows planted, found 2"),
        ([(k, k)] * 3, 3, "model: layer 2: expected 3 rows planted, found 0"),  # no such layer
        ([(np.zeros((3, 3, 32)), k)], 3, "model: layer 0: expected rows of 96 floats in .* graph, found"),
    ]
    with planted(model) as (s, planter):
        for rows, n, reason in cases:
            with pytest.raises(SubkvError, match=reason), planter.planting(rows):
                s.decode(DUMMIES[:n])
            s.clear()
        with pytest.raises(ZeroDivisionError), planter.planting([(k, k)]):
            raise ZeroDivisionError
        found = s.decode(DUMMIES[:3])
    with session(model) as s:  # nothing is left over
        assert np.array_equal(found, s.decode(DUMMIES[:3]))


def test_models_without_rows(tiny_model: Callable[..., Path]) -> None:
    """Latent attention has one row for keys and values; recurrent layers have none."""
    for arch in ("deepseek2", "mamba"):
        model = engine.Model(tiny_model(arch))
        k = np.zeros((3, 2, 32))
        with (
            planted(model) as (s, planter),
            pytest.raises(SubkvError, match="model: layer 0: expected"),
            planter.planting([(k, k)]),
        ):
            s.decode(DUMMIES[:3])
        model.free()


def test_bad_rows() -> None:
    k = np.zeros((3, 2, 32))
    bad = k.copy()
    bad[1, 1, 7] = np.nan
    cases: list[tuple[Any, str]] = [
        ([(bad, k)], "k: layer 0: expected finite numbers, found NaN or Inf"),
        ([(k, k), (k, bad)], "v: layer 1: expected finite numbers, found NaN or Inf"),
        ([(k + 1e300, k)], "k: layer 0: expected finite numbers"),
        ([(k[0], k)], r"k: layer 0: expected rows \[n, n_head_kv, d\], found \[2, 32\]"),
        ([(k, k), (k, k[:2])], r"rows: expected as many of every layer, found \[2, 3\]"),
    ]
    planter = Planter()
    for rows, reason in cases:
        with pytest.raises(SubkvError, match=reason), planter.planting(rows):
            pass


@pytest.mark.parametrize("side", [0, 1])
def test_values_beyond_halves_do_not_affect_earlier_tokens(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any], side: int
) -> None:
    """Infinity times zero is NaN, so infinities must not reach earlier tokens; keys (0) and values (1)."""
    cache: dict[str, Any] = {"layout": make_layout(BANDS, BANDS), "window": (4, 32, 0)}
    rows = rows_of(model, tokens[:20], **cache)
    with planted(model, **cache) as (s, planter), planter.planting(rows):
        expected = s.decode(tokens[:20])
    for row in rows:
        row[side][10] *= 1e6 / np.abs(row[side][10]).max()
    with planted(model, **cache) as (s, planter), planter.planting(rows):
        found = s.decode(tokens[:20])
    assert np.isfinite(found).all()
    assert agree(expected[:10], found[:10])
    assert distance(expected[10:], found[10:]) > 0.01
