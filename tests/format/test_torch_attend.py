"""Attention in torch and through Triton against softmax written out: exact cells, coded cells, soft caps, learned
sinks, padding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from each import each

torch = pytest.importorskip("torch")

from test_torch_codec import D, heads_of  # noqa: E402

from subkv.torch import attend as torch_attend  # noqa: E402
from subkv.torch.attend import Cells, Logits, attend_exact  # noqa: E402
from subkv.torch.rows import RowCodec  # noqa: E402

N_KV, GROUP, T = 2, 3, 90
HOW = [
    Logits(0.2),
    Logits(0.3, softcap=4.0),
    Logits(0.2, sinks=torch.linspace(-1.0, 3.0, N_KV * GROUP)),
    Logits(0.3, softcap=4.0, sinks=torch.linspace(-1.0, 3.0, N_KV * GROUP)),
]


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written_out(q: Any, k: Any, v: Any, visible: Any, how: Logits) -> Any:
    """k, v [b, h, n, t, d]: cell t for query n; visible [b, n, t]. Returns [b, n, n_head, d]."""
    logits = how.scale * torch.einsum("bhgnd,bhntd->bhgnt", q.unflatten(1, (N_KV, GROUP)), k)
    if how.softcap is not None:
        logits = how.softcap * torch.tanh(logits / how.softcap)
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    if how.sinks is not None:
        extra = how.sinks.view(1, N_KV, GROUP, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, extra], -1)
    weight = logits.softmax(-1).nan_to_num(0.0)[..., : k.shape[3]]
    return torch.einsum("bhgnt,bhntd->bnhgd", weight, v).flatten(2, 3)


@each("how", HOW)
@each("padded", [False, True])
def test_ordinary_layers(how: Logits, padded: bool) -> None:
    n = 20
    q, k, v = random(2, N_KV * GROUP, n, D), random(2, N_KV, T, D, seed=1), random(2, N_KV, T, D, seed=2)
    visible = (torch.arange(T) <= torch.arange(T - n, T)[:, None]).repeat(2, 1, 1)
    visible[0, :, : 75 * padded] = False  # the first queries of row 0 see nothing then
    per_query = (x[:, :, None].expand(-1, -1, n, -1, -1) for x in (k, v))
    want = written_out(q, *per_query, visible, how)
    torch.testing.assert_close(attend_exact(q, k, v, visible if padded else None, how), want, atol=1e-5, rtol=1e-5)


@each("how", HOW)
@each("n_recent", [0, 1, 13, 200])
@each("n_lost", [0, 9, 200])
@each("n", [1, 40, T])
def test_coded_layers(how: Logits, n_recent: int, n_lost: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query reads the first and the last cells exactly, and all others decoded, also those without a row."""
    monkeypatch.setattr(torch_attend, "TILE", 32)
    monkeypatch.setattr(torch_attend, "QUERIES", 16)
    out, want = coded(torch_attend.attend, how, n_recent, n_lost, n, 0.1)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-4)


@each("how", [HOW[0], HOW[3]])
@each(("n_recent", "n_lost", "n"), [(0, 0, 20), (1, 0, 1), (13, 0, 20), (200, 0, 20), (13, 5, 20), (200, 200, 20)])
def test_coded_layers_through_triton(
    how: Logits, n_recent: int, n_lost: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in pieces of queries; the window, queries and weights are rounded to halves."""
    pytest.importorskip("triton")
    from subkv.torch import triton_kernels as triton_attend

    def attend(q: Any, cells: Cells, visible: Any, how: Logits) -> Any:
        k, v = (triton_attend.tables(codec) for codec in (cells.codec_k, cells.codec_v))
        words = {"rows_k": k.from_rows(cells.rows_k), "rows_v": v.from_rows(cells.rows_v)}
        return triton_attend.attend(q, dataclasses.replace(cells, **words), visible, how)

    monkeypatch.setattr(triton_attend, "QUERIES", 16)
    out, want = coded(attend, how, n_recent, n_lost, n, 0.01)  # logits of a few units
    torch.testing.assert_close(out, want, atol=4e-3 * float(want.abs().max()), rtol=0.0)


def coded(attend: Any, how: Logits, n_recent: int, n_lost: int, n: int, size: float) -> tuple[Any, Any]:
    """The output of `attend` for queries of this size, and the expected output. n_lost: recent cells without a row."""
    heads = [heads_of(seed, [((16, 5), (16, 3)), ((24, 8),)]) for seed in (0, 1)]
    codec_k = RowCodec(heads[0], np.random.default_rng(0).permutation(D), [0.9, 1.1])
    codec_v = RowCodec(heads[1], np.arange(D), [1.0, 1.0])
    q, k, v = size * random(2, N_KV * GROUP, n, D), random(2, N_KV, T, D, seed=1), random(2, N_KV, T, D, seed=2)
    rows = [codec.encode(codec.coefficients(x)) for codec, x in ((codec_k, k), (codec_v, v))]
    pad, n_sink = (7, 0), 4
    start = torch.tensor(pad)
    sinks = [torch.stack([x[b, :, p : p + n_sink] for b, p in enumerate(pad)]) for x in (k, v)]
    held = min(T, n + max(0, n_recent - n_lost))
    cells = Cells(codec_k, codec_v, *rows, *sinks, k[:, :, T - held :], v[:, :, T - held :], start, T, n_recent)
    i, j = torch.arange(T - n, T)[:, None], torch.arange(T)
    visible = (j <= i) & (j >= start[:, None, None])
    is_recent = (j > i - n_recent) & (j >= T - held)
    exact = (is_recent | (j < (start + n_sink)[:, None, None]))[:, None, :, :, None]
    k_hat = codec_k.gamma[:, None, None] * (codec_k.decode(rows[0]) @ codec_k.decode_basis) + codec_k.mean[:, None]
    v_hat = codec_v.decode(rows[1]) @ codec_v.decode_basis
    per_query = (torch.where(exact, a[:, :, None], b[:, :, None]) for a, b in ((k, k_hat), (v, v_hat)))
    want = written_out(q, *per_query, visible, how)
    return attend(q, cells, visible, how), want
