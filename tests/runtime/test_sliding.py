"""Sliding layers beside coded ones: q8_0 rows, where they may have them, and what a user says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
from each import each
from engine import LOG, Refused, distance, session
from test_shift import add
from test_variants import exact_layout

WINDOW = (4, 16, 8)
ON, OFF = 1, 0  # flash_attn


class Sliding:
    """A tiny model whose even layers have a sliding window of 16 tokens, and exact codes of the others."""

    def __init__(self, make: Callable[..., Path], folder: Path, **dims: Any) -> None:
        self.model = engine.Model(make("gemma2", **dims))
        self.layout = exact_layout(self.model, "gemma2", folder / "layout.gguf")
        self.tokens = [10 + i * 7 % (self.model.n_vocab - 20) for i in range(300)]

    def session(self, **options: Any) -> Any:
        return session(self.model, self.layout, **{"window": WINDOW, "flash_attn": ON, "n_ctx": 512} | options)

    def bytes_stock(self, **options: Any) -> int:
        with self.session(**options) as s:
            assert s.stats().n_layer_sliding == s.stats().n_layer_coded == 2
            return int(s.stats().bytes_stock)


@pytest.fixture
def sliding(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Sliding]:
    made = Sliding(tiny_model, tmp_path, head_size=64)
    yield made
    made.model.free()


def as_f16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBKV_SLIDING", "f16")


def test_sliding_rows_are_smaller_and_as_good(sliding: Sliding, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 of 32 bytes; logits as near to an f16 cache as those of llama.cpp's own q8_0 cache in all layers."""
    with session(sliding.model, flash_attn=ON, n_ctx=512) as s:
        expected = s.decode(sliding.tokens)
    with session(sliding.model, flash_attn=ON, n_ctx=512, type_k=8, type_v=8) as s:
        q8_0 = distance(expected, s.decode(sliding.tokens))
    with sliding.session() as s:
        found, stats = s.decode(sliding.tokens), s.stats()
    assert 0.0 < distance(expected, found) < 1.2 * q8_0
    as_f16(monkeypatch)
    with sliding.session() as s:
        wide = s.stats()
        assert distance(expected, s.decode(sliding.tokens)) < q8_0
    assert 32 * stats.bytes_stock == 17 * wide.bytes_stock > 0
    assert stats.bytes_f16 == wide.bytes_f16 == wide.bytes_stock * 2  # as many layers of each kind
    assert stats.bytes_kv == stats.bytes_codes + stats.bytes_window + stats.bytes_stock


@each("options", [{}, {"n_seq_max": 3}, {"n_seq_max": 3, "unified": True}])
def test_sequences_do_not_disturb_each_other(sliding: Sliding, options: dict[str, Any]) -> None:
    tokens = sliding.tokens
    with sliding.session() as s:
        expected = s.decode(tokens[:120], pieces=[100, 20])[100:]
    with sliding.session(**options | {"n_ctx": 1536}) as s:
        last = options.get("n_seq_max", 1) - 1
        s.decode(tokens[:100], 0, last)
        if last:
            s.decode(tokens[150:250], 0, 0)
        assert distance(expected, s.decode(tokens[100:120], 100, last)) < 0.01


def test_states_have_the_type_of_their_rows(sliding: Sliding, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sliding.tokens
    with sliding.session() as s:
        expected = s.decode(tokens[:80], pieces=[60, 20])[60:]
    with sliding.session() as s:
        s.decode(tokens[:60])
        state = s.state(0)
    with sliding.session() as s:
        assert s.set_state(state, 0) == len(state)
        assert distance(expected, s.decode(tokens[60:80], 60)) == 0.0
    as_f16(monkeypatch)
    with sliding.session() as s:
        assert s.set_state(state, 0) == 0
        s.decode(tokens[:60])
        assert len(s.state(0)) > len(state)


def test_shifted_keys_stay_those_of_their_tokens(sliding: Sliding) -> None:
    """As near to an f16 cache as llama.cpp's own q8_0 cache, whose shifted keys are rounded twice as well."""

    def shifted(layout: Any, **options: Any) -> Any:
        with session(sliding.model, layout, flash_attn=ON, n_ctx=512, **options) as s:
            s.decode(sliding.tokens[:100])
            assert s.rm(0, 20, 30)
            add(s, 0, 30, -1, -10)
            return s.decode(sliding.tokens[100:120], 90)

    expected = shifted(None)
    assert distance(expected, shifted(sliding.layout, window=WINDOW)) < 1.2 * distance(
        expected, shifted(None, type_k=8, type_v=8)
    )


def test_rows_stay_f16_without_flash_attention(sliding: Sliding, monkeypatch: pytest.MonkeyPatch) -> None:
    small, plain = sliding.bytes_stock(), sliding.bytes_stock(flash_attn=OFF)
    assert 32 * small == 17 * plain
    assert any("sliding layers stay in f16: flash attention is off" in line for line in LOG)
    monkeypatch.setenv("SUBKV_SLIDING", "q8_0")
    assert sliding.bytes_stock() == small
    with pytest.raises(Refused):
        sliding.session(flash_attn=OFF).__enter__()
    assert "SUBKV_SLIDING=q8_0: flash attention is off; SUBKV_SLIDING=f16 keeps" in "".join(LOG)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    with pytest.raises(Refused):
        sliding.session().__enter__()
    assert "SUBKV_SLIDING=q8_0: LLAMA_ATTN_ROT_DISABLE is set; " in "".join(LOG)


def test_rows_of_other_heads_stay_f16(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp shifts quantized keys of multiples of 64 only."""
    made = Sliding(tiny_model, tmp_path, head_size=32)
    default = made.bytes_stock()
    assert any("heads of one size, a multiple of 64, expected, 32 and 32 found" in line for line in LOG)
    as_f16(monkeypatch)
    assert made.bytes_stock() == default
    made.model.free()


@each("value", ["q4_0", "F16", " f16", "x" * 1000])
def test_unknown_types_are_refused(sliding: Sliding, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SUBKV_SLIDING", value)
    with pytest.raises(Refused):
        sliding.session().__enter__()
    assert f"SUBKV_SLIDING: f16 or q8_0 expected, '{value[:60]}' found" in "".join(LOG)


def test_ordinary_caches_keep_their_types(sliding: Sliding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit identity: the variable is of coded caches."""
    with session(sliding.model, flash_attn=ON) as s:
        expected = s.decode(sliding.tokens[:50])
    monkeypatch.setenv("SUBKV_SLIDING", "q8_0")
    with session(sliding.model, flash_attn=ON) as s:
        assert distance(expected, s.decode(sliding.tokens[:50])) == 0.0


def test_other_layers_are_measured_alone(sliding: Sliding) -> None:
    """keep_f16(): the sliding layers of the next context are exact, the others have its type."""
    from subkv.engine.sliding import keep_f16

    def decoded(kind: int) -> tuple[Any, int]:
        with session(sliding.model, flash_attn=ON, n_ctx=512, type_k=kind, type_v=kind) as s:
            return s.decode(sliding.tokens), len(s.state(0))

    f16, q4_0 = 1, 2
    exact, n_exact = decoded(f16)
    every, n_every = decoded(q4_0)
    keep_f16()
    others, n_others = decoded(q4_0)
    assert n_every < n_others < n_exact
    assert 0.0 < distance(exact, others) < distance(exact, every)
    assert distance(every, decoded(q4_0)[0]) == 0.0  # it was for one context
