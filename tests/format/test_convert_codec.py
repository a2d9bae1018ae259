"""Rows: the format, byte by byte, and the same bytes from its definition in numpy; every kernel: tests/kernels."""

from __future__ import annotations

import codec_numpy
import numpy as np
import pytest
import trellis_numpy
import widths
from codec_numpy import SCALE_ONE, scale_table
from format_constants import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from subkv.format import calibration, metadata, window
from subkv.format.bases import Bands
from subkv.format.codec import decode, encode, rank, round_trip, row_bytes
from subkv.plan.budget import GROUP
from subkv.plan.quantizer import WIDTHS
from subkv_triton import fields
from subkv_triton.widths import BENDS, PLANES, SHARES

BANDS = st.lists(
    st.tuples(st.integers(1, 4).map(lambda n: 8 * n), st.sampled_from(WIDTHS)), min_size=1, max_size=8
).map(tuple)


def rows_of(seed: int, n: int, bands: Bands, spread: float = 2.0) -> np.ndarray:
    """[n, rank] float32 of very different sizes, with some zero, tiny and non-finite rows."""
    rng = np.random.default_rng(seed)
    c = rng.standard_normal((n, rank(bands))) * np.exp(spread * rng.standard_normal((n, 1)))
    c[0] = 0.0
    if n > 3:
        c[1] = 1e-30
        c[2, rng.integers(rank(bands))] = rng.choice([np.nan, np.inf, -np.inf])
        c[3] *= 1e5
    return c.astype(np.float32)


@given(st.integers(0, 10**9), BANDS)
@settings(max_examples=60, deadline=None)
def test_round_trip_error_is_bounded_by_the_step(seed: int, bands: Bands) -> None:
    rng = np.random.default_rng(seed)
    ratio = rng.uniform(0.1, 1.0, len(bands)).astype(np.float32)
    c = rows_of(seed, 12, bands)
    rows = encode(c, bands, ratio)
    assert rows.shape == (12, row_bytes(bands))
    back = decode(rows, bands, ratio)
    bad = ~np.isfinite(c).all(axis=1)
    live = ~bad & (c != 0).any(axis=1)
    assert not back[~live & ~bad].any() and np.isnan(back[bad]).all()
    assert not rows[~live & ~bad].any() and not rows[bad, 1:].any()
    assert ((rows[live, 0] > 0) & (rows[live, 0] < 255)).all() and (rows[bad, 0] == 255).all()
    scale = scale_table()[rows[:, 0]]
    first = 0
    path = trellis_numpy.Path.of(bands, list(ratio), latent=False)
    error, bound, widest, clipped = (np.zeros(int(live.sum())) for _ in range(4))
    for (n, bits), rho in zip(bands, ratio, strict=True):
        part = slice(first, first + n)
        first += n
        if path is not None and bits in BENDS:
            step = (scale * rho)[live, None] * SHARES[bits]
            reach = trellis_numpy.levels(bits)[-1] * step
            assert (np.abs(back[live, part]) <= reach * 1.0001).all()
            error += ((back[live, part].astype(np.float64) - c[live, part]) ** 2).sum(axis=1)
            bound += n * (3 * step[:, 0]) ** 2
            widest = np.maximum(widest, step[:, 0])
            clipped += (np.abs(c[live, part]) > reach).sum(axis=1)
            continue
        if bits == 16:
            np.testing.assert_allclose(back[live, part], np.clip(c[live, part], -65504, 65504), rtol=1e-3, atol=6e-8)
            continue
        step = (scale * rho)[live, None]
        reach = 0.5 * (2**bits - 1) * step
        inside = np.abs(c[live, part]) <= reach
        assert (np.abs(back[live, part] - c[live, part]) <= 0.5001 * step + (~inside) * 1e30).all()
        assert (np.abs(back[live, part]) <= reach * 1.0001).all()
    # a path takes at most every second level, at most three steps apart; two bits at its end are given by its beginning
    assert (error <= (bound + 2 * (9 * widest) ** 2) * 1.0001 + 1e30 * (clipped > 0)).all()


@given(st.integers(0, 10**9), BANDS)
@settings(max_examples=30, deadline=None)
def test_codes_survive_packing(seed: int, bands: Bands) -> None:
    """Any row of bytes decodes, to levels of its bands."""
    rng = np.random.default_rng(seed)
    ratio = rng.uniform(0.1, 1.0, len(bands)).astype(np.float32)
    rows = rng.integers(0, 256, (6, row_bytes(bands))).astype(np.uint8)
    rows[:, 0] = rng.integers(100, 200, 6)
    c = decode(rows, bands, ratio)
    if any(bits == 16 for _, bits in bands):
        c = np.where(np.isfinite(c), c, np.float32(0.0))
    first = 0
    path = trellis_numpy.Path.of(bands, list(ratio), latent=False)
    for (n, bits), rho in zip(bands, ratio, strict=True):
        step = (scale_table()[rows[:, 0]] * rho)[:, None]
        if path is not None and bits in BENDS:
            y = c[:, first : first + n] / (step * SHARES[bits])
            distance = np.abs(y[..., None] - trellis_numpy.levels(bits)).min(axis=-1)
            assert distance.max() < 1e-3
        elif bits != 16:
            code = c[:, first : first + n] / step + 0.5 * (2**bits - 1)
            np.testing.assert_allclose(code, np.rint(code), atol=1e-3)
            assert code.min() > -0.01
            assert code.max() < 2**bits - 0.99
        first += n


def test_planes_have_the_layout_of_the_format() -> None:
    """5 bits: a 4-bit plane then a 1-bit plane; coefficient j of an m-byte plane is in byte j % m at bit w·(j / m)."""
    bands: Bands = ((16, 5),)
    codes = np.arange(16) * 2 + 1  # 1, 3, … 31
    c = (codes - 15.5).astype(np.float32)[None, :]
    row = encode(c, bands, [1.0])[0]
    assert row[0] == SCALE_ONE  # the data are exactly on the levels of s = 1
    assert len(row) == 1 + 10
    for j, code in enumerate(codes):
        low = row[1 + j % 8] >> (4 * (j // 8)) & 15
        high = row[9 + j % 2] >> (j // 2) & 1
        assert low | high << 4 == code


def test_sixteen_bit_band_is_plain_half_precision() -> None:
    c = np.linspace(-3, 3, 8, dtype=np.float32)[None, :]
    row = encode(c, ((8, 16),), [1.0])[0]
    assert row[0] == SCALE_ONE
    np.testing.assert_array_equal(row[1:].view("<f2"), c[0].astype(np.float16))


def test_scale_table() -> None:
    table = scale_table()
    assert table[0] == 0.0 and np.isnan(table[255])
    np.testing.assert_allclose(table[1:255], 2.0 ** ((np.arange(1, 255) - 160) / 8), rtol=1e-7)


@given(st.integers(0, 10**9), BANDS, st.sampled_from([0, 1, 16, 1030]))
@settings(max_examples=40, deadline=None)
def test_rows_are_those_of_the_definition(seed: int, bands: Bands, n: int) -> None:
    """Bytes and coefficients, bit for bit."""
    ratio = np.random.default_rng(seed).uniform(0.1, 1.0, len(bands)).astype(np.float32)
    c = rows_of(seed, max(n, 1), bands)[:n]
    c[-1:, 0] = -0.0
    rows = encode(c, bands, ratio)
    np.testing.assert_array_equal(rows, codec_numpy.encode(c, bands, ratio))
    want = codec_numpy.decode(rows, bands, ratio)
    np.testing.assert_array_equal(decode(rows, bands, ratio).view(np.uint32), want.view(np.uint32))


def test_python_kernels_have_the_constants_of_libsubkv() -> None:
    c = constants()
    assert {bits: c.planes[bits] for bits in PLANES} == PLANES
    assert {16, *PLANES} == set(c.widths)
    assert (c.scale_one, c.scale_candidates_below) == (fields.SCALE_ONE, fields.SCALE_CANDIDATES_BELOW)
    assert c.half_max == fields.HALF_MAX
    np.testing.assert_array_equal(fields.scale_table(), np.array(c.scales, dtype=np.float32))
    for least, below, tried in (
        (fields.PATH_LEAST, fields.PATH_BELOW, fields.PATH_TRIED),
        (trellis_numpy.LEAST, trellis_numpy.BELOW, trellis_numpy.TRIED),
    ):
        assert (least, below, tried) == (c.trellis.least, c.trellis.below, c.trellis.tried)
    assert c.trellis.least_latent == trellis_numpy.LEAST_LATENT
    assert c.trellis.bends == BENDS
    assert {bits: float(np.float32(share)) for bits, share in SHARES.items()} == c.trellis.shares


def test_widths_are_those_of_the_table() -> None:
    """Of kernels/include/subkv/widths.h, in Python and in FORMAT.md."""
    assert widths.MODULE.read_text("utf-8") == widths.module(widths.TABLE.read_text("utf-8"))
    text = (widths.ROOT / "converter/FORMAT.md").read_text("utf-8").partition("| b | p | q | share (f32) |")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2 : 2 + len(BENDS)]]
    assert {int(b): (int(p), int(q)) for b, p, q, *_ in rows} == BENDS
    assert {int(b): float(share) for b, _, _, share, _ in rows} == SHARES


def test_defaults_and_limits_are_those_of_libsubkv() -> None:
    c = constants()
    assert (c.max_sink, c.max_recent) == (window.MAX_SINK, window.MAX_RECENT)
    assert (c.n_sink, c.n_recent, c.n_rollback) == (window.N_SINK, window.N_RECENT, window.N_ROLLBACK)
    assert (c.max_layers, c.max_heads_kv) == (calibration.MAX_LAYERS, calibration.MAX_HEADS)
    assert (c.max_head_size, c.band_step, c.version) == (calibration.MAX_HEAD_SIZE, GROUP, metadata.VERSION)
    assert c.widths == WIDTHS


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"coefficients: expected float32 \[n, 8\], found float64 \[2, 8\]"):
        encode(np.zeros((2, 8)), ((8, 4),), [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rows: expected uint8 \[n, 5\], found uint8 \[2, 6\]"):
        decode(np.zeros((2, 6), dtype=np.uint8), ((8, 4),), [1.0])
    with pytest.raises(ValueError, match="ratio: expected one for each of 1 bands, found 2"):
        encode(np.zeros((2, 8), dtype=np.float32), ((8, 4),), [1.0, 1.0])
    with pytest.raises(ValueError, match="expected one of 16, 8, 6, 5, 4, 3, 2 bits, found 7"):
        encode(np.zeros((2, 8), dtype=np.float32), ((8, 7),), [1.0])


def test_searching_the_scale_beats_never_clipping() -> None:
    rng = np.random.default_rng(0)
    c = rng.standard_normal((500, 64)).astype(np.float32)
    c[:, 0] *= 3.0
    error = np.mean((round_trip(c, ((64, 3),), [1.0]) - c) ** 2)
    widest = np.abs(c).max(axis=1, keepdims=True) / 3.5
    plain = np.clip(np.rint(c / widest + 3.5), 0, 7) * widest - 3.5 * widest
    assert error < 0.8 * np.mean((plain - c) ** 2)
