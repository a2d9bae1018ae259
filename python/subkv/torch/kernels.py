"""Chooses the kernels of a layer of `subkv.SubspaceCache`: libsubkv's or Triton's on CUDA devices, else torch's.

No GPU has run libsubkv's from torch, and Triton's run on many kinds of GPUs. So kernels that were not requested are
tried on each device first, and used only if they agree with torch's.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subkv.base.errors import CacheError
from subkv.torch.attend import Cells, Logits, attend
from subkv.torch.rows import Pair, RowCodec

LOG = logging.getLogger(__name__)
TORCH, TRITON, CUDA = NAMES = "torch", "triton", "cuda"
CAPABILITY = (7, 5)  # minimum compute capability, as in kernels/cuda

# A trial: cells of each of two sequences, the last ones that are exact, the queries of each call, and the largest
# distance of outputs relative to their norm. Rounding may change a few codes, mostly to others of equal cost.
N_TRIED, N_EXACT, TRIED_QUERIES, TRIAL_ERROR = 140, 50, (1, 5, 40), 0.1


@dataclass(frozen=True)
class Kernels:
    """Operations on a layer's rows.

    row_bytes(codec): bytes of a cell's row. encode and attend define the order of bytes within 64 cells. encode(codecs,
    vectors [batch, n_head_kv, n, d], output rows [batch, n_cells, row_bytes] uint8, each of keys and of values, first
    cell): returns the number of heads' rows that were not finite and became zero rows, [batch]. attend: as in
    attend.py. refusal(codecs): why a layer cannot use them, or None.
    """

    name: str
    row_bytes: Callable[[RowCodec], int]
    encode: Callable[[Pair[RowCodec], Pair[Tensor], Pair[Tensor], int], Tensor]
    attend: Callable[[Tensor, Cells, Tensor | None, Logits], Tensor]
    refusal: Callable[[Pair[RowCodec]], str | None] = lambda codecs: None


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


def choose(device: torch.device, codecs: Pair[RowCodec], name: str | None = None) -> Kernels:
    """The kernels of this name; None: of libsubkv's, Triton's and torch's, the first that agree with torch's there.

    codecs: of keys and values of a layer on the device. Raises CacheError if requested kernels cannot run.
    """
    check(name)
    if name is None:
        return _agreeing(device, codecs) if device.type == "cuda" else IN_TORCH
    if lacking := _lacking(name, device):
        raise CacheError("kernel", f"expected {lacking[0]} for {name!r}, found {lacking[1]}")
    return _made(name)


_TRIED: dict[tuple[str, torch.device], str | None] = {}  # results of trials


def _agreeing(device: torch.device, codecs: Pair[RowCodec]) -> Kernels:
    for name in (CUDA, TRITON):
        if _lacking(name, device) is not None:
            continue
        kernels = _made(name)
        if (name, device) not in _TRIED:
            reason = _TRIED[name, device] = trial(kernels, codecs, device)
            if reason is not None:
                LOG.warning("kernel: %s is not used on device %s: %s", name, device, reason)
        if _TRIED[name, device] is None:
            refusal = kernels.refusal(codecs)
            if refusal is None:
                return kernels
            LOG.warning("kernel: %s is not used for a layer on device %s: %s", name, device, refusal)
    return IN_TORCH


def trial(kernels: Kernels, codecs: Pair[RowCodec], device: torch.device) -> str | None:
    """Why kernels must not be used unasked: they fail, or differ from torch's on random rows. None: they agree."""
    rng = torch.Generator().manual_seed(0)
    n_head = len(codecs[0].bands)

    def random(n_heads: int, d: int) -> Tensor:  # whatever the default device is
        return torch.randn(2, n_heads, N_TRIED, d, generator=rng, device="cpu").to(device)

    k, v = (random(n_head, codec.d) for codec in codecs)
    q = random(2 * n_head, codecs[0].d)

    def outputs(of: Kernels) -> list[Tensor]:
        room = -(-N_TRIED // 64) * 64  # whole tiles
        rows_k, rows_v = (
            torch.zeros(2, room, of.row_bytes(codec), dtype=torch.uint8, device=device) for codec in codecs
        )
        of.encode(codecs, (k, v), (rows_k, rows_v), 0)
        window = k[:, :, :0], v[:, :, :0], k[:, :, -N_EXACT:], v[:, :, -N_EXACT:]
        start = torch.zeros(2, dtype=torch.int64, device=device)
        cells = Cells(*codecs, rows_k, rows_v, *window, start, n_cells=N_TRIED, n_recent=8)
        return [of.attend(q[:, :, -n:], cells, None, Logits(codecs[0].d ** -0.5)) for n in TRIED_QUERIES]

    try:
        for actual, expected in zip(outputs(kernels), outputs(IN_TORCH), strict=True):
            error = float((actual - expected).norm() / expected.norm())
            if not error <= TRIAL_ERROR:
                return f"expected outputs within {TRIAL_ERROR} of torch's, found a distance of {error:.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # of a compiler, a driver, or the kernels
        return f"{type(e).__name__}: {e}"
    return None


def _made(name: str) -> Kernels:
    if name == CUDA:
        from subkv.torch import cuda_kernels  # loads libsubkv

        functions = cuda_kernels.row_bytes, cuda_kernels.encode, cuda_kernels.attend, cuda_kernels.refusal
        return Kernels(CUDA, *functions)
    if name == TRITON:
        from subkv.torch import triton_kernels  # imports triton, which some platforms lack

        return Kernels(TRITON, triton_kernels.row_bytes, side_by_side(triton_kernels.encode), triton_kernels.attend)
    return IN_TORCH


def _lacking(name: str, device: torch.device) -> tuple[str, str] | None:
    """The missing requirement of kernels, and the present state; None if they run."""
    if name == TORCH:
        return None
    if name == TRITON and importlib.util.find_spec("triton") is None:
        return "package triton", "none"
    if device.type != "cuda":
        if name == TRITON and os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return f"a CUDA device{' or TRITON_INTERPRET=1' if name == TRITON else ''}", f"device {device.type}"
    if name == CUDA:
        from subkv.torch import cuda_kernels

        try:
            found = cuda_kernels.lacking()
        except ImportError as e:  # no libsubkv, or not with this libllama
            found = str(e)
        return ("a build with -DGGML_CUDA=ON", f"kernels: {found}") if found else None
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return "a device of compute capability 7.5", f"one of {capability[0]}.{capability[1]}"
    return None
