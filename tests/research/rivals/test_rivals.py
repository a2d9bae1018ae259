"""Other projects' codecs against published bits and distortions of the originals, and worked examples."""

from __future__ import annotations

import numpy as np
import pytest
from each import each

from research.rivals import exl3, kivi, kvarn, kvquant, oscar, registry, turboquant
from research.rivals.rival import Knowledge, Rival
from research.rivals.rounding import min_max
from subkv.base.errors import SubkvError
from subkv.format.arrays import F32
from subkv.plan import stock
from subkv.plan.basis import mixing_matrix
from subkv.plan.positions import Pairs


def gaussian(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def distortion(x: F32, decoded: F32) -> float:
    return float(np.sum((x - decoded) ** 2) / np.sum(x**2))


def turning(d: int) -> Pairs:
    """Rotations of neighbouring pairs, each with a different frequency."""
    theta = 0.7 ** np.arange(1.0, d, 2.0)
    return Pairs(np.arange(d) ^ 1, np.stack([-theta, theta], 1).ravel())


def known(heads: int = 2, d: int = 128, rotation: Pairs | None = None) -> Knowledge:
    same = [np.broadcast_to(np.eye(d), (heads, d, d))]
    return Knowledge(heads, d, same, same, same, rotation)


def made(text: str, model: Knowledge) -> Rival:
    return registry.rival(registry.parse(text), model)


@each(
    ("text", "bits"),
    [("exl3:4", 4.5), ("turboquant:4", 4.1875), ("kivi:2", 3.0), ("kvarn:4/2", 3.375), ("oscar:2", 2.25)]
    + [("rotated-q4_0", 4.5)],
)
def test_published_bits(text: str, bits: float) -> None:
    """At head size 128: KVarN's K 4.375 and V 2.375, OSCAR's 2.25 of rows, TurboQuant's norms and minima."""
    assert made(text, known()).row_bits == pytest.approx(bits)


def test_bits_of_outliers() -> None:
    """KVQuant's 4.32 and 3.32 bits, at Llama-7B's 4096 channels of a token."""
    for bits in (3, 4):
        rival = made(f"kvquant:{bits}", known(32, 128, turning(128)))
        assert rival.row_bits == pytest.approx(bits + 0.32, abs=0.01)


def test_bits_with_the_window() -> None:
    """OSCAR's 2.28 at 128k tokens."""
    rival = made("oscar:2", known())
    assert rival.row_bits + 16 * (rival.n_sink + rival.n_recent) / 131072 == pytest.approx(2.28, abs=0.01)


def test_grid_of_midpoints() -> None:
    """Less squared error than the rounding grid: the source says about 5%; on Gaussian rows it is 10%."""
    x = gaussian(4000, 64)
    y = x.reshape(-1, 32) @ mixing_matrix(32).astype(np.float32)
    largest = np.abs(y).max(1, keepdims=True)
    rounded = np.clip(np.rint(y / largest * 16), -16, 15) / 16 * largest
    ratio = distortion(x, exl3.round_trip(x, 5)) / distortion(y, rounded)
    assert 0.87 < ratio < 0.95


@pytest.mark.parametrize(("bits", "published"), [(2, 0.117), (3, 0.03), (4, 0.009)])
def test_distortion_of_turboquant(bits: int, published: float) -> None:
    """The paper's distortions of any unit vectors."""
    x = gaussian(2000, 128) * np.linspace(0.01, 3.0, 128, dtype=np.float32)
    assert distortion(x, turboquant.round_trip_keys(x, bits)) == pytest.approx(published, rel=0.16)


def test_turboquant_keeps_norms_and_zeros() -> None:
    x = gaussian(50, 64)
    x[7] = 0
    decoded = turboquant.round_trip_keys(x, 3)
    np.testing.assert_allclose(np.linalg.norm(decoded, axis=1), np.linalg.norm(x, axis=1), rtol=1e-3)


def test_groups_of_kivi() -> None:
    """Four levels are exact in every group of 32 tokens of a channel (keys) and 32 channels of a token (values)."""
    rng = np.random.default_rng(1)
    levels = rng.integers(0, 4, (2, 64, 64)).astype(np.float32)
    levels[:, ::32], levels[:, 1::32] = 0, 3
    scale = 2.0 ** rng.integers(-3, 3, (2, 2, 1, 64))
    keys = (levels.reshape(2, 2, 32, 64) * scale).reshape(2, 64, 64).astype(np.float32)
    np.testing.assert_allclose(kivi.round_trip_keys(keys, 2), keys, atol=1e-6)
    values = keys.swapaxes(1, 2)
    np.testing.assert_allclose(kivi.round_trip_values(values, 2), values, atol=1e-6)
    open_group = kivi.round_trip_keys(keys[:, :40] + gaussian(2, 40, 64), 2)
    np.testing.assert_array_equal(open_group[:, 32:], (keys[:, :40] + gaussian(2, 40, 64))[:, 32:])


def test_kvarn_undoes_scales_of_rows_and_columns() -> None:
    """Rows and columns of unequal scale: as good as without them, where rounding rows alone is not."""
    rng = np.random.default_rng(2)
    x = gaussian(4, 128, 64)
    columns = np.exp(rng.normal(0, 1.0, (4, 1, 64))).astype(np.float32)
    rows = np.exp(rng.normal(0, 1.0, (4, 128, 1))).astype(np.float32)

    def relative(decoded: F32) -> float:
        """Errors and values in units of the scales."""
        return distortion(x, decoded / rows / columns)

    plain = relative(rows * columns * min_max(x, 4, 2))
    assert relative(kvarn.round_trip_tiles(x * rows * columns, 4)) < 1.3 * plain
    assert relative(min_max(x * rows * columns, 4, 2)) > 5 * plain


def test_clipping_of_oscar() -> None:
    """4 levels between minimum and maximum waste range on Gaussian rows; clipping wins some of it back."""
    x, y = gaussian(1, 2000, 64), gaussian(1, 2000, 64, seed=1)
    keys, values = made("oscar:2", known(1, 64)).round_trip(0, x, y, 0)
    plain = distortion(x, min_max(x, 2, -1))
    assert distortion(x, keys) < 0.9 * plain and distortion(y, values) < 0.9 * plain


def test_oscar_rotates_towards_queries() -> None:
    """Queries of one direction: its eigenvector is an axis before the Hadamard matrix spreads it evenly."""
    moment = np.diag(np.arange(1.0, 65.0))
    rotation = oscar._rotation(moment)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(64), atol=1e-5)
    np.testing.assert_allclose(np.abs(rotation), 1 / 8, atol=1e-5)


def test_kvquant_before_rope() -> None:
    """A key that positions alone turn is one constant per channel before RoPE, so it costs nothing to quantize."""
    turn = turning(64)
    constant = np.broadcast_to(gaussian(2, 1, 64), (2, 300, 64)).astype(np.float32)
    positions = np.arange(4, 304)
    rotated = turn.rotate(constant, positions).astype(np.float32)
    np.testing.assert_allclose(turn.rotate(rotated, -positions), constant, atol=1e-5)
    assert np.abs(rotated - constant).max() > 0.5
    keys, _ = made("kvquant:2", known(2, 64, turn)).round_trip(0, rotated, constant, 4)
    np.testing.assert_allclose(keys, rotated, atol=2e-3)


def test_kvquant_keeps_outliers() -> None:
    """1% are exact, the rest is close to the best quantizer of a Gaussian, which has 0.0095 at 4 bits."""
    x = gaussian(4000, 192)
    x[::200] *= 50
    for decoded in (kvquant.round_trip_channels(x, np.ones(192), 4), kvquant.round_trip_tokens(x, np.ones(192), 4)):
        exact = decoded == x
        assert 0.009 < exact.mean() < 0.012
        assert np.mean((x - decoded)[np.abs(x) < 4] ** 2) < 0.02
    assert kvquant.outliers_of_token(192) == 2


def test_rows_of_other_codecs_start_behind_the_sinks() -> None:
    x = gaussian(2, 200, 128)
    for sides in ("kv", "k", "v"):
        k, v = registry.coder(made("kvarn:2", known()), 5, sides)(0, x, x)
        for side, decoded in (("k", k), ("v", v)):
            assert decoded.shape == x.shape
            np.testing.assert_array_equal(decoded[:, :5], x[:, :5])
            np.testing.assert_array_equal(decoded[:, 133:], x[:, 133:])
            assert (np.abs(decoded - x)[:, 5:133].max() > 0) == (side in sides)


def test_stock_type_by_another_name() -> None:
    x = gaussian(2, 20, 128)
    k, v = made("rotated-q4_0", known()).round_trip(0, x, x, 0)
    np.testing.assert_array_equal(k, stock.round_trip("q4_0", x, True))
    np.testing.assert_array_equal(v, stock.round_trip("q4_0", x, False))


@each("text", ["", "exl4:4", "exl3", "exl3:1", "exl3:4/", "exl3:4/9", "oscar:3", "kivi:4/2/2", "rotated-f16"])
def test_unknown_codecs(text: str) -> None:
    with pytest.raises(
        SubkvError, match=r"^codecs: expected codecs out of exl3:2…8, .*oscar:2, rotated-q8_0.*, found "
    ):
        registry.parse(text)


@pytest.mark.parametrize(
    ("text", "d", "sentence"),
    [
        ("kvarn:4", 96, "expected a head size that is a power of two, found 96"),
        ("exl3:4", 80, "expected a head size in multiples of 32, found 80"),
        ("rotated-q8_0", 80, "expected a head size in multiples of 32, found 80"),
        ("kvquant:4", 64, "kvquant expects a model whose rotary positions are known here, found another"),
    ],
)
def test_codecs_that_do_not_fit(text: str, d: int, sentence: str) -> None:
    with pytest.raises(SubkvError, match=sentence):
        made(text, known(2, d))
