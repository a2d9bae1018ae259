"""Chooses the kernels of a layer of `subkv.SubspaceCache`: Triton's on CUDA devices, else torch's.

libsubkv's kernels for CUDA are used only on request, because no GPU has run them from torch yet.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subkv.base.errors import CacheError
from subkv.torch.attend import Cells, Logits, attend
from subkv.torch.rows import Pair, RowCodec

TORCH, TRITON, CUDA = NAMES = "torch", "triton", "cuda"
CAPABILITY = (7, 5)  # minimum compute capability, as in kernels/cuda


@dataclass(frozen=True)
class Kernels:
    """Operations on a layer's rows.

    row_bytes(codec): bytes of a cell's row. encode and attend define the order of bytes within 64 cells. encode(codecs,
    vectors [batch, n_head_kv, n, d], output rows [batch, n_cells, row_bytes] uint8, each of keys and of values, first
    cell): returns the number of heads' rows that were not finite and became zero rows, [batch]. attend: as in
    attend.py.
    """

    name: str
    row_bytes: Callable[[RowCodec], int]
    encode: Callable[[Pair[RowCodec], Pair[Tensor], Pair[Tensor], int], Tensor]
    attend: Callable[[Tensor, Cells, Tensor | None, Logits], Tensor]


def side_by_side(encode: Callable[[RowCodec, Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Kernels.encode by a function that encodes keys or values."""

    def encode_both(codecs: Pair[RowCodec], x: Pair[Tensor], rows: Pair[Tensor], first: int) -> Tensor:
        return encode(codecs[0], x[0], rows[0], first) + encode(codecs[1], x[1], rows[1], first)

    return encode_both


def encode(codec: RowCodec, x: Tensor, rows: Tensor, first: int) -> Tensor:
    """Kernels.encode of keys or values in torch."""
    coefficients = codec.coefficients(x)
    rows[:, first : first + x.shape[2]] = codec.encode(coefficients)
    return (~coefficients.isfinite().all(-1)).sum((1, 2))


IN_TORCH = Kernels(TORCH, lambda codec: codec.row_bytes, side_by_side(encode), attend)


def check(name: str | None) -> None:
    """Raises CacheError for an unknown name; None: chosen by device."""
    if name not in (None, *NAMES):
        raise CacheError("kernel", f"expected {TORCH!r}, {TRITON!r}, {CUDA!r} or None, found {name!r}")


def choose(device: torch.device, name: str | None = None) -> Kernels:
    """The kernels of this name; None: Triton's on a CUDA device if they run there, else torch's.

    Raises CacheError if Triton's or libsubkv's are requested and cannot run.
    """
    check(name)
    if name == TORCH or (name is None and device.type != "cuda"):
        return IN_TORCH
    if name == CUDA:
        return _in_libsubkv(device)
    lacking = _lacking(device)
    if lacking is None:
        from subkv.torch import triton_kernels  # imports triton, which some platforms lack

        return Kernels(TRITON, triton_kernels.row_bytes, side_by_side(triton_kernels.encode), triton_kernels.attend)
    if name is None:
        return IN_TORCH
    raise CacheError("kernel", f"expected {lacking[0]} for {TRITON!r}, found {lacking[1]}")


def _in_libsubkv(device: torch.device) -> Kernels:
    from subkv.torch import cuda_kernels  # loads libsubkv

    if device.type != "cuda":
        raise CacheError("kernel", f"expected a CUDA device for {CUDA!r}, found device {device.type}")
    if found := cuda_kernels.lacking():
        raise CacheError("kernel", f"expected a build with -DGGML_CUDA=ON for {CUDA!r}, found kernels: {found}")
    return Kernels(CUDA, cuda_kernels.row_bytes, cuda_kernels.encode, cuda_kernels.attend)


def _lacking(device: torch.device) -> tuple[str, str] | None:
    """The missing requirement of Triton's kernels, and the present state; None if they run."""
    if importlib.util.find_spec("triton") is None:
        return "package triton", "none"
    if device.type != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else ("a CUDA device or TRITON_INTERPRET=1", f"device {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return "a device of compute capability 7.5", f"one of {capability[0]}.{capability[1]}"
    return None
