"""Constants and rows through the C interface: Python's view of kernels/include/subkv/format.h, and the ops."""

from __future__ import annotations

from collections.abc import Sequence

import codec_numpy
import numpy as np
from each import each
from format_constants import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_codec import BANDS, rows_of

from subkv.format.bases import Bands
from subkv.format.codec import row_bytes
from subkv.native import library


def test_constants() -> None:
    found = constants()
    scales = np.exp2((np.arange(256) - found.scale_one) / 8).astype(np.float32)
    scales[0], scales[255] = 0.0, np.nan
    np.testing.assert_array_equal(np.array(found.scales, np.float32), scales)
    assert found.scale_one == 160 and found.scale_candidates_below == 10  # FORMAT.md §3, kernels/ref/encode.cpp
    assert found.half_max == np.finfo(np.float16).max
    assert found.widths == (2, 3, 4, 5, 6, 8, 16) and all(sum(p) == bits for bits, p in found.planes.items())
    assert {bits: p for bits, p in found.planes.items() if len(p) > 1} == {6: (4, 2), 5: (4, 1), 3: (2, 1)}
    assert (found.max_layers, found.max_heads_kv, found.max_sink, found.max_recent) == (1024, 1024, 4096, 65536)
    assert (found.version, found.max_bands, found.max_head_size, found.band_step) == (5, 8, 576, 8)
    trellis = found.trellis  # kernels/include/subkv/trellis.h
    assert (trellis.least, trellis.least_latent, trellis.below, trellis.tried) == (24, 64, 2, 4)
    assert trellis.bends == {2: (2, 4), 3: (5, 6), 4: (9, 12), 5: (19, 25), 6: (37, 50)}
    shares = {2: 0.411522634, 3: 0.40290088, 4: 0.358166188, 5: 0.353481798, 6: 0.329380765}
    assert trellis.shares == {bits: float(np.float32(share)) for bits, share in shares.items()}


def pointers(bands: Sequence[tuple[int, int]], ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.array(bands, np.int32), np.asarray(ratio, np.float32)


@given(st.integers(0, 10**9), BANDS, st.sampled_from([1, 16, 1030]))
@settings(max_examples=40, deadline=None)
def test_rows(seed: int, bands: Bands, n: int) -> None:
    """The bytes and the coefficients of the definition in numpy, bit for bit."""
    b, ratio = pointers(bands, np.random.default_rng(seed).uniform(0.1, 1.0, len(bands)))
    c = rows_of(seed, n, bands)
    c[-1, 0] = -0.0
    rows = np.full((n, row_bytes(bands)), 0xAA, np.uint8)
    lib = library.load()
    bad = lib.subkv_encode_rows(b.ctypes.data, ratio.ctypes.data, len(b), c.ctypes.data, n, rows.ctypes.data)
    assert bad == (~np.isfinite(c).all(axis=1)).sum()
    np.testing.assert_array_equal(rows, codec_numpy.encode(c, bands, ratio))
    back = np.full(c.shape, np.nan, np.float32)
    assert lib.subkv_decode_rows(b.ctypes.data, ratio.ctypes.data, len(b), rows.ctypes.data, n, back.ctypes.data)
    np.testing.assert_array_equal(back.view(np.uint32), codec_numpy.decode(rows, bands, ratio).view(np.uint32))


@each(
    ("bands", "ratio", "n", "reason"),
    [
        ([], [], 1, "bands: expected 1..8 bands and a ratio of each, found 0"),
        ([(8, 4)] * 9, [1.0] * 9, 1, "bands: expected 1..8 bands and a ratio of each, found 9"),
        ([(8, 4), (12, 4)], [1.0] * 2, 1, "bands[1]: expected a positive multiple of 8 coefficients, "),
        ([(0, 4)], [1.0], 1, "bands[0]: expected a positive multiple of 8 coefficients, "),
        ([(128, 4), (456, 4)], [1.0] * 2, 1, "bands[1]: expected a positive multiple of 8 coefficients, at most 576 "),
        ([(8, 7)], [1.0], 1, "bands[0]: expected one of 16, 8, 6, 5, 4, 3, 2 bits, found 7"),
        ([(8, 4)], [0.0], 1, "ratio[0]: expected a positive finite number, found 0"),
        ([(8, 4)], [np.nan], 1, "ratio[0]: expected a positive finite number, found nan"),
        ([(8, 4)], [1.0], -1, "n: expected rows and room for them, found -1"),
        ([(8, 4)], [1.0], 1, "n: expected rows and room for them, found 1 and NULL"),
    ],
)
def test_refused(bands: list[tuple[int, int]], ratio: list[float], n: int, reason: str) -> None:
    b, rho = pointers(bands, np.array(ratio))
    lib = library.load()
    assert lib.subkv_encode_rows(b.ctypes.data, rho.ctypes.data, len(b), None, n, None) == -1
    assert library.last_error().startswith(f"subkv_encode_rows: {reason}")
    assert not lib.subkv_decode_rows(b.ctypes.data, rho.ctypes.data, len(b), None, n, None)
    assert library.last_error().startswith(f"subkv_decode_rows: {reason}")
