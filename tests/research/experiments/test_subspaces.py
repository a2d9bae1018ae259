"""The functions of the subspace experiments, on data with known results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from research.experiments import bounds, oja, rotary
from subkv.native.gguf import Gguf
from subkv.plan.positions import Pairs, pairs

N, D = 192, 32


@pytest.fixture(scope="module")
def turn(tiny_model: Callable[..., Path]) -> Pairs:
    with Gguf(tiny_model("llama")) as base:
        found = pairs(base, D)
    assert found is not None
    return found


def rotated(turn: Pairs, rows: Any) -> Any:
    """Rows [n, d] as RoPE turns them at positions 0, 1, …"""
    return turn.rotate(rows, np.arange(len(rows))).astype(np.float32)


def test_frames_undo_the_rotation(turn: Pairs) -> None:
    """One vector at all positions has one direction before RoPE and in pair coordinates, but several after RoPE."""
    row = np.random.default_rng(0).standard_normal(D)
    keys = rotated(turn, np.tile(row, (N, 1)))
    spaces = rotary.frames(turn)
    np.testing.assert_allclose(spaces[rotary.BEFORE](keys), np.tile(row, (N, 1)), atol=1e-4)
    energy = float(np.sum(keys.astype(np.float64) ** 2))
    for name, frame in spaces.items():
        x = frame(keys)
        assert np.sum(np.abs(x) ** 2) == pytest.approx(energy, rel=1e-5)
        one = rotary.lost(rotary.moment(x), x, 1.0 / x.shape[1])[0]
        assert (one < 1e-5 * energy) == (name != rotary.AFTER)


@pytest.mark.parametrize("name", [rotary.AFTER, rotary.PAIRS, rotary.BEFORE])
def test_bases_of_a_moment(turn: Pairs, name: str) -> None:
    rng = np.random.default_rng(1)
    x = rotary.frames(turn)[name](rotated(turn, rng.standard_normal((N, D)) * np.exp(-np.arange(D) / 8.0)))
    basis, energy = rotary.directions(rotary.moment(x))
    np.testing.assert_allclose(basis.conj().T @ basis, np.eye(len(basis)), atol=1e-9)
    np.testing.assert_allclose(np.sum(np.abs(x @ basis) ** 2, axis=0), energy, rtol=1e-9)
    assert (np.diff(energy) <= 0.0).all()
    half = x @ basis[:, : len(basis) // 2] @ basis[:, : len(basis) // 2].conj().T
    assert rotary.lost(rotary.moment(x), x, 0.5)[0] == pytest.approx(float(np.sum(np.abs(x - half) ** 2)))
    assert rotary.lost(rotary.moment(x), x, 1.0)[0] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("bits", [0.5, 3.5])
def test_water_fills(bits: float) -> None:
    energy = np.exp(np.random.default_rng(2).standard_normal(D) * 4.0)
    given = rotary.water(energy, bits)
    assert given.mean() == pytest.approx(bits) and given.min() >= 0.0
    level = energy[given > 0.0] * 4.0 ** -given[given > 0.0]
    np.testing.assert_allclose(level, level[0], rtol=1e-6)  # every coded direction has the same error
    assert (energy[given == 0.0] <= level[0] * 1.000001).all()


def test_salient_tokens_are_those_attended_to() -> None:
    rng = np.random.default_rng(3)
    k = rng.standard_normal((N, D)).astype(np.float32)
    expected = np.array([40, 47, 63])
    q = np.tile(k[expected].sum(axis=0), (2, N, 1)).astype(np.float32)
    found = oja.salient(1.0, q, k, prompt=96)
    assert len(found) == 16 and set(expected) <= set(found)
    assert found.min() >= oja.EXACT and found.max() < 96 and (np.diff(found) > 0).all()


def test_bases_converge_to_the_subspace_of_the_text() -> None:
    """The rule finds the subspace of a text from a start in another subspace."""
    rng = np.random.default_rng(4)
    frame = np.linalg.qr(rng.standard_normal((D, D)))[0]
    x = (rng.standard_normal((1024, 8)) @ frame[:8]).astype(np.float32)
    start = np.concatenate([frame[4:8], (frame[20:24] + 0.1 * frame[:4]) / np.sqrt(1.01)])
    found = oja.bases_of(x, np.arange(oja.EXACT, 512), 512, start)
    assert len(found) == 1 + 512 // oja.PERIOD
    for basis in found:
        np.testing.assert_allclose(basis @ basis.T, np.eye(8), atol=1e-5)
    lost = [bounds.residual(x.astype(np.float64), basis) for basis in (start, found[0], found[-1])]
    assert lost[0] > 2.0 * lost[1] > 2.0 * lost[2], lost
    own, latest = (oja.reconstructed(x, found, 512, latest=latest) for latest in (False, True))
    np.testing.assert_array_equal(own[-oja.PERIOD :], latest[-oja.PERIOD :])
    last = x[-oja.PERIOD :].astype(np.float64)
    np.testing.assert_allclose(own[-oja.PERIOD :], last @ found[-1].T @ found[-1], atol=1e-5)
    assert np.linalg.norm(x - own) <= np.linalg.norm(x - oja.reconstructed(x, [start] * len(found), 512, latest=False))
