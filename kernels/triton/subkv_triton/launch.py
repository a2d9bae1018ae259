"""Shapes of attend's programs by GPU. No register spills at d 64 and 128 (research/notes/gpu.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class Shape:
    rows: int
    """Query rows of a program."""
    cells: int
    """Cells decoded at a time."""
    warps: int


@dataclass(frozen=True)
class Shapes:
    decode: Shape = Shape(16, 16, 8)
    """For at most 16 query rows per KV head."""
    prompt: Shape = Shape(64, 32, 8)
    """For more query rows."""


DEFAULT = Shapes()
FEW_CELLS = Shapes(prompt=Shape(64, 16, 8))
SM_80 = Shapes(decode=Shape(16, 32, 8), prompt=Shape(32, 32, 8))
SM_86 = Shapes(decode=Shape(16, 32, 8))  # With half as many cells, there would be five times as many barriers per cell.
# Before sm_80, Triton multiplies halves as floats, and every lane holds rows of both operands.
NO_TENSOR_CORES = Shapes(prompt=Shape(32, 16, 8))
NO_TENSOR_CORES_NARROW = Shapes(prompt=Shape(32, 32, 8))
EVERY = [DEFAULT, FEW_CELLS, SM_80, SM_86, NO_TENSOR_CORES, NO_TENSOR_CORES_NARROW]


def shapes_of(backend: str, arch: int | str, width: int, halves: bool) -> Shapes:
    """Shapes for a target. backend, arch: of Triton's GPUTarget, ("cuda", 86) or ("hip", "gfx1100").

    width: R. halves: some band has 16 bits.
    """
    if backend == "hip":
        shapes = DEFAULT if str(arch).startswith("gfx9") else FEW_CELLS
    elif int(arch) < 80:
        shapes = NO_TENSOR_CORES if width > 64 else NO_TENSOR_CORES_NARROW
    elif int(arch) == 80:
        shapes = SM_80
    elif int(arch) < 120:
        shapes = SM_86 if 64 < width <= 128 and not halves else DEFAULT
    else:
        shapes = FEW_CELLS
    return replace(shapes, prompt=NO_TENSOR_CORES.prompt) if width > 128 or halves else shapes


def shapes_on(device: torch.device, width: int, halves: bool) -> Shapes:
    if device.type == "cpu":  # Triton's interpreter
        return DEFAULT
    target = triton.runtime.driver.active.get_current_target()
    return shapes_of(target.backend, target.arch, width, halves)
