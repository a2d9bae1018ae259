"""Compiler figures of the GPU kernels stay within the bounds of gates/figures.csv; no GPU is needed.

RADV takes seconds. ptxas and Triton take minutes: they run with SUBKV_GATES=1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from each import each

sys.path.insert(0, str(Path(__file__).resolve().parent / "gates"))
import measure
import table

ROWS = table.read()
gated = pytest.mark.skipif(not os.environ.get("SUBKV_GATES"), reason="compilers' figures: minutes, set SUBKV_GATES=1")


def targets(group: str) -> list[str]:
    return [target for target in table.TARGETS[group] if any(key[::2] == (group, target) for key in ROWS)]


def check(group: str, target: str, figures: measure.Figures) -> None:
    assert {kernel for kernel, _ in figures} == {kernel for g, kernel, t in ROWS if (g, t) == (group, target)}
    assert table.broken(ROWS, group, figures) == []


def test_vulkan(tmp_path: Path) -> None:
    if reason := measure.missing_vulkan():
        pytest.skip(reason)
    figures = measure.measure_vulkan(tmp_path, targets("vulkan"))
    for target in targets("vulkan"):
        check("vulkan", target, {key: numbers for key, numbers in figures.items() if key[1] == target})


@gated
@pytest.mark.slow
@pytest.mark.parametrize("target", targets("cuda"))
def test_cuda(target: str, tmp_path: Path) -> None:
    if reason := measure.missing_cuda():
        pytest.skip(reason)
    check("cuda", target, measure.measure_cuda(tmp_path, [target]))


@gated
@pytest.mark.slow
@pytest.mark.parametrize("target", targets("triton"))
def test_triton(target: str, tmp_path: Path) -> None:
    if reason := measure.missing_triton():
        pytest.skip(reason)
    check("triton", target, measure.measure_triton(tmp_path, [target]))


@pytest.mark.parametrize("number", table.NUMBERS)
def test_a_figure_beyond_its_bound_fails(number: str) -> None:
    key, row = next((key, row) for key, row in ROWS.items() if key[0] == "cuda")
    step = -1 if number == "resident" else 1
    figures = {key[1:]: {**row.value, number: row.bound[number]}}
    assert table.broken(ROWS, "cuda", figures) == []
    figures[key[1:]][number] += step
    assert len(table.broken(ROWS, "cuda", figures)) == 1


@each("key", ROWS)
def test_bounds(key: table.Key) -> None:
    """Recorded figures are within their bounds, and only unmet goals are recorded."""
    row = ROWS[key]
    assert table.broken(ROWS, key[0], {key[1:]: row.value}) == []
    for number, goal in table.goals(*key).items():
        assert row.goal.get(number) == (goal if table.worse(number, row.value[number], goal) else None)


def test_the_page_has_these_tables() -> None:
    _, begin, rest = table.PAGE.read_text("utf-8").partition(table.BEGIN)
    section, end, _ = rest.partition(table.END)
    assert begin and end, f"{table.PAGE.name}: a section of these tables expected, none found"
    assert section == table.page(ROWS)
