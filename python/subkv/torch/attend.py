"""Attention over coefficients in torch: exact sinks, coded cells in tiles, exact recent cells, one softmax.

Shapes: b batch, h KV heads, g query heads of a KV head, n queries, t cells, d head size, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subkv.torch.rows import RowCodec

LOGITS = 1 << 22  # maximum number of logits in memory
TILE = 2048  # maximum cells dequantized at once
QUERIES = 256  # queries per piece of the recent band


@dataclass(frozen=True)
class Cells:
    """A layer's cells, counted from 0. The exact window starts at `start` [b], the first cell that is not padding.

    rows_k, rows_v: [b, at least n_cells, row_bytes] uint8. sink_k, sink_v: [b, h, n_sink, d], cells start,
    start + 1, …. recent_k, recent_v: [b, h, at least the queries', d], the last cells; where a query's last n_recent
    cells begin before them, it reads codes.
    """

    codec_k: RowCodec
    codec_v: RowCodec
    rows_k: Tensor
    rows_v: Tensor
    sink_k: Tensor
    sink_v: Tensor
    recent_k: Tensor
    recent_v: Tensor
    start: Tensor
    n_cells: int
    n_recent: int

    @property
    def first_recent(self) -> int:
        """The first cell of recent_k and recent_v."""
        return self.n_cells - self.recent_k.shape[2]


@dataclass(frozen=True)
class Logits:
    """Parameters of a layer's logits. softcap: cap·tanh(logit/cap); sinks: [n_head], logits without a value."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class _Softmax:
    """Running maximum, sum and weighted values of a softmax whose cells are added in several pieces.

    q: [b, n_head, n, d_k] of n_kv KV heads; the member is grouped: [b, h, g, n, d_k] float32. The argument `at` of the
    methods is a slice of the n queries.
    """

    def __init__(self, q: Tensor, n_kv: int, d_v: int, rank: int, params: Logits) -> None:
        self.dtype, self.params = q.dtype, params
        self.q = q = q.float().unflatten(1, (n_kv, -1))
        shape = q.shape[:-1]
        if params.sinks is None:
            self.top = q.new_full(shape, -torch.inf)
        else:
            self.top = params.sinks.float().view(1, shape[1], shape[2], 1).expand(shape).clone()
        self.total = torch.full_like(self.top, 0.0 if params.sinks is None else 1.0)
        self.exact, self.coded = q.new_zeros(*shape, d_v), q.new_zeros(*shape, rank)

    def add(self, at: slice, logits: Tensor, visible: Tensor, values: Tensor, coded: bool) -> None:
        """logits: [b, h, g, n of `at`, t], scaled; visible: [b, n, t] bool; values: [b, h, t, d or r]."""
        if self.params.softcap is not None:
            logits = self.params.softcap * torch.tanh(logits / self.params.softcap)
        logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
        top = torch.maximum(self.top[..., at], logits.amax(-1))
        shift = torch.where(top.isinf(), 0.0, top)  # 0 for a query without visible cells so far
        rescale, weight = torch.exp(self.top[..., at] - shift), torch.exp(logits - shift[..., None])
        self.top[..., at] = top
        self.total[..., at] = self.total[..., at] * rescale + weight.sum(-1)
        bad = ~values.isfinite().all(-1, keepdim=True)
        if bad.any():  # zero times NaN is NaN, also for queries that do not see the cell
            self.total[..., at].masked_fill_(_over_cells((weight > 0.0).float(), bad.float())[..., 0] > 0.0, torch.nan)
            values = values.masked_fill(bad, 0.0)
        self.exact[..., at, :] *= rescale[..., None]
        self.coded[..., at, :] *= rescale[..., None]
        (self.coded if coded else self.exact)[..., at, :] += _over_cells(weight, values)

    def add_exact(self, at: slice, k: Tensor, v: Tensor, visible: Tensor) -> None:
        """k, v: [b, h, t, d]; visible as in add()."""
        self.add(at, self.params.scale * _over_cells(self.q[..., at, :], k.float().mT), visible, v.float(), False)

    def output(self, decode_basis: Tensor | None = None) -> Tensor:
        """[b, n, n_head, d] in q's dtype; 0 for a query without visible cells. decode_basis None: no coded cells."""
        values = self.exact if decode_basis is None else self.exact + _over_cells(self.coded, decode_basis)
        values = (values / self.total.clamp(min=1e-30)[..., None]).to(self.dtype)
        return values.flatten(1, 2).transpose(1, 2)


def _over_cells(a: Tensor, b: Tensor) -> Tensor:
    """a [b, h, g, n, x] times b [(b,) h, x, y], shared by the queries of a KV head: [b, h, g, n, y]."""
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


class Visibility:
    """The cells that the last n cells' queries see: sinks, coded cells and recent cells, without overlap.

    mask: as in attend(). at: slice of the queries. Results are bool, [b or 1, queries, cells].
    """

    def __init__(self, cells: Cells, mask: Tensor | None, n: int) -> None:
        self._cells, self._mask, self.first = cells, mask, cells.n_cells - n
        self._device = cells.start.device
        self._position = torch.arange(self.first, cells.n_cells, device=self._device)[:, None]
        self._start = cells.start[:, None, None]
        self._window = self._start + cells.sink_k.shape[2]  # earlier cells are sinks or padding

    def allowed(self, at: slice, low: int, high: int) -> Tensor:
        """Cells among those from low to high that the mask allows, or that are not after the query."""
        if self._mask is not None:
            return self._mask[:, at, low:high]
        return torch.arange(low, high, device=self._device)[None, None] <= self._position[at][None]

    def sinks(self, at: slice) -> Tensor:
        """Visible sinks."""
        cell = self._start + torch.arange(self._cells.sink_k.shape[2], device=self._device)
        visible = cell <= self._position[at]
        if self._mask is None:
            return visible
        mask = self._mask[:, at]
        return visible & mask.gather(2, cell.clamp(max=self._cells.n_cells - 1).expand(-1, mask.shape[1], -1))

    def end_coded(self, stop: int) -> int:
        """No query before query `stop` reads codes from this cell on."""
        return max(0, self.first + stop - self._cells.n_recent, self._cells.first_recent)

    def coded(self, at: slice, low: int, high: int) -> Tensor:
        """Visible coded cells among those from low to high."""
        j = torch.arange(low, high, device=self._device)
        has_no_row = j < self._cells.first_recent
        is_coded = ((j <= self._position[at] - self._cells.n_recent) | has_no_row) & (j >= self._window)
        return self.allowed(at, low, high) & is_coded

    def recent(self, at: slice) -> tuple[slice, Tensor]:
        """A slice of the exact recent cells that contains all visible ones, and which of its cells each query sees."""
        first = self._cells.first_recent
        low, high = max(first, self.first + at.start - self._cells.n_recent + 1), self.first + at.stop
        j = torch.arange(low, high, device=self._device)
        is_recent = (j > self._position[at] - self._cells.n_recent) & (j >= self._window)
        return slice(low - first, high - first), self.allowed(at, low, high) & is_recent


def attend(q: Tensor, cells: Cells, mask: Tensor | None, params: Logits) -> Tensor:
    """Causal attention of the last n cells' queries.

    q: [b, n_head, n, d_k]. mask: [b, n, n_cells] bool, the cells that a query may see, not after itself; None: all up
    to itself. Returns [b, n, n_head, d_v] in q's dtype, computed in float32.
    """
    n_kv, n, first = cells.sink_k.shape[1], q.shape[2], cells.n_cells - q.shape[2]
    softmax = _Softmax(q, n_kv, cells.sink_v.shape[-1], cells.codec_v.rank, params)
    visibility = Visibility(cells, mask, n)
    if cells.sink_k.shape[2]:
        softmax.add_exact(slice(0, n), cells.sink_k, cells.sink_v, visibility.sinks(slice(0, n)))

    # each query is projected once, and each coded cell is dequantized once for all queries
    codec = cells.codec_k
    projected = params.scale * codec.gamma[:, None, None, None] * _over_cells(softmax.q, codec.decode_basis.mT)
    of_mean = params.scale * _over_cells(softmax.q, codec.mean[:, :, None])
    tile = min(TILE, max(64, LOGITS // (q.shape[0] * q.shape[1] * n)))
    end = visibility.end_coded(n)
    for low in range(0, end, tile):
        high = min(low + tile, end)
        at = slice(0 if low < cells.first_recent else max(0, low + cells.n_recent - first), n)
        c = codec.decode(cells.rows_k[:, low:high])
        logits = _over_cells(projected[..., at, :], c.mT) + of_mean[..., at, :]
        values = cells.codec_v.decode(cells.rows_v[:, low:high])
        softmax.add(at, logits, visibility.coded(at, low, high), values, True)

    for low in range(0, n if cells.n_recent else 0, QUERIES):
        at = slice(low, min(low + QUERIES, n))
        recent, visible = visibility.recent(at)
        softmax.add_exact(at, cells.recent_k[:, :, recent], cells.recent_v[:, :, recent], visible)

    return softmax.output(cells.codec_v.decode_basis)


def attend_exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: Logits) -> Tensor:
    """Attention of an ordinary layer whose logits torch's own function does not support.

    q: [b, n_head, n, d_k]; k, v: [b, n_head_kv, t, d]; mask: [b, n, t] bool, None: causal, the last query sees all of
    k. Returns as attend().
    """
    n, n_cells = q.shape[2], k.shape[2]
    softmax = _Softmax(q, k.shape[1], v.shape[-1], 0, params)
    j = torch.arange(n_cells, device=q.device)
    for low in range(0, n, QUERIES):
        at = slice(low, min(low + QUERIES, n))
        i = torch.arange(low, at.stop, device=q.device)[:, None] + n_cells - n
        visible = (j <= i)[None] if mask is None else mask[:, at]
        softmax.add_exact(at, k, v, visible)
    return softmax.output()
