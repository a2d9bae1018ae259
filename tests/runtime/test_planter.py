"""Planted rows: a cache holds them as if the tokens at their positions had made them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import SUBKV, C, Refused, agree, distance, last_error, observe_values, observed, session
from numpy.typing import NDArray
from test_variants import exact_layout, shape_of

from research.warmstart.planter import Planted, Planter
from subkv import Llama
from subkv.base.errors import CacheError, SubkvError
from subkv.engine import memory

Rows = dict[int, tuple[NDArray[Any], NDArray[Any]]]  # by il: k [n, n_head_kv, d_k], v [n, n_head_kv, d_v]

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
    """What it has."""
    rows: Rows = {}
    for il in range(SUBKV.subkv_observer_n_layer(obs)):
        s = observed(obs, il)
        k = observe_values(obs, il, "ks", (s.n_key, s.n_head_kv, s.d_k))
        rows[il] = k, observe_values(obs, il, "vs", (s.n_key, s.n_head_kv, s.d_v))
    return rows


def rows_of(
    model: engine.Model, tokens: list[int], first: int = 0, pieces: list[int] | None = None, **options: Any
) -> Rows:
    """Post-RoPE keys and values of a text that begins at position `first`."""
    with sampling(len(tokens), first) as obs, session(model, observer=obs, **options) as s:
        s.decode(tokens, first, pieces=pieces)
        return sampled(obs)


@contextmanager
def planting(model: engine.Model, rows: Rows | None = None, **options: Any) -> Iterator[tuple[engine.Session, Planter]]:
    """A Session whose planter has these rows for positions 0, 1, …"""
    with Planter() as planter:
        with planter.attach():
            s = engine.Session(model, **options)
        try:
            for il, (k, v) in (rows or {}).items():
                planter.set(il, range(len(k)), k, v)
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
    rows = {il: (k[:N], v[:N]) for il, (k, v) in rows.items()}
    with planting(model, **cache) as (s, _):
        assert distance(expected, s.decode([*DUMMIES, text[N]])[-1:]) > 0.1
    with planting(model, rows, **cache) as (s, planter):
        assert agree(expected, s.decode([*DUMMIES, text[N]], pieces=pieces)[-1:])
        assert [layer.n_planted for layer in planter.layers()] == [N] * len(rows)
        # the planter is done: what comes next reads the cache
        planter.clear()
        following = s.decode(tokens[N + 1 : N + 9], N + 1)
    with session(model, **cache) as s:
        s.decode(text, pieces=pieces)
        assert agree(s.decode(tokens[N + 1 : N + 9], N + 1), following)


def test_nothing_planted_changes_no_bit(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    with session(model, **cache) as s:
        expected = s.decode(tokens[: N + 10], pieces=[N, *[1] * 10])
    rows = rows_of(model, tokens[20:40])
    with planting(model, rows, **cache) as (s, planter):
        planter.clear()
        assert np.array_equal(expected, s.decode(tokens[: N + 10], pieces=[N, *[1] * 10]))
    with planting(model, **cache) as (s, planter):
        for il, (k, v) in rows.items():
            planter.set(il, range(1000, 1000 + len(k)), k, v)  # positions that no token has
        assert np.array_equal(expected, s.decode(tokens[: N + 10], pieces=[N, *[1] * 10]))
        assert {layer.n_planted for layer in planter.layers()} == {0}


@pytest.mark.parametrize("arch", ["bloom", "qwen2", "gemma2", "gpt-oss"])
def test_every_attention_layer_is_planted(tiny_model: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """Sliding ones too, fused q, k, v, attention sinks: cells hold the rows as given, and every cache the same."""
    model = engine.Model(tiny_model(arch))
    n = 12  # within the sliding window
    text = [10 + i * 7 % (model.n_vocab - 20) for i in range(n + 1)]
    own = shape_of(model)
    rng = np.random.default_rng(2)
    rows: Rows = {
        il: (rng.standard_normal((n, *own[0][1:3])), rng.standard_normal((n, own[0][1], own[0][3])))
        for il in range(C.llama_model_n_layer(model.handle))
    }
    assert (len(own) < len(rows)) == (arch in ("gemma2", "gpt-oss"))
    with session(model, flash_attn=1) as s:
        unplanted = s.decode(text)[-1:]
    with planting(model, rows, flash_attn=1) as (s, planter):
        assert [layer.il for layer in planter.layers()] == list(rows)
        s.decode(DUMMIES[:n])
        state = s.state(0)
        for row in [x for pair in rows.values() for x in pair]:
            assert row.astype(np.float16).tobytes() in state  # values of consecutive cells are not transposed
        expected = s.decode(text[n:], n)
    assert distance(expected, unplanted) > 0.1
    layout = exact_layout(model, arch, tmp_path / "layout.gguf")
    for options in ({}, {"layout": layout, "window": (2, 4, 4)}, {"layout": layout, "window": (0, 0, 0)}):
        with planting(model, rows, **options) as (s, _):
            s.decode(DUMMIES[:n])
            assert distance(expected, s.decode(text[n:], n)) < 0.02, options
    model.free()


def test_a_sequence_may_begin_anywhere(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    first = 1000
    rows = rows_of(model, tokens[:N], first, **cache)
    with session(model, **cache) as s:
        s.decode(tokens[:N], first)
        expected = s.decode(tokens[N : N + 5], first + N)
    with planting(model, **cache) as (s, planter):
        for il, (k, v) in rows.items():
            planter.set(il, range(first, first + N), k, v)
        s.decode(DUMMIES, first)
        assert agree(expected, s.decode(tokens[N : N + 5], first + N))


@pytest.mark.parametrize("name", ["f16", "coded", "coded-no-window"])
def test_positions_left_out(model: engine.Model, tokens: list[int], make_layout: Callable[..., Any], name: str) -> None:
    """llama.cpp wants consecutive positions of a sequence; a piece of another one may follow at a distance."""
    options = dict(CACHES[name])
    if options.pop("coded", False):
        options["layout"] = make_layout(BANDS, BANDS)
    rows = rows_of(model, tokens[:N], **options)
    with session(model, **options) as s:
        s.decode(tokens[:N])
        assert s.rm(0, 20, 60)
        expected = s.decode(tokens[N : N + 5], N)
    with planting(model, rows, n_seq_max=2, unified=True, **options) as (s, _):
        s.decode(DUMMIES[:20], 0, 0)
        assert s.try_decode(DUMMIES[60:], 60, 0) != 0
        s.decode(DUMMIES[60:], 60, 1)
        s.cp(1, 0, 60, N)
        assert agree(expected, s.decode(tokens[N : N + 5], N))


def test_state_and_removal(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    rows = rows_of(model, tokens[:N], **cache)
    with session(model, **cache) as s:
        s.decode(tokens[:N])
        expected = s.decode(tokens[N : N + 5], N)
        assert s.rm(0, N - 4)
        other = [t ^ 1 for t in tokens[N - 4 : N + 5]]
        removed = s.decode(other, N - 4)
    with planting(model, rows, **cache) as (s, planter):
        s.decode(DUMMIES)
        states = s.state(0), s.state()
        planter.clear()
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
    for unified in (False,) if "adapt" in cache else (False, True):  # bases that adapt want a cache for each sequence
        with planting(model, n_seq_max=2, unified=unified, n_ctx=512, **cache) as (s, planter):
            s.decode(texts[1][:-4], 0, 1)
            for il, (k, v) in rows.items():
                planter.set(il, range(N), k, v)
            s.decode(DUMMIES, 0, 0)
            planter.clear()
            for i in range(4, 0, -1):
                found = s.decode_batch([(text[-i], len(text) - i, seq) for seq, text in enumerate(texts)])
                for seq in range(2):
                    assert agree(alone[seq][-i][None], found[seq][None])


def test_an_observer_sees_what_was_planted(model: engine.Model, tokens: list[int], cache: dict[str, Any]) -> None:
    rows = rows_of(model, tokens[:40], **cache)
    with sampling(50) as obs, planting(model, rows, observer=obs, **cache) as (s, _):
        s.decode(DUMMIES[:50])
        seen = sampled(obs)
    for il in rows:
        for side in range(2):
            assert np.array_equal(rows[il][side], seen[il][side][:40])
            assert np.abs(seen[il][side][40:]).max() > 0


def test_one_planter_of_two_contexts_and_none(model: engine.Model, tokens: list[int]) -> None:
    """Contexts outlive their planter, and go on without."""
    rows = rows_of(model, tokens[:N])
    with session(model) as s:
        expected = s.decode(tokens[: N + 1])
    planter = Planter()
    sessions = []
    for _ in range(2):
        with planter.attach():
            sessions.append(engine.Session(model))
    for il, (k, v) in rows.items():
        planter.set(il, range(N), k, v)
    for s in sessions:
        s.decode(DUMMIES)
        assert agree(expected[-1:], s.decode(tokens[N : N + 1], N))
    planter.close()
    planter.close()
    for s in sessions:
        s.clear()
        assert np.array_equal(expected, s.decode(tokens[: N + 1]))
        s.close()


@pytest.mark.parametrize("coded", [False, True])
def test_a_dry_run_does_not_take_the_planter(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coded: bool
) -> None:
    """subkv.Llama asks llama.cpp for a context without memory first, where memory may be short."""
    path = tiny_model("llama")
    bases = None
    model = engine.Model(path)
    if coded:
        bases = tmp_path / "bases.gguf"
        exact_layout(model, "llama", bases)
    text = [10 + i * 7 % (model.n_vocab - 20) for i in range(41)]
    rows = rows_of(model, text[:40])
    model.free()
    simulated = []
    simulate = memory._simulate
    monkeypatch.setattr(memory, "_simulate", lambda *args: simulated.append(simulate(*args)) or simulated[-1])
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 30)
    options: dict[str, Any] = {"bases": bases, "n_ctx": 256, "n_gpu_layers": 0, "logits_all": True, "verbose": False}
    llm = Llama(path, **options)
    llm.eval(text)
    expected = np.array(llm.scores[40])
    llm.close()
    with Planter() as planter:
        with planter.attach():
            llm = Llama(path, **options)
        for il, (k, v) in rows.items():
            planter.set(il, range(40), k, v)
        llm.eval(DUMMIES[:40])
        planter.clear()
        llm.eval(text[40:])
        found = np.array(llm.scores[40])
        llm.close()
    assert len(simulated) == 2
    assert distance(expected[None], found[None]) < 0.02


#
# errors
#


@pytest.mark.parametrize(("arch", "reason"), [("deepseek2", "MLA"), ("t5", "an encoder")])
def test_models_that_cannot_be_planted(tiny_model: Callable[..., Path], arch: str, reason: str) -> None:
    model = engine.Model(tiny_model(arch))
    with (
        Planter() as planter,
        pytest.raises(Refused, match=f"cannot have K/V rows planted.*{reason}"),
        planter.attach(),
    ):
        engine.Session(model)
    model.free()


def test_no_context_took_the_planter(tiny_model: Callable[..., Path], model: engine.Model) -> None:
    recurrent = engine.Model(tiny_model("mamba"))
    with Planter() as planter:
        for path in (recurrent, None):
            with pytest.raises(CacheError, match=r"a context with a K/V cache expected, none"), planter.attach():
                if path:
                    engine.Session(path).close()
        with pytest.raises(ZeroDivisionError), planter.attach():
            raise ZeroDivisionError
        with session(model) as s:  # nothing is left over for the next one
            s.decode(DUMMIES[:2])
        assert planter.layers() == []
        with pytest.raises(CacheError, match=r"il: expected a layer .* inside attach\(\), found 0"):
            planter.set(0, [], [], [])
    recurrent.free()


def test_two_models(tiny_model: Callable[..., Path], model: engine.Model) -> None:
    other = engine.Model(tiny_model("llama", head_size=64))
    with Planter() as planter:
        with planter.attach():
            engine.Session(model).close()
        with pytest.raises(Refused, match="another shape than before"), planter.attach():
            engine.Session(other)
    other.free()


def test_bad_rows(model: engine.Model) -> None:
    k = np.zeros((3, 2, 32))
    bad = k.copy()
    bad[1, 1, 7] = np.nan
    cases: list[tuple[int, Any, Any, Any, str]] = [
        (2, [0, 1, 2], k, k, r"il: expected a layer .*, found 2"),
        (-1, [0, 1, 2], k, k, r"il: expected a layer .*, found -1"),
        (0, [0, 2, 1], k, k, "pos: strictly increasing positions from 0 on expected, 1 found after 2"),
        (0, [0, 1, 1], k, k, "pos: strictly increasing positions from 0 on expected, 1 found after 1"),
        (0, [-1, 1, 2], k, k, "positions: expected 0 to .*, found -1 to 2"),
        (0, [0, 1, 2**31], k, k, "positions: expected 0 to .*, found 0 to 2147483648"),
        (0, [0.0, 1.5, 2.0], k, k, r"positions: expected integers \[n\], found float64 \[3\]"),
        (0, [[0, 1, 2]], k, k, r"positions: expected integers \[n\], found int64 \[1, 3\]"),
        (0, [0, 1], k, k, r"k: expected rows \[2, 2, 32\], found \[3, 2, 32\]"),
        (0, [0, 1, 2], k, k[:, :1], r"v: expected rows \[3, 2, 32\], found \[3, 1, 32\]"),
        (0, [0, 4, 9], bad, k, "k: finite numbers expected, NaN or Inf found in layer 0 at position 4"),
        (0, [0, 4, 9], k, bad, "v: finite numbers expected, NaN or Inf found in layer 0 at position 4"),
        (0, [0, 4, 9], k + 1e300, k, "k: finite numbers expected, NaN or Inf found in layer 0 at position 0"),
    ]
    with planting(model, {0: (k, k)}) as (s, planter):
        for il, positions, keys, values, reason in cases:
            with pytest.raises(CacheError, match=reason):
                planter.set(il, positions, keys, values)
        s.decode(DUMMIES[:3])
        assert planter.layers()[0].n_planted == 3  # what it had before the bad ones
        planter.set(0, [], np.zeros((0, 2, 32)), np.zeros((0, 2, 32)))
        assert planter.layers()[0].n_planted == 0
    for use in (planter.layers, planter.clear, lambda: planter.attach().__enter__()):
        with pytest.raises(SubkvError, match="planter: expected an open one, found it closed"):
            use()


def test_bad_calls(model: engine.Model) -> None:
    handle = SUBKV.subkv_planter_new()
    out = Planted()
    assert not SUBKV.subkv_planter_layer(handle, 0, out) and "layer" in last_error()
    assert not SUBKV.subkv_planter_set(handle, 0, None, 0, None, None)
    assert "created after subkv_plant" in last_error()
    assert SUBKV.subkv_plant(handle)
    with session(model):
        assert SUBKV.subkv_planter_set(handle, 0, None, 0, None, None)
        assert not SUBKV.subkv_planter_set(handle, 0, None, -1, None, None) and "-1 found" in last_error()
        assert not SUBKV.subkv_planter_set(handle, 0, None, 1, None, None) and "null pointer" in last_error()
        assert not SUBKV.subkv_planter_set(handle, 9, None, 0, None, None) and "9 found" in last_error()
    SUBKV.subkv_planter_free(handle)
    SUBKV.subkv_planter_free(None)
    assert SUBKV.subkv_plant(None)  # nothing to cancel


@pytest.mark.parametrize("side", [0, 1])
def test_values_beyond_halves_reach_nobody_who_does_not_see_them(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any], side: int
) -> None:
    """An infinity in the exact window is one times zero for the tokens before it; keys (0) and values (1)."""
    cache: dict[str, Any] = {"layout": make_layout(BANDS, BANDS), "window": (4, 32, 0)}
    rows = rows_of(model, tokens[:20], **cache)
    with planting(model, rows, **cache) as (s, _):
        expected = s.decode(tokens[:20])
    for row in rows.values():
        row[side][10] *= 1e6 / np.abs(row[side][10]).max()
    with planting(model, rows, **cache) as (s, _):
        found = s.decode(tokens[:20])
    assert np.isfinite(found).all()
    assert agree(expected[:10], found[:10])
    assert distance(expected[10:], found[10:]) > 0.01
