"""Statistics of a context's KV cache."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any

from subkv.base.errors import NoCodedCacheError
from subkv.engine.cache import MIB, CacheChoice
from subkv.native import library
from subkv.native.binding import C, LogLines, model_meta, native
from subkv.native.library import cache_types


def in_q8_0(n: float) -> float:
    """n, a size in f16 or a ratio to one, for the same elements in q8_0."""
    return n * cache_types()["q8_0"][1] / 16


@dataclasses.dataclass(frozen=True)
class KVStats:
    """A context's KV cache. Sizes are allocated bytes; bpe: bits per K/V element of the coded layers if there are any,
    including the exact window.
    """

    type_k: str
    type_v: str
    n_cells: int
    bytes_kv: int  # everything: rows, exact window, ordinary layers, …
    bytes_f16: int  # the same context with an f16 cache in all layers
    bytes_per_token: int  # rows of one cell in all layers, except sliding-window layers, which do not grow
    bpe: float
    kernel: str  # with the devices of GPU kernels
    bytes_codes: int = 0
    bytes_window: int = 0
    bytes_stock: int = 0
    bytes_bases: int = 0
    bytes_chunks: int = 0  # adaptive bases and their sketches
    n_chunks: int = 0  # adaptive bases of all heads
    n_layer_coded: int = 0
    n_layer_sliding: int = 0  # ordinary layers with a sliding window
    n_layer_other: int = 0  # other ordinary layers
    n_swa: int = 0  # tokens of the window of sliding layers, or 0 if they hold all cells
    n_zero_rows: int = 0  # rows of a head, K or V, that are not finite: attention to them is NaN
    n_sink: int = 0
    n_recent: int = 0
    n_rollback: int = 0
    fingerprint: str | None = None

    @property
    def bytes_all(self) -> int:
        """With the bases: the size that programs print."""
        return self.bytes_kv + self.bytes_bases


def sizes(stats: KVStats) -> str:
    """The size of a cache, and how many times smaller it is than the same cache in f16 and q8_0."""
    mib = f"{stats.bytes_all / MIB:.1f} MiB"
    if stats.type_k == stats.type_v == "f16" or not stats.bytes_kv:
        return mib
    f16 = stats.bytes_f16 / stats.bytes_all
    q8_0 = in_q8_0(f16)
    if f16 < 1.05:
        return f"{mib} (f16: {stats.bytes_f16 / MIB:.1f} MiB)"
    return f"{mib}: {f16:.1f}× smaller than f16" + (f", {q8_0:.1f}× than q8_0" if q8_0 >= 1.05 else "")


def layers(stats: KVStats) -> str:
    """Which layers grow with the context, or are coded; "" if all are."""
    n_ordinary = stats.n_layer_sliding + stats.n_layer_other
    n_layer = stats.n_layer_coded + n_ordinary
    if stats.n_layer_sliding and stats.n_swa:
        n_growing = n_layer - stats.n_layer_sliding
        slide = f"{stats.n_layer_sliding} slide over {stats.n_swa} tokens"
        return f"{n_growing} of {n_layer} layers grow with the context, {slide}"
    return f"{stats.n_layer_coded} of {n_layer} layers are coded" if stats.n_layer_coded and n_ordinary else ""


def cache_line(stats: KVStats) -> str:
    """The line that every program prints about its cache."""
    kind = stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}"
    bases = f", {stats.bytes_bases / MIB:.1f} MiB of it bases" if stats.bytes_bases else ""
    words = layers(stats)
    bits = f"{stats.bpe:.2f} bits per element" + (" of coded layers" if words and stats.n_layer_coded else "")
    parts = (f"KV cache: {kind}", bits, f"{sizes(stats)}{bases}", words, f"kernel {stats.kernel}")
    return ", ".join(filter(None, parts))


def smaller_type(stats: KVStats) -> str:
    """The ordinary cache type that takes less than a coded cache of so few cells, "" if there is none."""
    n_bytes = stats.bytes_all
    if not stats.n_layer_coded or n_bytes < in_q8_0(stats.bytes_f16):
        return ""
    return "f16" if n_bytes >= stats.bytes_f16 else "q8_0"


def why_not_smaller(stats: KVStats) -> str:
    """Why an ordinary cache takes less than this coded one (smaller_type)."""
    own = stats.bytes_kv - stats.bytes_stock
    in_f16 = 16 * own / stats.bpe  # of the coded layers
    if stats.bytes_stock and own + stats.bytes_bases < in_q8_0(in_f16):
        n_ordinary = stats.n_layer_sliding + stats.n_layer_other
        return f"{n_ordinary} of {n_ordinary + stats.n_layer_coded} layers are not coded"
    n_exact = stats.n_sink + stats.n_recent + stats.n_rollback
    return f"{stats.n_cells} tokens are few beside the exact window of {n_exact}"


def count_zero_rows(ctx: Any) -> int:
    """KVStats.n_zero_rows of a context of any cache type."""
    raw = library.Stats()
    return int(raw.n_zero_rows) if native().subkv_get_stats(ctx, ctypes.byref(raw)) else 0


def zero_rows_line(n_zero_rows: int) -> str:
    """What programs print if a cache has such rows."""
    return f"KV cache: {n_zero_rows} rows are not finite (NaN or infinity): attention to them is NaN"


def context_stats(model: Any, ctx: Any, choice: CacheChoice, log: LogLines) -> KVStats:
    """Sizes of a context's cache. model: llama.cpp's handle; log: llama.cpp's log of creating the context."""
    if not choice.coded:
        return _stock_stats(model, ctx, choice, log)
    raw = library.Stats()
    if not native().subkv_get_stats(ctx, ctypes.byref(raw)):
        raise NoCodedCacheError(
            "kv_cache",
            "expected a model with a K/V cache, found one without (recurrent or encoder-only)",
            "choose f16",
        )
    fingerprint = native().subkv_context_fingerprint(ctx)
    cpu_kernel = native().subkv_kernel_name()
    kernels = [cpu_kernel.decode() if cpu_kernel else "none"] if raw.n_layer_device < raw.n_layer_coded else []
    if raw.n_layer_device:
        kernels.append(
            f"{native().subkv_device_kernel_name().decode()} on {native().subkv_context_devices(ctx).decode()}"
        )
    copied = {field.name for field in dataclasses.fields(KVStats)} & {name for name, *_ in library.Stats._fields_}
    return KVStats(
        type_k=choice.name_k,
        type_v=choice.name_v,
        kernel=" and ".join(kernels),
        fingerprint=fingerprint.decode() if fingerprint else None,
        **{name: getattr(raw, name) for name in copied},
    )


_SIZE_LINE = re.compile(
    r"size = +[\d.]+ MiB \( *(\d+) cells, *(\d+) layers, *\d+/ *(\d+) seqs\), "
    r"K \(\w+\): +([\d.]+) MiB, V \(\w+\): +([\d.]+)"
)
_SLIDING_LINE = re.compile(r"creating +SWA KV cache")


def _stock_stats(model: Any, ctx: Any, choice: CacheChoice, log: LogLines) -> KVStats:
    """Sizes from llama.cpp's log, which has MiB with two decimals; exact if all layers have one shape."""
    widths = _row_widths(model)
    bits = [cache_types()[name][1] for name in (choice.name_k, choice.name_v)]
    total, rows, grows = [0, 0], 0.0, True
    for _, line in log:
        match = _SIZE_LINE.search(line)
        if match is None or not line.startswith("llama_kv_cache"):
            grows = grows and not _SLIDING_LINE.search(line)  # llama.cpp creates the sliding-window cache last
            continue
        cells, layers, streams = (int(match[i]) for i in (1, 2, 3))
        for side, mib in enumerate(map(float, match.group(4, 5))):
            exact = cells * streams * layers * widths[side] * bits[side] / 8
            size = exact if abs(exact / MIB - mib) < 0.006 else mib * MIB
            total[side] += round(size)
            rows += size / (cells * streams) if grows else 0.0
    n_bytes = sum(total)
    in_f16 = total[0] * 16 / bits[0] + total[1] * 16 / bits[1]
    return KVStats(
        type_k=choice.name_k,
        type_v=choice.name_v,
        n_cells=C.llama_n_ctx(ctx),
        bytes_kv=n_bytes,
        bytes_f16=round(in_f16),
        bytes_per_token=round(rows),
        bpe=16.0 * n_bytes / in_f16 if in_f16 else 0.0,
        kernel="ggml",
        bytes_stock=n_bytes,
    )


def _row_widths(model: Any) -> list[int]:
    """Elements of one cell's K and V in the first layer."""
    arch = model_meta(model, "general.architecture")
    heads, heads_kv = C.llama_model_n_head(model), C.llama_model_n_head_kv(model)
    default = C.llama_model_n_embd(model) // max(heads, 1)
    sizes = (model_meta(model, f"{arch}.attention.{key}") for key in ("key_length", "value_length"))
    return [heads_kv * (int(size) if size.isdigit() else default) for size in sizes]
