"""Compiler figures of the GPU kernels stay within the bounds of gates/bounds.csv; no GPU is needed.

RADV takes seconds. ptxas and Triton take minutes: they run with SUBKV_GATES=1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "gates"))
import bounds
import measure

BOUNDS = bounds.read()
gated = pytest.mark.skipif(not os.environ.get("SUBKV_GATES"), reason="compilers' figures: minutes, set SUBKV_GATES=1")


def test_vulkan(tmp_path: Path) -> None:
    if reason := measure.missing_vulkan():
        pytest.skip(reason)
    assert bounds.broken(BOUNDS, "vulkan", measure.measure_vulkan(tmp_path, bounds.TARGETS["vulkan"])) == []


@gated
@pytest.mark.slow
@pytest.mark.parametrize("target", bounds.TARGETS["cuda"])
def test_cuda(target: str, tmp_path: Path) -> None:
    if reason := measure.missing_cuda():
        pytest.skip(reason)
    assert bounds.broken(BOUNDS, "cuda", measure.measure_cuda(tmp_path, [target])) == []


@gated
@pytest.mark.slow
@pytest.mark.parametrize("target", bounds.TARGETS["triton"])
def test_triton(target: str, tmp_path: Path) -> None:
    if reason := measure.missing_triton():
        pytest.skip(reason)
    assert bounds.broken(BOUNDS, "triton", measure.measure_triton(tmp_path, [target])) == []


@pytest.mark.parametrize("number", bounds.NUMBERS)
def test_a_figure_beyond_its_bound_fails(number: str) -> None:
    only = {("cuda", "project"): BOUNDS["cuda", "project"]}
    figures = {("project", "sm_80"): dict(only["cuda", "project"])}
    assert bounds.broken(only, "cuda", figures) == []
    figures["project", "sm_80"][number] += -1 if number == "resident" else 1
    assert len(bounds.broken(only, "cuda", figures)) == 1
    assert len(bounds.broken({}, "cuda", figures)) == len(bounds.broken(only, "cuda", {})) == 1


def test_every_kernel_has_bounds() -> None:
    """Shaders, CUDA's entries, and Triton's kernels."""
    kernels = {group: {kernel for g, kernel in BOUNDS if g == group} for group in bounds.TARGETS}
    assert kernels["cuda"] == {name for names in measure.ENTRIES.values() for name in names}
    assert {kernel.split()[0] for kernel in kernels["vulkan"]} == {shader.stem for shader in measure.v.SHADERS}
    assert {kernel.split()[0] for kernel in kernels["triton"]} == {"attend", "combine", "encode"}
