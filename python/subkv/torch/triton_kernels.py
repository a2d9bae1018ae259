"""The kernels of `subkv.SubspaceCache` in Triton (subkv_triton), for CUDA devices.

Triton's `attend` processes coded cells; `combine` adds the exact window and applies D_v. subkv_triton documents the
rounding. Exact keys and values are halves, as in the native engine, for any dtype of the model; larger values saturate.
There are no gradients.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import subkv_triton.ops as st
from subkv.torch.attend import QUERIES, Cells, Logits, Visibility
from subkv.torch.rows import RowCodec
from subkv_triton.fields import HALF_MAX

BIAS = 1 << 26  # maximum entries of attend's bias in memory
ALIGN = 32  # cells; kernels are specialised for multiples of this

_TABLES: WeakKeyDictionary[RowCodec, st.Codecs] = WeakKeyDictionary()


def tables(codec: RowCodec) -> st.Codecs:
    """A codec in the form of Triton's kernels, on its device; cached."""
    if codec not in _TABLES:
        ranks = [sum(n for n, _, _ in bands) for bands in codec.bands]

        def of_heads(x: Tensor, dtype: type[np.generic]) -> list[np.ndarray]:
            return [head[:rank].astype(dtype) for head, rank in zip(x.cpu().numpy(), ranks, strict=True)]

        _TABLES[codec] = st.Codecs.make(
            codec.bands,
            of_heads(codec.encode_basis, np.float16),  # halves in the file
            of_heads(codec.decode_basis, np.float16),
            of_heads(codec.offset, np.float32),
            codec.mean.device,
        )
    return _TABLES[codec]


def row_bytes(codec: RowCodec) -> int:
    """Kernels.row_bytes."""
    return tables(codec).row_bytes


@torch.no_grad()  # type: ignore[untyped-decorator]
def encode(codec: RowCodec, x: Tensor, rows: Tensor, first: int) -> Tensor:
    """Kernels.encode of keys or values."""
    batch, n = x.shape[0], x.shape[2]
    of_batch = rows.shape[1] * torch.arange(batch, device=x.device)
    cells = (of_batch[:, None] + torch.arange(first, first + n, device=x.device)).flatten()
    with torch.cuda.device_of(x):
        bad = st.encode_rows(tables(codec), x.transpose(1, 2).flatten(0, 1), cells, rows.view(-1, rows.shape[2]))
    return bad.view(batch, -1).sum(1)


@torch.no_grad()  # type: ignore[untyped-decorator]
def attend(q: Tensor, cells: Cells, mask: Tensor | None, params: Logits) -> Tensor:
    """Kernels.attend: softmax over coded cells per split in attend(), over all cells in combine()."""
    n_kv, n = cells.sink_k.shape[1], q.shape[2]
    k, v = tables(cells.codec_k), tables(cells.codec_v)
    visibility = Visibility(cells, mask, n)
    softcap = params.softcap or 0.0
    sinks = None if params.sinks is None else params.sinks.float().view(n_kv, -1).contiguous()
    grouped = q.float().unflatten(1, (n_kv, -1)).permute(0, 3, 1, 2, 4)  # [b, n, h, g, d]
    out = q.new_empty(len(q), n, q.shape[1], cells.sink_v.shape[-1])
    step = max(1, min(QUERIES, BIAS // (len(q) * cells.n_cells)))
    with torch.cuda.device_of(q):
        for low in range(0, n, step):
            at = slice(low, min(low + step, n))
            x = grouped[:, at].contiguous()
            n_coded = visibility.end_coded(at.stop)
            width = min(-(-n_coded // ALIGN) * ALIGN, cells.rows_k.shape[1])
            bias = pad(_bias(visibility.coded(at, 0, n_coded)), (0, width - n_coded), value=-torch.inf)
            of_mean = torch.einsum("bnhgd,hd->bnhg", x, cells.codec_k.mean).contiguous()
            partial = st.attend(
                k,
                v,
                cells.rows_k,
                cells.rows_v,
                st.project_queries(k, x, params.scale * cells.codec_k.gamma),
                bias,
                shift=params.scale * of_mean,
                softcap=softcap,
            )
            of_exact = _exact(params.scale * x, cells, visibility, at)
            combined = st.combine(v, partial, of_exact, softcap=softcap, sinks=sinks)
            out[:, at] = combined.flatten(2, 3).to(q.dtype)
    return out


def _exact(q: Tensor, cells: Cells, visibility: Visibility, at: slice) -> st.Exact:
    """Sinks and recent cells, and which of them the scaled queries q [b, n, h, g, d] see."""
    last, visible = visibility.recent(at)
    if not cells.n_recent:
        last, visible = slice(0, 0), visible[..., :0]
    k, v = (
        torch.cat([sink, recent[:, :, last]], 2).transpose(1, 2).clamp(-HALF_MAX, HALF_MAX).half().contiguous()
        for sink, recent in ((cells.sink_k, cells.recent_k), (cells.sink_v, cells.recent_v))
    )
    return st.Exact(k, v, q, _bias(torch.cat([visibility.sinks(at), visible.expand(len(q), -1, -1)], 2)))


def _bias(visible: Tensor) -> Tensor:
    """0 for visible cells, -inf for others."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
