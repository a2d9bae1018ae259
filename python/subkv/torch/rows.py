"""Rows of coefficients in torch, all KV heads of a layer at once, on whatever device the model is.

FORMAT.md §2 and §3 as tables over [n_head_kv, r], r being the largest rank of a layer: heads with fewer coefficients
have empty places, which code to nothing. encode() writes the bytes of converter.codec (the tests compare them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subkv.format import codec
from subkv.format.bases import StoredBasis

PIECE = 1 << 16  # coefficients encoded at once: eleven candidate scales of each, in float64


class RowCodec:
    """Bases and bands of one layer's keys or values; immutable, shared by all caches of a model.

    heads: bands and bases of every KV head. order: [d] index into the model's vectors for every coordinate of the
    bases. gamma: [n_head_kv], what approximate logits are multiplied with; ones for values.
    bands: (n, bits, ratio) of every head. row_bytes: bytes of a cell's row. rank: the largest rank. encode_basis,
    decode_basis: [n_head_kv, rank, d] float32; mean: [n_head_kv, d] float32, what keys are coded less of, offset:
    [n_head_kv, rank], its coefficients. All in the order of the model's vectors.
    """

    def __init__(self, heads: Sequence[StoredBasis], order: NDArray[np.int64], gamma: Sequence[float]) -> None:
        back = np.argsort(order)
        n_head, self.d = len(heads), len(order)
        self.bands = [
            [(n, bits, float(rho)) for (n, bits), rho in zip(head.bands, head.ratio, strict=True)] for head in heads
        ]
        self.rank = max(codec.rank(head.bands) for head in heads)
        shape = (n_head, self.rank)
        bases = np.zeros((2, *shape, self.d), dtype=np.float32)
        offset, half, ratio = np.zeros((3, *shape), dtype=np.float32)
        ratio[:] = 1.0
        wide = np.zeros(shape, dtype=bool)
        byte = np.zeros((2, *shape), dtype=np.int64)  # of the cell's row, for the low and the high bits of a code
        shift, mask, low = (np.zeros((2, *shape), dtype=np.int32) for _ in range(3))
        scale_byte: list[int] = []
        head_of_byte: list[int] = []
        for h, head in enumerate(heads):
            n = codec.rank(head.bands)
            bases[0, h, :n], bases[1, h, :n] = head.encode[:, back], head.decode[:, back]
            offset[h, :n] = -head.coefficients(np.zeros((1, self.d), dtype=np.float32))[0]
            scale_byte.append(len(head_of_byte))
            first, at = 0, scale_byte[h] + 1
            for (size, bits), rho in zip(head.bands, head.ratio, strict=True):
                j, here = np.arange(size), slice(first, first + size)
                first += size
                if bits == 16:  # a half, low byte first
                    wide[h, here] = True
                    byte[0, h, here], byte[1, h, here] = at + 2 * j, at + 2 * j + 1
                    mask[:, h, here], low[1, h, here] = 255, 8
                    at += 2 * size
                    continue
                half[h, here], ratio[h, here] = 0.5 * (2**bits - 1), rho
                below = 0
                for part, width in enumerate(codec.PLANES[bits]):
                    n_bytes = size * width // 8
                    byte[part, h, here], shift[part, h, here] = at + j % n_bytes, width * (j // n_bytes)
                    mask[part, h, here], low[part, h, here] = (1 << width) - 1, below
                    below += width
                    at += n_bytes
            head_of_byte += [h] * codec.row_bytes(head.bands)
        self.row_bytes = len(head_of_byte)
        self.encode_basis, self.decode_basis = torch.from_numpy(bases[0]), torch.from_numpy(bases[1])
        self.mean = torch.from_numpy(np.stack([head.mean[back] for head in heads]).astype(np.float32))
        self.gamma = torch.tensor(gamma, dtype=torch.float32)
        self.offset, self._half, self._ratio, self._wide, self._byte, self._shift, self._mask, self._low = (
            torch.from_numpy(table) for table in (offset, half, ratio, wide, byte, shift, mask, low)
        )
        self._scale_byte, self._head_of_byte = torch.tensor(scale_byte), torch.tensor(head_of_byte)
        self._scales = torch.from_numpy(codec.scale_table())
        self._on = {self.mean.device: self}  # copies by device

    def to(self, device: torch.device) -> RowCodec:
        """The same on a device, where there is one copy of it."""
        if device not in self._on:
            moved = self._on[device] = object.__new__(RowCodec)
            for name, value in vars(self).items():
                setattr(moved, name, value.to(device) if isinstance(value, Tensor) else value)
        return self._on[device]

    def __deepcopy__(self, memo: Any) -> RowCodec:
        return self

    @property
    def n_bytes(self) -> int:
        """Bytes of the bases as held here."""
        return sum(t.nbytes for t in (self.encode_basis, self.decode_basis, self.mean, self.offset))

    def coefficients(self, x: Tensor) -> Tensor:
        """c = E x − E μ of vectors x [batch, n_head_kv, n, d]: [batch, n_head_kv, n, rank] float32."""
        return x.float() @ self.encode_basis.mT - self.offset[:, None]

    def encode(self, c: Tensor) -> Tensor:
        """Coefficients as of coefficients() to rows [batch, n, row_bytes] uint8.

        Those of a head that are zero or not finite become a zero row.
        """
        c = c.transpose(1, 2)
        step = max(1, PIECE // c[:, 0].numel())
        return torch.cat([self._encode(piece) for piece in c.split(step, 1)], 1)

    def _encode(self, c: Tensor) -> Tensor:
        """The same of [batch, n, n_head_kv, rank]."""
        live = c.isfinite().all(-1) & (c != 0).any(-1)
        clean = torch.where(live[..., None], c, 1.0)
        chosen = self._choose_scales(clean)
        code = _codes(clean, self._scales[chosen][..., None] * self._ratio, self._half).int()
        halves = clean.clamp(-codec.HALF_MAX, codec.HALF_MAX).half().view(torch.int16).int() & 0xFFFF
        code = torch.where(self._wide, halves, code)[:, :, None]  # [batch, n, 1, n_head_kv, rank]
        parts = ((code >> self._low) & self._mask) << self._shift
        batch, n = parts.shape[:2]
        rows = torch.zeros(batch, n, self.row_bytes, dtype=torch.int32, device=c.device)
        rows.scatter_add_(2, self._byte.flatten().expand(batch, n, -1), parts.flatten(2))
        rows[:, :, self._scale_byte] += chosen.int()
        rows *= live[:, :, self._head_of_byte]
        return rows.to(torch.uint8)

    def _choose_scales(self, c: Tensor) -> Tensor:
        """Scale codes [batch, n, n_head_kv] of least squared error, the candidates and roundings those of the codec."""
        coded = self._half > 0.0
        reach = torch.where(coded, c.abs() / (self._ratio * self._half), 0.0).amax(-1)
        start = (torch.searchsorted(self._scales[1:], reach) + 1).clamp(max=255)
        k = start[..., None] - torch.arange(codec.CANDIDATES_BELOW + 1, device=c.device)
        x, half = c[..., None, :], self._half[:, None]  # [batch, n, n_head_kv, candidates, rank]
        step = self._scales[k.clamp(min=1)][..., None] * self._ratio[:, None]
        centred = (_codes(x, step, half) - half).double()
        error = torch.where(coded[:, None], (x.double() - step.double() * centred).float(), 0.0).double()
        lane = torch.zeros(*k.shape, 8, device=c.device)
        for part in error.split(8, -1):
            lane = (lane + part * part).float()
        even, odd = lane[..., [0, 2]] + lane[..., [4, 6]], lane[..., [1, 3]] + lane[..., [5, 7]]
        total = (even[..., 0] + even[..., 1]) + (odd[..., 0] + odd[..., 1])
        best = torch.where(k >= 1, total, torch.inf).argmin(-1)
        chosen = k.gather(-1, best[..., None])[..., 0]
        return torch.where(coded.any(-1), chosen, codec.SCALE_ONE)

    def decode(self, rows: Tensor) -> Tensor:
        """Rows [batch, n, row_bytes] to dequantized coefficients [batch, n_head_kv, n, rank] float32."""
        batch, n = rows.shape[:2]
        parts = rows[:, :, self._byte.flatten()].view(batch, n, 2, -1, self.rank).int()
        code = (((parts >> self._shift) & self._mask) << self._low).sum(2, dtype=torch.int32)
        scale = self._scales[rows[:, :, self._scale_byte].long()][..., None]  # 0 of a zero row
        c = scale * self._ratio * (code - self._half)
        if self._wide.any():
            c = torch.where(self._wide, code.to(torch.int16).view(torch.half) * (scale > 0.0), c)
        return c.transpose(1, 2)


def _codes(c: Tensor, step: Tensor, half: Tensor) -> Tensor:
    """Codes as float32; shapes broadcast. The products are those of a fused multiply-add, as in the codec."""
    u = (c.double() * (1.0 / step) + half).float().round()
    return torch.minimum(u.clamp(min=0.0), 2.0 * half)
