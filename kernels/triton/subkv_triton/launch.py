"""Shapes of attend's programs by GPU. In decode no NVIDIA GPU spills registers at d 64 and 128 (notes/gpu.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Shape:
    rows: int
    """Query rows of a program, in decode the most of them."""
    cells: int
    """Cells decoded at a time."""
    warps: int
    settled: bool = False
    """Whether levels are computed in a layout of their own (attend._settle)."""


@dataclass(frozen=True)
class Shapes:
    decode: Shape = Shape(16, 64, 4)
    """For at most 16 query rows per KV head."""
    prompt: Shape = Shape(64, 32, 8)
    """For more query rows."""
    least_rows: int = 8
    """Least query rows of a program in decode: tensor cores multiply as many at a time."""


DEFAULT = Shapes()
SM_80 = Shapes(prompt=Shape(32, 32, 8))
SM_86 = Shapes(prompt=Shape(64, 32, 8, True))
SM_120_NARROW = Shapes(prompt=Shape(64, 16, 8))
# Triton multiplies halves as floats before sm_80: every lane holds rows of both operands
NO_TENSOR_CORES = Shapes(Shape(16, 16, 4), Shape(32, 16, 8, True), 1)
NO_TENSOR_CORES_NARROW = replace(NO_TENSOR_CORES, prompt=Shape(32, 32, 8, True))
CDNA = Shapes(prompt=Shape(32, 32, 4), least_rows=16)
RDNA = Shapes(Shape(16, 64, 4, True), Shape(64, 16, 8, True), 16)
EVERY = [DEFAULT, SM_80, SM_86, SM_120_NARROW, NO_TENSOR_CORES, NO_TENSOR_CORES_NARROW, CDNA, RDNA]


def shapes_of(backend: str, arch: int | str, width: int, halves: bool) -> Shapes:
    """Shapes for a target. backend, arch: of Triton's GPUTarget, ("cuda", 86) or ("hip", "gfx1100").

    width: R. halves: some band has 16 bits.
    """
    if backend == "hip":
        shapes = CDNA if str(arch).startswith("gfx9") else RDNA
    elif int(arch) < 80:
        shapes = NO_TENSOR_CORES if width > 64 else NO_TENSOR_CORES_NARROW
    elif int(arch) >= 120 and width <= 64:
        shapes = SM_120_NARROW
    else:
        shapes = {80: SM_80, 90: DEFAULT}.get(int(arch), SM_86)
    if width > 128 or halves:
        decode = replace(shapes.decode, cells=min(32, shapes.decode.cells))
        return replace(shapes, decode=decode, prompt=NO_TENSOR_CORES.prompt)
    if width <= 64 and shapes in (DEFAULT, SM_80, SM_86, CDNA):
        return replace(shapes, decode=replace(shapes.decode, cells=128))
    return shapes


def shapes_on(device: torch.device, width: int, halves: bool) -> Shapes:
    if device.type == "cpu":  # Triton's interpreter
        return DEFAULT
    target = triton.runtime.driver.active.get_current_target()
    return shapes_of(target.backend, target.arch, width, halves)
