"""The kernels of `subkv.SubspaceCache` in libsubkv (kernels/cuda), for NVIDIA's GPUs and builds with CUDA.

They read tiles of 64 cells, which are stored where other kernels have 64 rows. Exact keys and values are halves, as in
the native engine, for any dtype of the model; larger values saturate. Few queries use the kernel that decodes; more use
torch's attention on rows of halves, or with soft caps and sinks libsubkv's slower kernel. There are no gradients. Work
is launched on torch's current stream.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from subkv.base.errors import CacheError
from subkv.native import library
from subkv.torch.attend import Cells, Logits, Visibility
from subkv.torch.rows import Pair, RowCodec
from subkv_triton.fields import HALF_MAX

NAME = "cuda"  # subkv_device_kernel_name()
TILE = 64  # cells
PIECE = 512  # queries of a sequence in a call
MOST_TOKENS = 65535  # queries of a call
MOST_MASK = 1 << 26  # entries of a call's mask, repeated for the query heads of a KV head
HALF_NAN = 0x7E00  # of rows that are not finite
NO_POSITION = 1 << 30  # of a cell that no query reads exactly
ALIGN = 64  # rows of a prompt, for torch's attention

_i32, _i64, _float, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Head(ctypes.Structure):
    """subkv_cuda_head."""

    _fields_ = [
        *library.members(_ptr, "bands", "ratio", "encode", "decode", "offset", "mean"),
        ("gamma", _float),
        ("n_bands", _i32),
    ]


class Tiles(ctypes.Structure):
    """subkv_cuda_cells."""

    _fields_ = [*library.members(_ptr, "k", "v"), *library.members(_i64, "n_cells", "n_stream")]


class Queries(ctypes.Structure):
    """subkv_cuda_queries."""

    _fields_ = [
        ("cells", Tiles),
        *library.members(_i64, "n_kv", "n_tps"),
        *library.members(_ptr, "q", "mask", "positions", "tokens", "slots", "window", "fresh", "sinks"),
        *library.members(_float, "scale", "softcap"),
        *library.members(_i32, "n_group", "n_sink", "n_recent", "n_slots"),
    ]


_queries = ctypes.POINTER(Queries)

SIGNATURES: library.Signatures = {
    "subkv_cuda_layer_new": (_ptr, [_i32, _i32, _i32, _ptr, _ptr, _i32]),
    "subkv_cuda_layer_free": (None, [_ptr]),
    "subkv_cuda_table_bytes": (_i64, [_ptr]),
    "subkv_cuda_place_tables": (ctypes.c_bool, [_ptr, _ptr, _ptr]),
    "subkv_cuda_encode": (ctypes.c_bool, [_ptr, ctypes.POINTER(Tiles), _ptr, _ptr, _ptr, _i64, _ptr, _ptr]),
    "subkv_cuda_scratch": (_i64, [_ptr, _queries]),
    "subkv_cuda_attend": (ctypes.c_bool, [_ptr, _queries, _ptr, _ptr, _ptr]),
    "subkv_cuda_suits_prompt": (ctypes.c_bool, [_ptr, _queries]),
    "subkv_cuda_prompt": (ctypes.c_bool, [_ptr, _queries, _i64, _ptr, _ptr, _ptr, _ptr]),
    "subkv_cuda_prompt_lost": (ctypes.c_bool, [_ptr, _queries, _ptr, _ptr]),
}


@functools.cache
def native() -> ctypes.CDLL:
    """libsubkv with the functions of subkv_cuda.h declared, which only builds with CUDA have."""
    return library.declare(library.load(), SIGNATURES)


def lacking() -> str | None:
    """The kind of libsubkv's kernels if they are not CUDA's."""
    name = (library.load().subkv_device_kernel_name() or b"none").decode()
    return None if name == NAME else name


def _checked(result: Any) -> Any:
    """The result of a function of libsubkv. Raises CacheError if it failed (None, False or -1)."""
    if result is None or result is False or (result is not True and result < 0):
        raise CacheError("kernel", library.last_error() or "expected a launch, found an unknown error")
    return result


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


class _Layer:
    """A layer's codecs as libsubkv's tables on the device."""

    def __init__(self, k: RowCodec, v: RowCodec) -> None:
        self.device, self.n_head_kv, self.d_k, self.d_v = k.mean.device, len(k.bands), k.d, v.d
        heads, owners = zip(*(self._heads(codec) for codec in (k, v)), strict=True)
        arguments = self.n_head_kv, k.d, v.d, *heads, self.device.index or 0
        self.handle = _checked(native().subkv_cuda_layer_new(*arguments))
        del owners  # libsubkv has copied their arrays
        weakref.finalize(self, native().subkv_cuda_layer_free, self.handle)
        content = np.empty(_checked(native().subkv_cuda_table_bytes(self.handle)), np.uint8)
        self._tables = torch.empty(len(content), dtype=torch.uint8, device=self.device)
        _checked(native().subkv_cuda_place_tables(self.handle, self._tables.data_ptr(), content.ctypes.data))
        self._tables.copy_(torch.from_numpy(content))

    @staticmethod
    def _heads(codec: RowCodec) -> tuple[Any, list[Any]]:
        """A side's heads for libsubkv, and the arrays that they point to."""
        sides = [x.cpu().numpy() for x in (codec.encode_basis, codec.decode_basis)]
        offset, mean, gamma = (x.cpu().numpy() for x in (codec.offset, codec.mean, codec.gamma))
        heads, owners = (Head * len(codec.bands))(), []
        for h, bands in enumerate(codec.bands):
            rank = sum(n for n, _, _ in bands)
            arrays: list[NDArray[Any]] = [
                np.array([(n, bits) for n, bits, _ in bands], dtype=np.int32),
                np.array([ratio for _, _, ratio in bands], dtype=np.float32),
                *(np.ascontiguousarray(side[h, :rank], dtype=np.float16) for side in sides),
                np.ascontiguousarray(offset[h, :rank], dtype=np.float32),
                np.ascontiguousarray(mean[h], dtype=np.float16),
            ]
            heads[h] = Head(*(x.ctypes.data for x in arrays), float(gamma[h]), len(bands))
            owners.append(arrays)
        return heads, owners

    def tiles(self, rows_k: Tensor, rows_v: Tensor) -> Tiles:
        """rows: [batch, cells, row_bytes], a multiple of 64 cells."""
        assert rows_k.is_contiguous() and rows_v.is_contiguous() and rows_k.shape[1] % TILE == 0
        return Tiles(rows_k.data_ptr(), rows_v.data_ptr(), rows_k.shape[1], len(rows_k))


_LAYERS: weakref.WeakKeyDictionary[RowCodec, _Layer] = weakref.WeakKeyDictionary()  # by codec of keys


def _layer(k: RowCodec, v: RowCodec) -> _Layer:
    if k not in _LAYERS:
        _LAYERS[k] = _Layer(k, v)
    return _LAYERS[k]


def refusal(codecs: Pair[RowCodec]) -> str | None:
    """Why these kernels do not run a layer, such as heads that do not fit in the device's shared memory; or None."""
    try:
        _layer(*codecs)
    except CacheError as e:
        return e.reason
    return None


def row_bytes(codec: RowCodec) -> int:
    """Kernels.row_bytes."""
    return codec.row_bytes


@torch.no_grad()  # type: ignore[untyped-decorator]
def encode(codecs: Pair[RowCodec], x: Pair[Tensor], rows: Pair[Tensor], first: int) -> Tensor:
    """Kernels.encode."""
    layer, (batch, _, n, _) = _layer(*codecs), x[0].shape
    device = layer.device
    k, v = (side.transpose(1, 2).float().contiguous() for side in x)  # [batch, n, n_head_kv, d]
    of_batch = rows[0].shape[1] * torch.arange(batch, device=device)
    cells = of_batch[:, None] + torch.arange(first, first + n, device=device)
    fresh = torch.empty(batch * n, layer.n_head_kv * (layer.d_k + layer.d_v), dtype=torch.half, device=device)
    tiles = layer.tiles(*rows)
    with torch.cuda.device_of(k):
        arguments = k.data_ptr(), v.data_ptr(), cells.data_ptr(), batch * n, fresh.data_ptr(), _stream(device)
        _checked(native().subkv_cuda_encode(layer.handle, tiles, *arguments))
    return sum(((~side.isfinite().all(-1)).sum((1, 2)) for side in (k, v)), torch.zeros_like(of_batch))


@torch.no_grad()  # type: ignore[untyped-decorator]
def attend(q: Tensor, cells: Cells, mask: Tensor | None, params: Logits) -> Tensor:
    """Kernels.attend."""
    n = q.shape[2]
    out = q.new_empty(len(q), n, q.shape[1], cells.sink_v.shape[-1])
    visibility = Visibility(cells, mask, n)
    with torch.cuda.device_of(q):
        of_query = len(q) * (q.shape[1] // cells.sink_k.shape[1]) * cells.n_cells
        step = max(1, min(PIECE, MOST_TOKENS // len(q), MOST_MASK // of_query))
        for low in range(0, n, step):
            at = slice(low, min(low + step, n))
            out[:, at] = _attend(q[:, :, at], cells, _Keys(cells, visibility, at), params)
    return out


class _Keys:
    """The keys of a piece `at` of the queries: cells, window slots and own rows.

    mask: [batch, n, n_kv] half. positions: [batch, n_kv]. tokens: [batch, n, 3]. slots: [batch, n_slots, 3]. window:
    [batch, n_slots, width] half, keys of all heads first. fresh: [batch, n, width]. Positions count from the start of
    a sequence; those of padding are -1, and those of cells without an exact row in the window are NO_POSITION.
    """

    def __init__(self, cells: Cells, visibility: Visibility, at: slice) -> None:
        first, stop = visibility.first + at.start, visibility.first + at.stop
        n, batch, device = stop - first, len(cells.rows_k), cells.start.device
        self.n_kv = -(-stop // TILE) * TILE
        start, n_sink = cells.start[:, None], cells.sink_k.shape[2]
        j = torch.arange(self.n_kv, device=device)
        own = j[first:stop]
        visible = pad(visibility.allowed(at, 0, stop), (0, self.n_kv - stop)).expand(batch, -1, -1)
        self.mask = torch.zeros(visible.shape, dtype=torch.half, device=device).masked_fill_(~visible, -torch.inf)
        position = (j - start).clamp(min=-1)
        # of the cells that have no exact row, all queries read the codes
        self.positions = torch.where((j < cells.first_recent) & (position >= n_sink), NO_POSITION, position).int()

        # Older rows of the window: sinks, then those that some query reads.
        low = min(first, max(cells.first_recent, first - cells.n_recent + 1))
        held = torch.cat([start + torch.arange(n_sink, device=device), j[low:first].expand(batch, -1)], 1)
        of_held = held - start
        is_sink = torch.arange(held.shape[1], device=device) < n_sink
        valid = (held < first) & torch.where(is_sink, of_held >= 0, of_held >= n_sink)
        none = torch.full_like(held, -1)
        slots = torch.stack([torch.where(valid, of_held, none), torch.where(valid, held, none), none], 2)
        taken = slice(low - cells.first_recent, stop - cells.first_recent)
        rows = torch.cat(
            [
                _halves(torch.cat([sink, recent[:, :, taken]], 2))
                for sink, recent in ((cells.sink_k, cells.recent_k), (cells.sink_v, cells.recent_v))
            ],
            2,
        )
        window, self.fresh = rows[:, : held.shape[1]], rows[:, held.shape[1] :].contiguous()
        if not held.shape[1]:  # there is at least one slot
            slots, window = slots.new_full((batch, 1, 3), -1), rows.new_zeros(batch, 1, rows.shape[2])
        self.slots, self.window = slots.int().contiguous(), window.contiguous()
        self.n_slots = self.slots.shape[1]
        of_slot = self.n_slots * torch.arange(batch, device=device)[:, None].expand(-1, n)
        self.tokens = torch.stack([position[:, first:stop], own.expand(batch, -1), of_slot], 2).int()

    def tensors(self) -> Iterator[Tensor]:
        """In the order of Queries."""
        yield from (self.mask, self.positions, self.tokens, self.slots, self.window, self.fresh)


def _halves(x: Tensor) -> Tensor:
    """Rows [batch, heads, n, d] as [batch, n, heads * d] halves, all HALF_NAN in a head's row that is not finite."""
    finite = x.isfinite().all(-1, keepdim=True)
    halves = x.float().clamp(-HALF_MAX, HALF_MAX).half().view(torch.int16)  # devices convert NaN differently
    return halves.masked_fill(~finite, HALF_NAN).view(torch.half).transpose(1, 2).flatten(2)


def _attend(q: Tensor, cells: Cells, keys: _Keys, params: Logits) -> Tensor:
    """Attention of a piece of the queries, [batch, n, n_head, d_v]."""
    layer = _layer(cells.codec_k, cells.codec_v)
    batch, n_head, n, _ = q.shape
    x = q.transpose(1, 2).float().contiguous()
    sinks = None if params.sinks is None else params.sinks.float().contiguous()
    places = (x, *keys.tensors())
    queries = Queries(
        layer.tiles(cells.rows_k, cells.rows_v),
        keys.n_kv,
        n,
        *(place.data_ptr() for place in places),
        None if sinks is None else sinks.data_ptr(),
        params.scale,
        params.softcap or 0.0,
        n_head // layer.n_head_kv,
        cells.sink_k.shape[2],
        cells.n_recent,
        keys.n_slots,
    )
    if native().subkv_cuda_suits_prompt(layer.handle, queries):
        return _attend_prompt(layer, queries, keys, q, params)
    out = x.new_empty(batch, n, n_head, layer.d_v)
    n_bytes = _checked(native().subkv_cuda_scratch(layer.handle, queries))
    scratch = torch.empty(n_bytes, dtype=torch.uint8, device=q.device)
    arguments = scratch.data_ptr(), out.data_ptr(), _stream(q.device)
    _checked(native().subkv_cuda_attend(layer.handle, queries, *arguments))
    return out


def _attend_prompt(layer: _Layer, queries: Queries, keys: _Keys, q: Tensor, params: Logits) -> Tensor:
    """As _attend(), by torch's attention to the cells' rows in halves."""
    batch, n_head, n, _ = q.shape
    n_rows = -(-(keys.n_kv + keys.n_slots + n) // ALIGN) * ALIGN
    k, v = (
        torch.empty(batch, layer.n_head_kv, n_rows, d, dtype=torch.half, device=q.device)
        for d in (layer.d_k, layer.d_v)
    )
    mask = torch.empty(batch, 1, n, n_rows, dtype=torch.half, device=q.device)
    arguments = n_rows, k.data_ptr(), v.data_ptr(), mask.data_ptr(), _stream(q.device)
    _checked(native().subkv_cuda_prompt(layer.handle, queries, *arguments))
    # the query heads of a KV head are rows of one head, [batch, n_head_kv, n_group * n, d_k]
    grouped = q.unflatten(1, (layer.n_head_kv, -1)).flatten(2, 3).half()
    n_group = n_head // layer.n_head_kv
    of_group = scaled_dot_product_attention(grouped, k, v, mask.repeat(1, 1, n_group, 1), scale=params.scale)
    blind = (mask == -torch.inf).all(-1)[:, 0, :, None, None]  # [batch, n, 1, 1]
    out = of_group.unflatten(2, (n_group, n)).flatten(1, 2).transpose(1, 2).float().masked_fill(blind, 0.0).contiguous()
    _checked(native().subkv_cuda_prompt_lost(layer.handle, queries, out.data_ptr(), _stream(q.device)))
    return out
