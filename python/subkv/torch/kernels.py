"""Which kernels a layer of `subkv.SubspaceCache` uses, chosen here alone: Triton's on CUDA devices, else torch's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subkv.base.errors import CacheError
from subkv.torch.attend import Cells, Logits, attend
from subkv.torch.rows import RowCodec

TORCH, TRITON = "torch", "triton"
CAPABILITY = (7, 5)  # least compute capability of a device, as of kernels/cuda


@dataclass(frozen=True)
class Kernels:
    """What is done with a layer's rows.

    encode: a codec, vectors [batch, n_head_kv, n, d], rows [batch, n_cells, row_bytes] uint8 to write to, the first
    cell; returns how many rows of a head became zero rows for not being finite, [batch]. attend: that of attend.py.
    """

    name: str
    encode: Callable[[RowCodec, Tensor, Tensor, int], Tensor]
    attend: Callable[[Tensor, Cells, Tensor | None, Logits], Tensor]


def encode(codec: RowCodec, x: Tensor, rows: Tensor, first: int) -> Tensor:
    """Kernels.encode in torch."""
    coefficients = codec.coefficients(x)
    rows[:, first : first + x.shape[2]] = codec.encode(coefficients)
    return (~coefficients.isfinite().all(-1)).sum((1, 2))


IN_TORCH = Kernels(TORCH, encode, attend)


def check(name: str | None) -> None:
    """Raises CacheError for a name that no kernels have; None: chosen by the device."""
    if name not in (None, TORCH, TRITON):
        raise CacheError("kernel", f"expected {TORCH!r}, {TRITON!r} or None, found {name!r}")


def choose(device: torch.device, name: str | None = None) -> Kernels:
    """Those of this name; None: Triton's on a CUDA device where they run, else torch's.

    Raises CacheError where Triton's are asked for and cannot run.
    """
    check(name)
    if name == TORCH or (name is None and device.type != "cuda"):
        return IN_TORCH
    lacking = _lacking(device)
    if lacking is None:
        from subkv.torch import triton_kernels  # imports triton, which not every platform has

        return Kernels(TRITON, triton_kernels.encode, triton_kernels.attend)
    if name is None:
        return IN_TORCH
    raise CacheError("kernel", f"expected {lacking[0]} for {TRITON!r}, found {lacking[1]}")


def _lacking(device: torch.device) -> tuple[str, str] | None:
    """What Triton's kernels need here, and what there is instead."""
    if importlib.util.find_spec("triton") is None:
        return "package triton", "none"
    if device.type != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else ("a CUDA device or TRITON_INTERPRET=1", f"device {device.type}")
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return "a device of compute capability 7.5", f"one of {found[0]}.{found[1]}"
    return None
