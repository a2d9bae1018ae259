"""Calibration statistics against the rows of an ordinary cache of the same run."""

from __future__ import annotations

import ctypes
import struct

import engine
import numpy as np
import pytest
from engine import SUBKV, C, Refused, observe_values, observed, session


def cached_keys(s: engine.Session, n_tokens: int, n_head_kv: int, d: int) -> np.ndarray:
    """K rows of layer 0 from the state of sequence 0, [n_tokens, n_head_kv, d]: half-precision post-RoPE keys."""
    data = s.state(0)
    row = n_head_kv * d * 2
    head = struct.pack("<iQ", 1, row)  # type f16, bytes of a row
    at = data.index(head) + len(head)
    return (
        np.frombuffer(data, np.float16, n_tokens * n_head_kv * d, at).reshape(n_tokens, n_head_kv, d).astype(np.float64)
    )


@pytest.mark.parametrize("n_skip", [0, 4])
def test_moments_are_those_of_the_cached_rows(model: engine.Model, tokens: list[int], n_skip: int) -> None:
    obs = SUBKV.subkv_observer_new(n_skip)
    assert SUBKV.subkv_observer_mode(obs, 1, None, 0, None, 0)
    with session(model, observer=obs, n_ubatch=32) as s:
        s.decode(tokens[:100])
        shape = observed(obs, 0)
        keys = cached_keys(s, 100, shape.n_head_kv, shape.d_k)[n_skip:]
    assert shape.n_tokens == 100 - n_skip and shape.n_nonfinite == 0
    assert shape.scale == pytest.approx(shape.d_k**-0.5)
    k1 = observe_values(obs, 0, "k1", (shape.n_head_kv, shape.d_k))
    k2 = observe_values(obs, 0, "k2", (shape.n_head_kv, shape.d_k, shape.d_k))
    np.testing.assert_allclose(k1, keys.mean(0), atol=2e-3 * np.abs(keys).max())
    np.testing.assert_allclose(
        k2, np.einsum("thi,thj->hij", keys, keys) / len(keys), atol=2e-3 * np.abs(keys).max() ** 2
    )
    for what, d in (("q2", shape.d_k), ("v2", shape.d_v)):
        second = observe_values(obs, 0, what, (shape.n_head_kv, d, d))
        assert np.linalg.eigvalsh(second).min() > -1e-9 and np.trace(second, axis1=1, axis2=2).min() > 0
        np.testing.assert_allclose(second, second.swapaxes(1, 2), rtol=1e-12)
    SUBKV.subkv_observer_free(obs)


def test_samples_are_rows(model: engine.Model, tokens: list[int]) -> None:
    obs = SUBKV.subkv_observer_new(4)
    keys = np.array([3, 10, 40], np.int32)
    queries = np.array([50, 60], np.int32)
    pointer = ctypes.POINTER(ctypes.c_int32)
    assert SUBKV.subkv_observer_mode(obs, 2, keys.ctypes.data_as(pointer), 3, queries.ctypes.data_as(pointer), 2)
    with session(model, observer=obs, n_ubatch=32) as s:
        s.decode(tokens[:64])
        shape = observed(obs, 0)
        cached = cached_keys(s, 64, shape.n_head_kv, shape.d_k)
    assert (shape.n_key, shape.n_query, shape.n_tokens) == (3, 2, 0)
    ks = observe_values(obs, 0, "ks", (3, shape.n_head_kv, shape.d_k))
    np.testing.assert_allclose(ks, cached[keys], atol=1e-3 * np.abs(cached).max())
    qs = observe_values(obs, 0, "qs", (2, shape.n_head, shape.d_k))
    assert np.abs(qs).max() > 0
    SUBKV.subkv_observer_free(obs)


def test_observing_changes_nothing(model: engine.Model, tokens: list[int]) -> None:
    with session(model) as s:
        expected = s.decode(tokens[:60])
    obs = SUBKV.subkv_observer_new(0)
    SUBKV.subkv_observer_mode(obs, 1, None, 0, None, 0)
    with session(model, observer=obs) as s:
        assert np.array_equal(expected, s.decode(tokens[:60]))
    SUBKV.subkv_observer_free(obs)


def test_latent_rows(tiny_model) -> None:  # type: ignore[no-untyped-def]
    """Values are the first elements of keys; queries are those applied to the latent."""
    model = engine.Model(tiny_model("deepseek2"))
    obs = SUBKV.subkv_observer_new(4)
    SUBKV.subkv_observer_mode(obs, 1, None, 0, None, 0)
    with session(model, observer=obs) as s:
        s.decode(list(range(10, 70)))
        shape = observed(obs, 0)
        keys = cached_keys(s, 60, 1, 48)[4:]
    assert (shape.n_head, shape.n_head_kv, shape.d_k, shape.d_v, shape.n_tokens) == (4, 1, 48, 32, 56)
    k2, v2, q2 = (observe_values(obs, 0, what, (1, d, d)) for what, d in (("k2", 48), ("v2", 32), ("q2", 48)))
    np.testing.assert_allclose(v2, k2[:, :32, :32], rtol=1e-6)
    np.testing.assert_allclose(k2[0], keys[:, 0].T @ keys[:, 0] / 56, atol=2e-3 * np.abs(keys).max() ** 2)
    assert np.linalg.eigvalsh(q2[0])[-1] > 0
    SUBKV.subkv_observer_free(obs)
    model.free()


def test_a_model_that_cannot_be_calibrated(tiny_model) -> None:  # type: ignore[no-untyped-def]
    model = engine.Model(tiny_model("t5"))
    obs = SUBKV.subkv_observer_new(0)
    with pytest.raises(Refused, match="an encoder"), session(model, observer=obs):
        pass
    SUBKV.subkv_observer_free(obs)
    model.free()


def test_bad_requests() -> None:
    assert not SUBKV.subkv_observer_new(-1)
    assert "n_skip" in engine.last_error()
    obs = SUBKV.subkv_observer_new(0)
    assert not SUBKV.subkv_observer_mode(obs, 7, None, 0, None, 0)
    assert SUBKV.subkv_observer_get(obs, 0, b"zz", None, 0) == -1
    SUBKV.subkv_observer_free(obs)
    assert C is not None
