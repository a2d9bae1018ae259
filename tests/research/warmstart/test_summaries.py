"""Slots of prompts: the tokens they pool, their positions, and no loss if every token has its own slot."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from starting import no_maps, trained_without

from research.warmstart.contexts import WarmContext, attention, capturing
from research.warmstart.frame import Frame
from research.warmstart.planting import Rows
from research.warmstart.pooled import Plan, Slots, counts, placed, pooling, summarise
from research.warmstart.trained import HeadShape, LayerMaps, Trained, read
from subkv.base.errors import SubkvError
from subkv.engine.model import Model
from subkv.native.bases import model_content

IDENTITY = "0" * 64


#
# pooling
#


@given(st.integers(1, 40), st.integers(0, 500))
@settings(max_examples=200, deadline=None)
def test_slots_are_means_in_order(m: int, more: int) -> None:
    n = m + more
    weights = pooling(n, m)
    assert weights.shape == (m, n) and weights.min() >= 0
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    assert (weights > 0).any(axis=0).all(), "every token is in a slot"
    assert counts(n, m).sum() == pytest.approx(n) and counts(n, m).min() > 0
    np.testing.assert_allclose(weights[::-1, ::-1], weights, atol=1e-12)  # neither end is favoured
    middle = weights @ np.arange(n)
    assert (np.diff(middle) > 0).all()


@given(st.integers(1, 60))
def test_as_many_slots_as_tokens_are_the_tokens(n: int) -> None:
    np.testing.assert_array_equal(pooling(n, n), np.eye(n))
    np.testing.assert_allclose(counts(n, n), 1.0)


def test_weights_are_triangles() -> None:
    """Two slots of 8 tokens: centres at a quarter and three quarters, half a span wide each way."""
    rising = np.maximum(0.0, 1.0 - 2.0 * np.abs((np.arange(8) + 0.5) / 8 - 0.25))
    np.testing.assert_allclose(pooling(8, 2)[0], rising / rising.sum())
    assert pooling(8, 2)[0, -2:].tolist() == [0.0, 0.0]


@given(st.integers(1, 20), st.integers(0, 6), st.integers(1, 9), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_positions_lie_within_the_pooled_tokens(m: int, n_sink: int, n_last: int, more: int) -> None:
    plan = Plan(m, n_sink, n_last)
    n_tokens = plan.shortest + more
    where, mass = placed(plan, n_tokens)
    np.testing.assert_allclose(np.exp(mass), counts(more + m, m))
    assert plan.span(n_tokens) == (n_sink, n_tokens - n_last)
    assert (np.diff(where) > 0).all() and where[0] >= n_sink and where[-1] <= n_tokens - n_last - 1
    if more == 0:
        np.testing.assert_allclose(where, np.arange(n_sink, n_sink + m))


def test_prompts_and_plans_that_do_not_fit() -> None:
    with pytest.raises(SubkvError, match=r"^prompt: expected at least 28 tokens \(4 sinks, 16 .*found 27$"):
        Plan(16, 4, 8).span(27)
    with pytest.raises(SubkvError, match="^prompt: expected at least 3 tokens to pool, found 2$"):
        pooling(2, 3)
    for bad in ((0, 4, 8), (16, -1, 8), (16, 4, 0), (5000, 4, 8)):
        with pytest.raises(SubkvError, match=r"^n_(slots|sink|last): expected a number of tokens from \d to 4096"):
            Plan(*bad)


#
# the frame
#


class Keys:
    """Synthetic metadata of a GGUF."""

    path = Path("made-up.gguf")

    def __init__(self, arch: str = "llama", **values: Any) -> None:
        self._values = {"attention.head_count": 2, "embedding_length": 64} | values
        self._arch = arch

    def keys(self) -> list[str]:
        return list(self._values)

    def get(self, key: str) -> Any:
        return self._arch if key == "general.architecture" else self._values.get(key.removeprefix(f"{self._arch}."))

    def has_tensor(self, name: str) -> bool:
        return False

    def tensor(self, name: str, why: str) -> np.ndarray:
        raise AssertionError(name)


@contextlib.contextmanager
def capturing_file(path: Path, n_ctx: int) -> Iterator[WarmContext]:
    with Model(path) as model, capturing(model, n_ctx, 1) as context:
        yield context


def rows(context: WarmContext, n: int, seed: int = 0, n_last: int = 0) -> Rows:
    rng = random.Random(seed)
    return context.capture([rng.randrange(10, context.model.n_vocab - 4) for _ in range(n)], n_last)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_the_same_token_has_the_same_key_everywhere(arch: str, tiny_model: Callable[..., Path]) -> None:
    """Keys of the first layer depend on token and position alone, so without the rotation on the token alone."""
    frame = Frame.of(tiny_model(arch))
    with capturing_file(tiny_model(arch), 300) as context:
        found = context.capture([20] * 300)
    assert frame.rotated
    assert np.abs(found.k[0][1:] - found.k[0][0]).max() > 1
    still = frame.unrotate(found.k[0], np.arange(300))
    np.testing.assert_allclose(still, np.broadcast_to(still[:1], still.shape), atol=2e-4 * np.abs(still).max())
    np.testing.assert_allclose(frame.rotate(still, np.arange(300)), found.k[0], atol=1e-5 * np.abs(still).max())


def test_a_model_that_adds_its_positions_is_left_alone(tiny_model: Callable[..., Path]) -> None:
    frame = Frame.of(tiny_model("gpt2"))
    assert not frame.rotated and frame.d_k == 32
    with capturing_file(tiny_model("gpt2"), 64) as context:
        found = rows(context, 40)
    np.testing.assert_array_equal(frame.unrotate(found.k[1], np.arange(40)), found.k[1])
    summary = summarise(found.k, found.v, Plan(8, 2, 2), frame)
    np.testing.assert_allclose(summary.k[1], np.einsum("mn,nhd->hmd", pooling(36, 8), found.k[1][2:38]), atol=1e-5)


def test_part_of_a_head_may_be_rotated() -> None:
    frame = Frame.read(Keys("stablelm", **{"rope.dimension_count": 8}))
    x = np.random.default_rng(0).standard_normal((5, 2, 32)).astype(np.float32)
    shifted = frame.rotate(x, np.array([0.0, 1.0, 2.5, 100.0, 7.25]))
    np.testing.assert_array_equal(shifted[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(shifted[0], x[0])
    assert np.abs(shifted[1:, :, :8] - x[1:, :, :8]).max(axis=(1, 2)).min() > 0.1
    angle = 2.5 * 10000.0 ** (-2.0 * 1 / 8)  # of the second pair
    expected = x[2, 0, 1] * np.cos(angle) - x[2, 0, 5] * np.sin(angle)
    assert shifted[2, 0, 1] == pytest.approx(expected, abs=1e-6)


@each(
    ("base", "message"),
    [
        (
            Keys("bloom"),
            r"^model: expected an architecture whose positions are known \(gemma, gemma2, .*, found bloom$",
        ),
        (Keys("gpt-oss"), "found gpt-oss$"),
        (Keys(**{"rope.scaling.type": "yarn"}), "^model: expected keys rotated without scaling, .*scaling.type yarn$"),
        (Keys(attn_logit_softcapping=30.0), "^model: expected attention by the softmax of q·k alone, found llama"),
        (Keys(**{"attention.head_count": [2, 0]}), "^model: llama.attention.head_count: expected one number, found"),
    ],
)
def test_models_that_are_not_understood(base: Keys, message: str) -> None:
    with pytest.raises(SubkvError, match=message):
        Frame.read(base)


#
# summaries and derived rows
#


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_one_slot_per_token_equals_the_exact_cache(arch: str, tiny_model: Callable[..., Path]) -> None:
    """Untrained, with one slot per pooled token: the planted rows equal those of the prompt."""
    path, n = tiny_model(arch), 50
    plan, frame = Plan(n - 7, 3, 4), Frame.of(path)
    with capturing_file(path, n) as context:
        found = rows(context, n, n_last=4)
    trained = trained_without(IDENTITY, plan, found.shapes, frame, np.zeros(4, np.float32))
    summary = summarise(found.k, found.v, plan, frame)
    for project in (False, True):
        planted = trained.place(trained.slots(summary, project), n)
        assert len(planted) == len(found.k)
        for (k, v), keys, values in zip(planted, found.k, found.v, strict=True):
            np.testing.assert_allclose(k, keys[3:-4], atol=2e-5 * np.abs(keys).max())
            np.testing.assert_allclose(v, values[3:-4], atol=1e-6 * np.abs(values).max())


def test_attention_is_that_of_the_model(tiny_model: Callable[..., Path]) -> None:
    """Against a loop over heads and tokens, and the whole prompt against its last tokens."""
    with capturing_file(tiny_model("llama"), 64) as context:
        found = rows(context, 30, n_last=30)
    q, k, v, scale = found.q[1], found.k[1], found.v[1], found.scale[1]
    every = attention(q, k, v, scale)
    assert scale == pytest.approx(32**-0.5)
    for t in (0, 7, 29):
        for head in range(q.shape[1]):
            logits = scale * k[: t + 1, head // 2] @ q[t, head]
            weights = np.exp(logits - logits.max())
            expected = weights / weights.sum() @ v[: t + 1, head // 2]
            np.testing.assert_allclose(every[t, head], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(attention(q[-5:], k, v, scale), every[-5:], atol=1e-5)


def test_captures_do_not_depend_on_each_other(tiny_model: Callable[..., Path]) -> None:
    with capturing_file(tiny_model("llama"), 600) as context:
        first = rows(context, 600, seed=1, n_last=3)  # more than one batch
        rows(context, 20, seed=2)
        again = rows(context, 600, seed=1, n_last=3)
        assert [x.shape for x in (first.k[0], first.v[0], first.q[0])] == [(600, 2, 32), (600, 2, 32), (3, 4, 32)]
        for a, b in zip((*first.k, *first.v, *first.q), (*again.k, *again.v, *again.q), strict=True):
            np.testing.assert_array_equal(a, b)
        for bad, n in (([], 0), ([5] * 601, 601)):
            with pytest.raises(SubkvError, match=rf"^prompt: expected 1 to 600 tokens \(the context\), found {n}$"):
                context.capture(bad)


def test_rows_that_are_not_numbers() -> None:
    frame = Frame.read(Keys())
    k = [np.ones((20, 2, 32), np.float32), np.ones((20, 2, 32), np.float32)]
    v = [x.copy() for x in k]
    v[1][9, 0, 3] = np.nan
    with pytest.raises(SubkvError, match=r"^prompt: expected finite keys and values, found NaN .* in layer 1$"):
        summarise(k, v, Plan(4, 2, 2), frame)


def random_trained(plan: Plan, frame: Frame, n_layer: int = 2, n_head_kv: int = 2) -> Trained:
    rng = np.random.default_rng(3)
    shape = HeadShape(n_head_kv, frame.d_k, 16)
    start = no_maps(shape, plan.n_slots)

    def layer() -> LayerMaps:
        sizes = {f.name: getattr(start, f.name).shape for f in fields(start)}
        return LayerMaps(**{name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()})

    layers = tuple(layer() for _ in range(n_layer))
    trained = trained_without(IDENTITY, plan, [shape] * n_layer, frame, np.ones(8, np.float32))
    return replace(trained, layers=layers, guard={"a": 0.5}, provenance={"by": "a test"})


def test_slots_are_adapted_projected_weighted_and_turned() -> None:
    plan, frame = Plan(5, 2, 3), Frame.read(Keys())
    trained = random_trained(plan, frame)
    rng = np.random.default_rng(4)
    summary = Slots(
        [rng.standard_normal((2, 5, 32)).astype(np.float32) for _ in range(2)],
        [rng.standard_normal((2, 5, 16)).astype(np.float32) for _ in range(2)],
    )
    n_tokens = 45  # of another prompt than the summary's
    k, v = trained.place(trained.slots(summary, project=True), n_tokens)[1]
    layer, n = trained.layers[1], counts(n_tokens - 5, 5)
    for h in range(2):
        keys = layer.projector @ (summary.k[1][h] @ layer.a_k[h]) + np.log(n)[:, None] * layer.b_k[h]
        shifted = frame.rotate(keys[:, None], placed(plan, n_tokens)[0])[:, 0]
        np.testing.assert_allclose(k[:, h], shifted, rtol=1e-3, atol=1e-3)
        values = layer.projector @ (summary.v[1][h] @ layer.a_v[h] + layer.b_v[h])
        np.testing.assert_allclose(v[:, h], values, rtol=1e-3, atol=1e-3)
    static = trained.static()
    np.testing.assert_array_equal(static.k[0], trained.layers[0].prefix_k)
    assert [k.shape for k, _ in trained.place(static, 10)] == [(5, 2, 32)] * 2
    with pytest.raises(SubkvError, match=r"^summary: expected 2 layers, found 1$"):
        trained.slots(Slots(summary.k[:1], summary.v[:1]), project=False)
    with pytest.raises(SubkvError, match=r"^summary: layer 1: expected slots of .*\(2, 5, 32\).*found .*4, 32\)"):
        trained.slots(Slots([summary.k[0], summary.k[1][:, :4]], summary.v), project=False)


#
# the file
#


def test_the_file_round_trips(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    frame = Frame.of(tiny_model("llama"))
    trained = random_trained(Plan(5, 2, 3), frame)
    trained.save(tmp_path / "a.safetensors")
    trained.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    found = read(tmp_path / "a.safetensors", frame)
    assert found.digest == trained.digest
    assert (found.plan, found.guard, found.provenance) == (trained.plan, trained.guard, trained.provenance)
    assert (found.embedding, found.identity) == ("tokens", IDENTITY)
    slots = Slots([np.ones((2, 5, 32), np.float32)] * 2, [np.ones((2, 5, 16), np.float32)] * 2)
    for (k, v), (k2, v2) in zip(found.place(slots, 30), trained.place(slots, 30), strict=True):
        np.testing.assert_array_equal(k, k2)
        np.testing.assert_array_equal(v, v2)


def test_the_digest_covers_the_contents_of_a_library() -> None:
    trained = random_trained(Plan(5, 2, 3), Frame.read(Keys()))
    assert replace(trained, guard={}, provenance={}).digest == trained.digest
    for changed in ({"identity": "1" * 64}, {"plan": Plan(5, 2, 4)}, {"embedding": "hidden"}, {"centre": np.zeros(8)}):
        assert replace(trained, **changed).digest != trained.digest


def test_a_file_of_another_model_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "warm.safetensors"
    with Model(tiny_model("llama")) as model, Model(tiny_model("llama", seed=5)) as other:
        own, foreign = model_content(model.path), model_content(other.path)
        with capturing(model, 8, 1) as context:
            shapes = context.capture([5]).shapes
        trained_without(own, Plan(4, 1, 1), shapes, Frame.of(model.path), np.zeros(4, np.float32)).save(path)
        assert Trained.load(path, model).identity == own != foreign
        with pytest.raises(SubkvError, match=rf"^path: expected a file trained for this .*{foreign[:12]}…\)"):
            Trained.load(path, other)
