"""The numbers of the formats, as the kernels were compiled with them (kernels/include/subkv/format.h)."""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import dataclass

from subkv.native import library


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
    scales: tuple[float, ...]
    """[256] scale of every scale code, exactly representable in float32."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that a band may have, ascending."""
        return tuple(self.planes)


@functools.cache
def constants() -> Constants:
    """Loads libsubkv at first use. Raises ImportError as `library.load`."""
    found = json.loads(library.load().subkv_constants())
    found["planes"] = {int(bits): tuple(planes) for bits, planes in found["planes"].items()}
    found["scales"] = struct.unpack("<256f", struct.pack("<256I", *found["scales"]))
    return Constants(**found)
