"""Rows of coefficients in torch, for all KV heads of a layer at once, on the model's device.

FORMAT.md §2 and §3 as tables over [n_head_kv, r], where r is the largest rank of the layer; smaller heads have unused
entries. encode() writes the same bytes as subkv.format.codec (tests compare them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subkv.format import codec
from subkv.format.bases import StoredBasis
from subkv.torch.trellis import Paths
from subkv_triton.fields import (
    HALF,
    HALF_MAX,
    PATH_BELOW,
    PATH_TRIED,
    SCALE_CANDIDATES_BELOW,
    SCALE_MOST,
    SCALE_NAN,
    SCALE_ONE,
    Fields,
    scale_table,
)

T = TypeVar("T")
Pair = tuple[T, T]  # of keys and of values
PIECE = 1 << 16  # coefficients encoded at once, with eleven candidate scales each, in float64


class RowCodec:
    """Bases and bands of one layer's keys or values; immutable, shared by all caches of a model.

    heads: bands and bases of every KV head. order: [d] for every coordinate of the bases: its index in the model's
    vectors. gamma: [n_head_kv], factor of approximate logits; ones for values.
    bands: (n, bits, ratio) of every head. row_bytes: bytes of a cell's row. rank: the largest rank. encode_basis,
    decode_basis: [n_head_kv, rank, d] float32; mean: [n_head_kv, d] float32, subtracted from keys; offset:
    [n_head_kv, rank], its coefficients. All in the order of the model's vectors.
    """

    def __init__(self, heads: Sequence[StoredBasis], order: NDArray[np.int64], gamma: Sequence[float]) -> None:
        inverse = np.argsort(order)
        self.d = len(order)
        self.bands = [
            [(n, bits, float(rho)) for (n, bits), rho in zip(head.bands, head.ratio, strict=True)] for head in heads
        ]
        self.rank = max(codec.rank(head.bands) for head in heads)
        bases = np.zeros((2, len(heads), self.rank, self.d), dtype=np.float32)
        offset = np.zeros((len(heads), self.rank), dtype=np.float32)
        for h, head in enumerate(heads):
            n = codec.rank(head.bands)
            bases[0, h, :n], bases[1, h, :n] = head.encode[:, inverse], head.decode[:, inverse]
            offset[h, :n] = -head.coefficients(np.zeros((1, self.d), dtype=np.float32))[0]
        self.encode_basis, self.decode_basis = torch.from_numpy(bases[0]), torch.from_numpy(bases[1])
        self.mean = torch.from_numpy(np.stack([head.mean[inverse] for head in heads]).astype(np.float32))
        self.gamma, self.offset = torch.tensor(gamma, dtype=torch.float32), torch.from_numpy(offset)

        n_bytes = [codec.row_bytes(head.bands) for head in heads]
        self.row_bytes = sum(n_bytes)
        fields = [Fields.of(bands, self.rank) for bands in self.bands]

        def of_layer(name: str) -> Tensor:
            return torch.from_numpy(np.stack([getattr(of, name) for of in fields], -2))  # [2,] n_head_kv, rank

        self._scale_byte = torch.from_numpy(np.cumsum([0, *n_bytes[:-1]]))
        self._head_of_byte = torch.from_numpy(np.repeat(np.arange(len(heads)), n_bytes))
        self._byte = self._scale_byte[:, None] + of_layer("byte")  # index in the cell's row
        self._shift, self._mask, self._low = of_layer("shift"), of_layer("mask"), of_layer("lift")
        self._ratio, self._half, self._wide = of_layer("ratio"), of_layer("zero"), of_layer("kind") == HALF
        self._step, self._centre, self._bend = of_layer("step"), of_layer("centre"), of_layer("bend")
        self._on = of_layer("on")
        of_head = self.rank * torch.arange(len(heads))[:, None]
        self._before = (of_layer("before") + of_head).flatten(1)  # index over all heads' coefficients
        self._paths = Paths.of([(of.path, of.step) for of in fields], self.rank)
        self._scales = torch.from_numpy(scale_table())
        self._copies = {self.mean.device: self}  # by device

    def to(self, device: torch.device) -> RowCodec:
        """This codec on a device; one copy per device."""
        if device not in self._copies:
            moved = self._copies[device] = object.__new__(RowCodec)
            for name, value in vars(self).items():
                setattr(moved, name, value.to(device) if isinstance(value, Tensor | Paths) else value)
        return self._copies[device]

    def __deepcopy__(self, memo: Any) -> RowCodec:
        return self

    @property
    def n_bytes(self) -> int:
        """Bytes of the bases in memory."""
        return sum(t.nbytes for t in (self.encode_basis, self.decode_basis, self.mean, self.offset))

    def coefficients(self, x: Tensor) -> Tensor:
        """c = E x − E μ of vectors x [batch, n_head_kv, n, d]: [batch, n_head_kv, n, rank] float32."""
        return x.float() @ self.encode_basis.mT - self.offset[:, None]

    def encode(self, c: Tensor) -> Tensor:
        """Encode the result of coefficients() to rows [batch, n, row_bytes] uint8.

        A head's row of zeros is a zero row; one that is not finite decodes to NaN. On CPUs libsubkv encodes, whose path
        search takes a fiftieth of torch's time.
        """
        return self._encode_native(c) if c.device.type == "cpu" else self.encode_in_torch(c)

    def _encode_native(self, c: Tensor) -> Tensor:
        batch, _, n, _ = c.shape
        heads = []
        for bands, of_head in zip(self.bands, c.detach().numpy().swapaxes(0, 1), strict=True):
            of_rank = sum(size for size, _, _ in bands)
            x = of_head[..., :of_rank].reshape(batch * n, of_rank)
            rows = codec.encode(x, tuple((size, bits) for size, bits, _ in bands), [rho for _, _, rho in bands])
            heads.append(torch.from_numpy(rows).view(batch, n, -1))
        return torch.cat(heads, 2)

    def encode_in_torch(self, c: Tensor) -> Tensor:
        """encode() with torch, on any device."""
        c = c.transpose(1, 2)
        step = max(1, PIECE // c[:, 0].numel())
        return torch.cat([self._encode(piece) for piece in c.split(step, 1)], 1)

    def _encode(self, c: Tensor) -> Tensor:
        """Rows of coefficients [batch, n, n_head_kv, rank]."""
        finite = c.isfinite().all(-1)
        live = finite & (c != 0).any(-1)
        clean = torch.where(live[..., None], c, 1.0)
        chosen = self._choose_scales(clean)
        on_path = None
        if self._paths is not None:
            chosen = self._choose_path_scales(self._paths, clean, chosen)
            on_path = self._paths.codes(clean, self._scales[chosen])
        code = _codes(clean, self._scales[chosen][..., None] * self._ratio, self._half).int()
        if on_path is not None:
            code = torch.where(self._on > 0, on_path, code)
        halves = clean.clamp(-HALF_MAX, HALF_MAX).half().view(torch.int16).int() & 0xFFFF
        code = torch.where(self._wide, halves, code)[:, :, None]  # [batch, n, 1, n_head_kv, rank]
        parts = ((code >> self._low) & self._mask) << self._shift
        batch, n = parts.shape[:2]
        rows = torch.zeros(batch, n, self.row_bytes, dtype=torch.int32, device=c.device)
        rows.scatter_add_(2, self._byte.flatten().expand(batch, n, -1), parts.flatten(2))
        rows[:, :, self._scale_byte] += chosen.int()
        rows *= live[:, :, self._head_of_byte]
        rows[:, :, self._scale_byte] += SCALE_NAN * ~finite
        return rows.to(torch.uint8)

    def _choose_scales(self, c: Tensor) -> Tensor:
        """Scale codes [batch, n, n_head_kv] of least squared error; candidates and rounding as in the codec."""
        coded = self._half > 0.0
        reach = torch.where(coded, c.abs() / (self._ratio * self._half), 0.0).amax(-1)
        start = (torch.searchsorted(self._scales[1:SCALE_NAN], reach) + 1).clamp(max=SCALE_MOST)
        k = start[..., None] - torch.arange(SCALE_CANDIDATES_BELOW + 1, device=c.device)
        total = self._squared_error(c, k.clamp(min=1), coded)
        best = torch.where(k >= 1, total, torch.inf).argmin(-1)
        chosen = k.gather(-1, best[..., None])[..., 0]
        return torch.where(coded.any(-1), chosen, SCALE_ONE)

    def _choose_path_scales(self, paths: Paths, c: Tensor, middle: Tensor) -> Tensor:
        """Scale codes of rows with a path; `middle`, the result of _choose_scales(), for others."""
        k = middle[..., None] + torch.arange(-PATH_BELOW, PATH_TRIED - PATH_BELOW, device=c.device)
        valid = k.clamp(1, SCALE_MOST)
        cost = paths.free_cost(c, self._scales[valid])
        coded = (self._half > 0.0) & (self._on == 0)
        if coded.any():
            cost = cost + self._squared_error(c, valid, coded)
        least, best = torch.where(k == valid, cost, torch.inf).min(-1)
        chosen = k.gather(-1, best[..., None])[..., 0]
        return torch.where(paths.any & (least < torch.inf), chosen, middle)

    def _squared_error(self, c: Tensor, k: Tensor, counted: Tensor) -> Tensor:
        """Squared error [batch, n, n_head_kv, candidates] at scale codes k, without a path; counted: coefficients."""
        x, half = c[..., None, :], self._half[:, None]  # [batch, n, n_head_kv, candidates, rank]
        step = self._scales[k][..., None] * self._ratio[:, None]
        centred = (_codes(x, step, half) - half).double()
        error = torch.where(counted[:, None], (x.double() - step.double() * centred).float(), 0.0).double()
        lane = torch.zeros(*k.shape, 8, device=c.device)
        for part in error.split(8, -1):
            lane = (lane + part * part).float()
        even, odd = lane[..., [0, 2]] + lane[..., [4, 6]], lane[..., [1, 3]] + lane[..., [5, 7]]
        return (even[..., 0] + even[..., 1]) + (odd[..., 0] + odd[..., 1])

    def decode(self, rows: Tensor) -> Tensor:
        """Rows [batch, n, row_bytes] to dequantized coefficients [batch, n_head_kv, n, rank] float32."""
        batch, n = rows.shape[:2]
        parts = rows[:, :, self._byte.flatten()].view(batch, n, 2, -1, self.rank).int()
        code = (((parts >> self._shift) & self._mask) << self._low).sum(2, dtype=torch.int32)
        scale = self._scales[rows[:, :, self._scale_byte].long()][..., None]  # 0 for a zero row, or NaN
        if self._paths is None:
            c = scale * self._step * (code - self._centre)
        else:
            low = code & self._on
            last, second_last = (low.flatten(-2).index_select(-1, before).view_as(low) for before in self._before)
            y = ((code << self._on) ^ (((second_last << 1) ^ last) * self._on)) - self._centre
            size = y.abs()
            level = size + (size - self._bend[0]).clamp(min=0.0) + (size - self._bend[1]).clamp(min=0.0)
            c = scale * self._step * level.copysign(y)
        if self._wide.any():
            c = torch.where(self._wide, code.to(torch.int16).view(torch.half) * torch.where(scale > 0.0, 1.0, scale), c)
        return c.transpose(1, 2)


def _codes(c: Tensor, step: Tensor, half: Tensor) -> Tensor:
    """Codes as float32; shapes broadcast. Products are rounded as in a fused multiply-add, as in the codec."""
    u = (c.double() * (1.0 / step) + half).float().round()
    return torch.minimum(u.clamp(min=0.0), 2.0 * half)
