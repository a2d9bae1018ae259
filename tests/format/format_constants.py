"""Constants of the formats, as compiled into the kernels (kernels/include/subkv/format.h), through libsubkv."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from subkv.native import library


@dataclass(frozen=True)
class Trellis:
    """Constants of rows whose codes are paths through a trellis, FORMAT.md §3."""

    least: int
    """From this number of coefficients in bands of at most 6 bits, codes are a path; least_latent: in latent layers."""
    least_latent: int
    below: int
    """The first scale code tried is this far below the best one of a row without a path; `tried` codes follow."""
    tried: int
    bends: dict[int, tuple[int, int]]
    """Bits -> magnitudes beyond which levels have twice and three times the spacing."""
    shares: dict[int, float]
    """Bits -> spacing of levels relative to the band's ratio, exact in float32."""


@dataclass(frozen=True)
class Constants:
    """Constants shared with libsubkv; those of rows are bit-identical."""

    version: int
    """Of the format."""
    scale_one: int
    """Scale code of a scale of 1: scales are 2^((code − scale_one)/8), 0 for code 0."""
    scale_candidates_below: int
    """Scale codes tried below the smallest that does not clip."""
    half_max: int
    """Largest magnitude of coefficients in 16-bit bands."""
    max_bands: int
    max_head_size: int
    band_step: int
    """Bands have multiples of this many coefficients."""
    max_layers: int
    max_heads_kv: int
    max_sink: int
    max_recent: int
    n_sink: int
    """Default of the exact window, as n_recent and n_rollback."""
    n_recent: int
    n_rollback: int
    """Exact rows that a cache keeps beyond n_recent."""
    cache_types: dict[str, tuple[int, float]]
    """Name of an ordinary cache type -> number in ggml, and bits per element."""
    quantizers: dict[str, tuple[float, float]]
    """Bits of a band -> best step and relative distortion on a Gaussian."""
    planes: dict[int, tuple[int, ...]]
    """Bits of a band -> bits of its planes, low ones first. 16: half precision."""
    trellis: Trellis
    scales: tuple[float, ...]
    """[256] scale of every scale code, exact in float32."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Valid bits of a band, ascending."""
        return tuple(self.planes)


def _floats(bits: Iterable[int]) -> tuple[float, ...]:
    """float32 values from their bits."""
    every = list(bits)
    return struct.unpack(f"<{len(every)}f", struct.pack(f"<{len(every)}I", *every))


@functools.cache
def constants() -> Constants:
    """Loads libsubkv at first use. Raises ImportError as `library.load`."""
    values = library.constants()
    values["planes"] = {int(bits): tuple(planes) for bits, planes in values["planes"].items()}
    values["scales"] = _floats(values["scales"])
    trellis = values["trellis"]
    trellis["bends"] = {int(bits): tuple(bends) for bits, bends in trellis["bends"].items()}
    trellis["shares"] = dict(zip(trellis["bends"], _floats(trellis["shares"].values()), strict=True))
    return Constants(**{**values, "trellis": Trellis(**trellis)})
