"""Attention variants that reach the graph late are computed, or refused before any row is sized."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import pytest
import virtual
from engine import C, Refused, distance, session


def shape_of(model: engine.Model) -> list[tuple[int, int, int, int]]:
    """Layers that an observer reports: only those with an ordinary full-attention cache."""
    obs = engine.SUBKV.subkv_observer_new(0)
    shapes = []
    with session(model, observer=obs) as s:
        s.decode([1, 2, 3])
        for il in range(engine.SUBKV.subkv_observer_n_layer(obs)):
            out = engine.observed(obs, il)
            if out.n_head:
                shapes.append((il, out.n_head_kv, out.d_k, out.d_v))
    engine.SUBKV.subkv_observer_free(obs)
    return shapes


def exact_layout(model: engine.Model, arch: str, path: Path, mean: float = 0.0, recent_bits: int = 16) -> Any:
    shapes = shape_of(model)
    d_k, d_v = shapes[0][2:]
    return engine.signed_permutations(
        shapes,
        [(d_k, 16)],
        [(d_v, 16)],
        arch=arch,
        block_count=C.llama_model_n_layer(model.handle),
        path=path,
        mean=mean,
        recent_bits=recent_bits,
    )


# arch in tests/tiny.py: architecture name in the file
SUPPORTED = ["llama", "bloom", "gemma2", "gpt-oss", "grok", "qwen2vl", "lfm2", "qwen35", "gemma3n", "gemma4"]


@pytest.mark.parametrize("flash_attn", [0, 1])
@pytest.mark.parametrize("arch", SUPPORTED)
def test_supported_variant_equals_the_f16_cache(
    tiny_model: Callable[..., Path], tmp_path: Path, arch: str, flash_attn: int
) -> None:
    model = engine.Model(tiny_model(arch))
    rng = random.Random(3)
    tokens = [rng.randrange(10, model.n_vocab) for _ in range(150)]
    layout = exact_layout(model, arch, tmp_path / "layout.gguf")
    stock = []
    for flash in (0, 1):
        with session(model, flash_attn=flash) as s:
            stock.append(s.decode(tokens))
    expected = stock[flash_attn]
    # differences of f16 itself: between attention kernels, between splits, and from an f32 cache
    floor = distance(stock[0], stock[1])
    for options in ({"n_ubatch": 13, "flash_attn": flash_attn}, {"type_k": 0, "type_v": 0}):
        with session(model, **options) as s:
            floor = max(floor, distance(s.decode(tokens), expected))
    with session(model, layout, window=(4, 16, 4), flash_attn=flash_attn) as s:
        found = s.decode(tokens, pieces=[100, *[1] * 10, 40])
        assert s.stats().n_layer_coded >= 1
    with session(model, layout, window=(4, 16, 4), flash_attn=flash_attn, n_ubatch=13) as s:
        again = s.decode(tokens)
    assert distance(expected, found) < 2 * floor
    assert distance(found, again) < 2 * floor
    model.free()


@pytest.mark.parametrize("window", [(4, 16, 4), (0, 0, 0)])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "bloom", "qwen2vl"])
def test_keys_less_a_mean_equal_the_f16_cache(
    tiny_model: Callable[..., Path], tmp_path: Path, arch: str, window: tuple[int, int, int]
) -> None:
    """Coded and exact keys agree with key biases, a softcap and ALiBi: half codes of k − μ, and μ added back.

    k − μ rounds differently from k, so the bound is the effect of rounding to half: the distance of an f16 from an f32
    cache.
    """
    model = engine.Model(tiny_model(arch))
    rng = random.Random(5)
    tokens = [rng.randrange(10, model.n_vocab) for _ in range(150)]
    with session(model) as s:
        expected = s.decode(tokens)
    with session(model, type_k=0, type_v=0) as s:
        bound = 4 * distance(expected, s.decode(tokens))
    assert bound < 0.05
    layout = exact_layout(model, arch, tmp_path / "layout.gguf", mean=1.0)
    for options in ({}, {"n_ubatch": 13, "threads": 1}, {"n_ubatch": 150, "threads": 3}):
        with session(model, layout, window=window, **options) as s:
            found = s.decode(tokens, pieces=[100, *[1] * 10, 40])
        assert distance(expected, found) < bound, options
    model.free()


def test_sliding_layers_stay_ordinary(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = engine.Model(tiny_model("gemma2"))
    shapes = shape_of(model)
    assert 0 < len(shapes) < C.llama_model_n_layer(model.handle)
    with session(model, exact_layout(model, "gemma2", tmp_path / "layout.gguf")) as s:
        assert s.stats().bytes_stock > 0
    model.free()


def test_refused_with_the_reason_and_the_way_out(tmp_path: Path) -> None:
    with virtual.model("deepseek4") as model:
        layout = engine.signed_permutations(
            [(0, 2, 32, 32)], [(32, 16)], [(32, 16)], arch="deepseek4", block_count=2, path=tmp_path / "layout.gguf"
        )
        with pytest.raises(Refused) as refused, session(model, layout):
            pass
    assert "its sparse attention reads" in str(refused.value) and "-ctk f16" in str(refused.value)


@pytest.mark.parametrize("arch", ["mamba", "bert"])
def test_a_model_without_a_kv_cache_keeps_the_context_ordinary(
    tiny_model: Callable[..., Path], tmp_path: Path, arch: str
) -> None:
    """libllama builds no K/V cache here; subkv_context_fingerprint tells, and the request must not linger."""
    model = engine.Model(tiny_model(arch))
    layout = engine.signed_permutations(
        [(0, 2, 32, 32)], [(32, 16)], [(32, 16)], arch=arch, block_count=1, path=tmp_path / "layout.gguf"
    )
    with session(model, layout) as s:
        assert engine.SUBKV.subkv_context_fingerprint(s.ctx) is None
    assert engine.SUBKV.subkv_attach(None, None)
    model.free()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"arch": "bloom"}, "subkv.arch"),
        ({"block_count": 3 + 40}, "subkv.block_count"),
        ({"n_head_kv": 3}, "subkv.layout"),
        ({"d": 16}, "subkv.layout"),
    ],
)
def test_bases_of_another_model(model: engine.Model, tmp_path: Path, change: dict[str, Any], key: str) -> None:
    n_layer = C.llama_model_n_layer(model.handle)
    n_head_kv = change.get("n_head_kv", C.llama_model_n_head_kv(model.handle))
    d = change.get("d", 32)
    layout = engine.signed_permutations(
        [(0, n_head_kv, d, d)],
        [(d, 8)],
        [(d, 8)],
        arch=change.get("arch", "llama"),
        block_count=change.get("block_count", n_layer),
        path=tmp_path / "layout.gguf",
    )
    with pytest.raises(Refused) as refused, session(model, layout):
        pass
    text = str(refused.value)
    assert text.startswith(key) and "found" in text


@pytest.mark.parametrize("arch", ["lfm2", "qwen35"])
def test_bases_of_another_hybrids_layers(tiny_model: Callable[..., Path], tmp_path: Path, arch: str) -> None:
    """Of the two layers, one has attention in this model, too; the other is recurrent."""
    path = tiny_model(arch)
    model, shapes = engine.Model(path), [(0, 1, 32, 32), (1, 1, 32, 32)]
    name, n_layer = engine.architecture(path), C.llama_model_n_layer(model.handle)
    layout = engine.signed_permutations(
        shapes, [(32, 8)], [(32, 8)], arch=name, block_count=n_layer, path=tmp_path / "layout.gguf"
    )
    with pytest.raises(Refused) as refused, session(model, layout):
        pass
    assert "found some for layer 0, which has none in this model" in str(refused.value)
    model.free()
