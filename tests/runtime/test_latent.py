"""Latent attention (MLA): one coded row per token, whose first coefficients are also the values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import capi
import engine
import numpy as np
import pytest
import writer
from engine import Refused, distance, session

from subkv.format.adapt import Params

WINDOW = (4, 16, 8)
D_V, D_ROT = 32, 16  # of the tiny model


def latent_layers(bands: writer.Bands, n_layer: int = 2, seed: int = 0) -> list[writer.Layer]:
    return engine.latent_layers(bands, D_V + D_ROT, D_V, n_layer, seed)


def load(path: Path, layers: Sequence[writer.Layer]) -> Any:
    return engine.load_latent(path, layers, arch="deepseek2", block_count=2)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Iterator[engine.Model]:
    m = engine.Model(tiny_model("deepseek2"))
    yield m
    m.free()


@pytest.fixture(scope="module")
def tokens(model: engine.Model) -> list[int]:
    return model.random_tokens(150, seed=3)


@pytest.fixture(scope="module")
def make_layout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[writer.Bands], Any]:
    folder = tmp_path_factory.mktemp("latent")

    def make(bands: writer.Bands) -> Any:
        handle = load(folder / f"{bands}.gguf", latent_layers(bands))
        assert handle, engine.last_error()
        return handle

    return make


@pytest.mark.parametrize("window", [WINDOW, (0, 0, 0)])
@pytest.mark.parametrize("flash_attn", [0, 1])
def test_exact_codes_equal_the_f16_cache(
    model: engine.Model, make_layout: Any, tokens: list[int], flash_attn: int, window: tuple[int, int, int]
) -> None:
    stock = []
    for flash in (0, 1):
        with session(model, flash_attn=flash) as s:
            stock.append(s.decode(tokens))
    floor = distance(stock[0], stock[1])
    layout = make_layout([(32, 16), (16, 16)])
    for options in ({"pieces": [100, *[1] * 10, 40]}, {"n_ubatch": 13}):
        pieces: Any = options.pop("pieces", None)
        with session(model, layout, window=window, flash_attn=flash_attn, **options) as s:
            assert distance(stock[flash_attn], s.decode(tokens, pieces=pieces)) < 2 * floor


def test_one_row_for_both(model: engine.Model, make_layout: Any) -> None:
    with session(model, make_layout([(8, 8), (24, 4), (16, 8)]), window=WINDOW) as s:
        stats = s.stats()
    row = 1 + 8 + 12 + 16
    assert (stats.n_layer_coded, stats.bytes_per_token, stats.bytes_codes) == (2, 2 * row, 2 * row * 256)
    assert stats.bytes_window == 2 * (D_V + D_ROT) * 2 * sum(WINDOW)
    assert stats.bytes_f16 == 2 * (D_V + D_ROT) * 2 * 256


def test_splits_sequences_and_states(model: engine.Model, make_layout: Any, tokens: list[int]) -> None:
    layout = make_layout([(8, 8), (8, 6), (16, 5), (16, 6)])
    options: Any = {"window": WINDOW, "n_seq_max": 2, "n_ctx": 512}
    with session(model, layout, **options) as s:
        whole = s.decode(tokens)
    expected = whole[100:]
    with session(model, layout, n_ubatch=37, threads=1, **options) as s:
        assert engine.agree(whole, s.decode(tokens))
    with session(model, layout, **options) as s:
        s.decode(tokens[:106])
        assert s.rm(0, 100)
        saved = s.state(0)
        s.cp(0, 1)
        for seq in (0, 1):
            assert engine.agree(expected, s.decode(tokens[100:], 100, seq))
    with session(model, layout, **options) as s:
        assert s.set_state(saved, 1) == len(saved)
        assert engine.agree(expected, s.decode(tokens[100:], 100, 1))


def test_fewer_bits_cost_more(model: engine.Model, make_layout: Any, tokens: list[int]) -> None:
    with session(model) as s:
        exact = s.decode(tokens)
    errors = []
    for bits in (4, 6, 8):
        with session(model, make_layout([(32, bits), (16, bits)]), window=(0, 0, 0)) as s:
            errors.append(float(np.std(s.decode(tokens) - exact) / exact.std()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.05


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("mixed", "expected bands of a latent layer of its first 32 elements"),
        ("swapped", "expected bands of a latent layer of its first 32 elements"),
        ("none", "expected 8..32 coefficients of a latent layer's first 32 elements, found 0"),
        ("mean", "expected a mean of zeros in a latent layer"),
    ],
)
def test_bad_layouts(tmp_path: Path, change: str, why: str) -> None:
    layers = latent_layers([(32, 8), (16, 8)])
    head = layers[1].k[0]
    if change == "mixed":
        head.decode = head.decode.copy()
        head.decode[3, 40] = 1.0
    elif change == "swapped":
        head.encode = head.decode = np.roll(head.encode, 16, axis=0)
        head.bands, head.ratios = [(16, 8), (32, 8)], [1.0, 1.0]
    elif change == "none":
        head.encode = head.decode = head.encode[32:]
        head.bands, head.ratios = [(16, 8)], [1.0]
    elif change == "mean":
        head.mean = np.ones(48, np.float16)
    assert not load(tmp_path / "bad.gguf", layers)
    assert why in engine.last_error()


def test_values_have_no_encoder_of_their_own(make_layout: Any) -> None:
    layout, x, params = make_layout([(32, 8), (16, 8)]), np.ones(48 * 48, np.float32), Params()
    subkv, at = capi.load(), x.ctypes.data
    assert subkv.subkv_layout_basis(layout, 0, 0, True, True, at, x.size) == 32 * 32
    assert subkv.subkv_layout_basis(layout, 0, 0, True, False, at, x.size) == -1
    assert "value: expected false in layer 0" in engine.last_error()
    assert subkv.subkv_layout_project(layout, 1, 0, True, at, 1, at) == -1
    assert "value: expected false in layer 1" in engine.last_error()
    assert not subkv.subkv_adapt_new(layout, ctypes.byref(params), 0, 0, True)
    assert "value: expected false in layer 0" in engine.last_error()


def test_bases_of_the_other_kind_are_refused(model: engine.Model, tmp_path: Path) -> None:
    ordinary = engine.signed_permutations(
        [(0, 1, 48, 32)], [(48, 8)], [(32, 8)], arch="deepseek2", block_count=2, path=tmp_path / "layout.gguf"
    )
    with pytest.raises(Refused, match="values that are part of its keys"), session(model, ordinary):
        pass
