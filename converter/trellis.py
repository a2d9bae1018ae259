"""What rows coded by a trellis would give: `python -m converter.evaluate` with kernels/ref/trellis.cpp in its rows.

    python -m converter.trellis -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 2.5,3,3.5,4.25,5

A laboratory: no file or cache holds such rows yet. The rows have the same bytes; planner, predictions and decoders know
the trellis' distortions. NOTES.md has the results.
"""

from __future__ import annotations

import ctypes

import numpy as np

from subkv.format import codec
from subkv.format.arrays import F32
from subkv.format.bases import Bands
from subkv.native import library
from subkv.plan import basis, budget, gamma, quantizer

SIGNATURES: library.Signatures = {  # of runtime/native/subkv_research.h
    "subkv_trellis_round_trip": (
        ctypes.c_bool,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p],
    ),
}

# of a unit Gaussian at the best step: squared error, and that step as a share of the uniform quantizer's
DISTORTION = {2: 0.0884, 3: 0.02445, 4: 0.00672, 5: 0.00182, 6: 0.00050}
UNIFORM = {2: 2.430, 3: 2.482, 4: 2.792, 5: 2.829, 6: 3.036}
LEAST = 24  # coefficients of a row's path

_uniform_round_trip = codec.round_trip
_uniform_distortion = quantizer.distortion


def round_trip(c: F32, bands: Bands, ratio: codec.Ratio) -> F32:
    """Coefficients [n, rank] as attention would see them. ratio: of uniform quantizers, as the planner finds it.

    Raises ValueError as codec.encode().
    """
    if sum(n for n, bits in bands if bits in DISTORTION) < LEAST:
        return _uniform_round_trip(c, bands, ratio)
    steps = [rho / UNIFORM.get(bits, 1.0) for (_, bits), rho in zip(bands, ratio, strict=True)]
    b, rho = np.array(bands, np.int32), np.array(steps, np.float32)
    c, out = np.ascontiguousarray(c, np.float32), np.empty_like(c)
    function = library.declare(library.load(), SIGNATURES).subkv_trellis_round_trip
    if not function(b.ctypes.data, rho.ctypes.data, len(bands), c.ctypes.data, len(c), out.ctypes.data):
        raise ValueError(library.last_error())
    return out


def distortion(bits: int) -> float:
    """As quantizer.distortion(), of bands on the path."""
    return DISTORTION.get(bits) or _uniform_distortion(bits)


def main() -> None:
    for module in (codec, gamma):
        module.round_trip = round_trip  # type: ignore[attr-defined]
    for planner in (quantizer, budget, basis):
        planner.distortion = distortion  # type: ignore[attr-defined]
    from converter import evaluate  # behind the changes above

    evaluate.main(prog_name="python -m converter.trellis")


if __name__ == "__main__":
    main()
