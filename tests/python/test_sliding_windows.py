"""Llama and contexts of models with sliding windows: what they keep, and what an edited text costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import engine
import numpy as np
import pytest
from opening import last_logits, opened, prompt
from test_checkpoints import answer, counting

from subkv.base.errors import CacheError, SubkvError
from subkv.engine import checkpoints
from subkv.engine.cache import choose_cache
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest

Models = Callable[..., Path]
N_CTX, N_SWA, SPACING = 2048, 16, 128


@pytest.fixture(params=["subkv", "f16"])
def llm(request: pytest.FixtureRequest, tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Llama]:
    """Sliding layers have 256 cells."""
    monkeypatch.setattr(checkpoints, "SLIDING_SPACING", SPACING)
    made = opened(tiny_model("gemma2"), kv_cache=request.param, n_ctx=N_CTX, n_ubatch=64, n_batch=64, swa_full=False)
    with made as opened_:
        yield opened_


def test_sliding_layers_keep_their_window_beside_coded_ones(tiny_model: Models) -> None:
    model, sizes = tiny_model("gemma2"), {}
    for kind, swa_full in (("subkv", None), ("subkv", False), ("subkv", True), ("f16", None), ("f16", True)):
        with opened(model, kv_cache=kind, n_ctx=N_CTX, n_ubatch=64, swa_full=swa_full) as made:
            sizes[kind, swa_full] = made.kv_stats().bytes_stock
            assert made.kv_stats().n_swa == (N_SWA if kind == "subkv" and not swa_full else 0)
            assert (made._ctx.checkpoints is not None) == (kind == "subkv" and not swa_full)
    assert sizes["subkv", None] == sizes["subkv", False] < sizes["subkv", True]
    assert sizes["f16", None] == sizes["f16", True]


def test_texts_that_go_on_otherwise(llm: Llama) -> None:
    """A turn more, that turn changed, a branch in the middle, another one there, the first text again."""
    text, n = prompt(700), 4
    first, evaluated = answer(llm, text)
    assert evaluated == 700 + n - 1
    turn = [*text, *first]
    again = SPACING + 32
    programs = [
        ([*turn, 9, 8, 7], 3 + 1),
        ([*turn, 5, 4], 2 + 32),
        ([*text[:400], 1, 2, 3], again),
        ([*text[:400], 4, 5, 6], 3),
        ([*text[:500], 4, 5, 6], again + 100),
    ]
    found = []
    for tokens, most in programs:
        out, evaluated = answer(llm, tokens)
        assert evaluated <= most + n - 1, tokens[-3:]
        found.append(out)
    for (tokens, _), out in zip(programs, found, strict=True):
        llm.reset()
        llm._ctx.kv_cache_clear()
        assert answer(llm, tokens)[0] == out


def test_logits_after_going_back_are_those_of_the_text(llm: Llama) -> None:
    text = prompt(600)
    llm.eval(text[:300])
    llm.eval(prompt(300, seed=1))
    n_kept = llm.keep(300)
    assert 0 < n_kept <= 300  # at a checkpoint
    found = last_logits(llm, text[n_kept:])
    llm.reset()
    llm._ctx.kv_cache_clear()
    expected = last_logits(llm, text)
    assert np.abs(found - expected).max() < 1e-2 * expected.std()


def test_a_window_that_has_moved_on_is_never_read(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints the whole text is evaluated again."""
    monkeypatch.setattr(checkpoints.Checkpoints, "take", lambda self, n: None)
    text = prompt(600)
    llm.eval(text)
    with counting(llm) as lengths:
        llm.n_tokens = 100
        llm.eval([7, 8])
    assert sum(lengths) == 102
    assert llm.n_tokens == 102


def test_checkpoints_stay_within_their_memory(llm: Llama) -> None:
    points = llm._ctx.checkpoints
    assert points is not None
    llm.eval(prompt(1200))
    size = max(len(point.state) for point in points.points)
    for n, least in ((6, 5), (3, 3)):  # with room for fewer, four stay
        points._n_bytes = n * size
        llm.eval(prompt(300, seed=n))
        assert least <= len(points.points) <= max(n, checkpoints.N_LEAST)


def test_a_sliding_window_forgets_no_middle(llm: Llama) -> None:
    llm.eval(prompt(600))
    with pytest.raises(
        SubkvError, match=r"context_shift: expected .* \(recurrent state, sliding windows without swa_f"
    ):
        llm.require_shift("context_shift")
    with pytest.raises(CacheError, match="n_discard: expected a context that can remove tokens, .* swa_full=True"):
        llm.discard(4, 20)
    assert llm.n_tokens == 600


@pytest.mark.parametrize("kind", ["subkv", "f16"])
def test_measurements_do_not_read_a_lost_window(tiny_model: Models, kind: str) -> None:
    """drop_tail() goes back to a mark, or raises."""
    model = tiny_model("gemma2")
    options = ContextOptions(N_CTX, n_batch=64, n_ubatch=64)
    tokens = prompt(700)
    with Model(model) as opened_, opened_.context(choose_cache(model, CacheRequest(kind)), options) as context:
        for start in range(0, 704, 64):
            if start == 320:
                context.mark(320)
            context.decode(tokens[start : start + 64], start, 1 << 20)
        with pytest.raises(CacheError, match="n_rollback: expected a tail that can be removed exactly"):
            context.drop_tail(200)
        assert context.length() == 700
        context.drop_tail(320)
        assert context.length() == 320
        context.decode(tokens[320:384], 320, 63)
        found = context.logits(1).copy()
        context.clear()
        for start in range(0, 384, 64):
            context.decode(tokens[start : start + 64], start, 63)
        assert np.abs(found - context.logits(1)).max() < 1e-2 * found.std()


def test_bases_from_the_weights_leave_sliding_layers_out(tiny_model: Models) -> None:
    """As llama.cpp says which these are; other models keep all layers."""
    for arch, coded in (("gemma2", [1, 3]), ("llama", [0, 1])):
        layers = choose_cache(tiny_model(arch), CacheRequest("subkv")).description["layers"]
        assert [layer["il"] for layer in layers] == coded


@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss", "llama"])
def test_programs_derive_the_same_bases(arch: str, tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A native context without a layout, as that of a program, has the fingerprint of the layout in Python."""
    model = tiny_model(arch)
    expected = choose_cache(model, CacheRequest("subkv")).description["fingerprint"]
    monkeypatch.setenv("SUBKV", "subkv")
    native = engine.Model(model)
    with engine.session(native, flash_attn=1) as s:
        assert engine.SUBKV.subkv_context_fingerprint(s.ctx).decode() == expected
    native.free()
