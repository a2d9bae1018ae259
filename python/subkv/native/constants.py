"""The numbers of the formats, as the kernels were compiled with them (kernels/include/subkv/format.h)."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from subkv.native import library


@dataclass(frozen=True)
class Trellis:
    """Of rows whose codes are paths through a trellis, FORMAT.md §3."""

    least: int
    """Coefficients of bands of at most 6 bits from which a row's codes are a path; least_latent: of latent layers."""
    least_latent: int
    below: int
    """Scale codes tried: from this many less than the best one of rows without a path on, `tried` of them."""
    tried: int
    bends: dict[int, tuple[int, int]]
    """Bits -> magnitudes of levels beyond which they are twice and three times as far apart."""
    shares: dict[int, float]
    """Bits -> distance of levels relative to the band's ratio, exactly representable in float32."""


@dataclass(frozen=True)
class Constants:
    """Whatever has to agree with libsubkv; row constants bit for bit."""

    version: int
    """Of the format."""
    scale_one: int
    """Scale code of a scale of 1: scales are 2^((code − scale_one)/8), 0 for code 0."""
    scale_candidates_below: int
    """Scale codes tried below the smallest that clips nothing."""
    half_max: int
    """Where coefficients of 16-bit bands saturate."""
    max_bands: int
    max_head_size: int
    band_step: int
    """Bands have multiples of this many coefficients."""
    max_layers: int
    max_heads_kv: int
    max_sink: int
    max_recent: int
    n_rollback: int
    """Exact rows that a cache keeps beyond n_recent unless it is told."""
    planes: dict[int, tuple[int, ...]]
    """Bits of a band -> bits of its planes, low ones first. 16: halves."""
    trellis: Trellis
    scales: tuple[float, ...]
    """[256] scale of every scale code, exactly representable in float32."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that a band may have, ascending."""
        return tuple(self.planes)


def _floats(bits: Iterable[int]) -> tuple[float, ...]:
    """Of the bits of float32."""
    every = list(bits)
    return struct.unpack(f"<{len(every)}f", struct.pack(f"<{len(every)}I", *every))


@functools.cache
def constants() -> Constants:
    """Loads libsubkv at first use. Raises ImportError as `library.load`."""
    found = json.loads(library.load().subkv_constants())
    found["planes"] = {int(bits): tuple(planes) for bits, planes in found["planes"].items()}
    found["scales"] = _floats(found["scales"])
    trellis = found["trellis"]
    trellis["bends"] = {int(bits): tuple(bends) for bits, bends in trellis["bends"].items()}
    trellis["shares"] = dict(zip(trellis["bends"], _floats(trellis["shares"].values()), strict=True))
    return Constants(**{**found, "trellis": Trellis(**trellis)})
