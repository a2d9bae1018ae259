"""Rows in torch: the bytes of subkv.format.codec, all heads of a layer at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from test_convert_codec import BANDS, rows_of  # noqa: E402

from subkv.format import codec  # noqa: E402
from subkv.format.bases import Bands, StoredBasis  # noqa: E402
from subkv.torch.rows import PIECE, RowCodec  # noqa: E402

D = 64


def heads_of(seed: int, bands: list[Bands]) -> list[StoredBasis]:
    """Random bases, means and ratios, one head per element of `bands`."""
    rng = np.random.default_rng(seed)
    return [
        StoredBasis(
            b,
            rng.standard_normal((codec.rank(b), D)).astype(np.float16),
            rng.standard_normal((codec.rank(b), D)).astype(np.float16),
            rng.uniform(0.1, 1.0, len(b)).astype(np.float32),
            rng.standard_normal(D).astype(np.float16),
        )
        for b in bands
    ]


@given(st.integers(0, 10**9), st.lists(BANDS, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_bytes_are_the_codecs(seed: int, bands: list[Bands]) -> None:
    heads = heads_of(seed, bands)
    rows = RowCodec(heads, np.arange(D), [1.0] * len(heads))
    c = np.zeros((2, len(heads), 8, rows.rank), dtype=np.float32)
    want, want_c = [], np.zeros_like(c)
    for h, head in enumerate(heads):
        r = codec.rank(head.bands)
        x = rows_of(seed + h, 16, head.bands)
        c[:, h, :, :r] = x.reshape(2, 8, r)
        want.append(codec.encode(x, head.bands, head.ratio))
        want_c[:, h, :, :r] = codec.decode(want[h], head.bands, head.ratio).reshape(2, 8, r)
    want_c[np.isnan(want_c).any(axis=-1)] = np.nan  # beyond the head's rank, too
    for encode in (rows.encode, rows.encode_in_torch):
        coded = encode(torch.from_numpy(c))
        np.testing.assert_array_equal(coded.numpy().reshape(16, -1), np.concatenate(want, axis=1))
    np.testing.assert_array_equal(rows.decode(coded).numpy(), want_c)


def test_pieces_do_not_show() -> None:
    heads = heads_of(1, [((32, 4), (32, 3))] * 2)
    rows = RowCodec(heads, np.arange(D), [1.0, 1.0])
    n = 2 * PIECE // (2 * 64) + 5
    c = torch.randn(1, 2, n, rows.rank, generator=torch.Generator().manual_seed(0))
    pieces = [rows.encode_in_torch(part) for part in c.split(97, 2)]
    assert torch.equal(rows.encode_in_torch(c), torch.cat(pieces, 1))
    assert torch.equal(rows.encode(c), torch.cat(pieces, 1))


def test_coefficients_are_those_of_the_bases_in_another_order() -> None:
    heads = heads_of(2, [((16, 4),), ((24, 8),)])
    order = np.random.default_rng(0).permutation(D)
    rows = RowCodec(heads, order, [1.0, 1.0])
    x = np.random.default_rng(1).standard_normal((5, D)).astype(np.float32)
    c = rows.coefficients(torch.from_numpy(np.stack([x, x]))[None])[0].numpy()
    for h, head in enumerate(heads):
        r = codec.rank(head.bands)
        np.testing.assert_allclose(c[h, :, :r], head.coefficients(x[:, order]), rtol=1e-4, atol=1e-4)
        assert not c[h, :, r:].any()
        back = c[h] @ rows.decode_basis[h].numpy() + rows.mean[h].numpy()
        want = head.coefficients(x[:, order]) @ head.decode.astype(np.float32) + head.mean.astype(np.float32)
        np.testing.assert_allclose(back[:, order], want, rtol=1e-3, atol=1e-3)


def test_a_copy_shares_the_bases() -> None:
    rows = RowCodec(heads_of(3, [((8, 4),)]), np.arange(D), [1.0])
    assert copy.deepcopy(rows) is rows
    assert rows.to(torch.device("cpu")) is rows
