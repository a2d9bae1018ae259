"""Bounds of the compiler figures of the GPU kernels (bounds.csv): the worst that a kernel may have on any target.

`python tests/kernels/gates/bounds.py vulkan` (or cuda, triton) measures a group, prints the figures of each target, and
writes the group's bounds: the worst figure and a margin.
"""

from __future__ import annotations

import csv
import math
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).resolve().parent / "bounds.csv"
NUMBERS = ["registers", "spilled", "shared", "size", "resident"]
"""
registers   per thread; vector registers with Vulkan
spilled     bytes per thread; with Vulkan registers, scalar ones included
shared      bytes per block
size        bytes of code; instructions with Vulkan; those of the longest loop with Triton
resident    concurrent blocks of a multiprocessor; waves of a SIMD with Vulkan. Only here larger is better
"""
MARGIN = {"registers": 4, "spilled": 0, "shared": 0, "size": 0, "resident": 0}
SHARE = {"registers": 0.0, "spilled": 0.05, "shared": 0.0, "size": 0.03, "resident": 0.0}
"""Margin of a bound: a number plus a share of the figure."""

TARGETS = {
    "vulkan": ["navi21", "gfx1100", "vega20"],
    "cuda": ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"],
    "triton": ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "gfx1100", "gfx942"],
}
Numbers = dict[str, int]
"""Numbers that a group lacks are missing."""
Bounds = dict[tuple[str, str], Numbers]
"""By group and kernel."""
Figures = dict[tuple[str, str], Numbers]
"""By kernel and target."""


def worse(number: str, value: int, than: int) -> bool:
    return value < than if number == "resident" else value > than


def read() -> Bounds:
    with FILE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {(line["group"], line["kernel"]): {n: int(line[n]) for n in NUMBERS if line[n]} for line in lines}


def write(bounds: Bounds) -> None:
    with FILE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["group", "kernel", *NUMBERS])
        for key, numbers in bounds.items():
            out.writerow([*key, *(numbers.get(n, "") for n in NUMBERS)])


def bounds_of(group: str, figures: Figures) -> Bounds:
    bounds: Bounds = {}
    for (kernel, _), numbers in figures.items():
        row = bounds.setdefault((group, kernel), {})
        for n, x in numbers.items():
            bound = x + MARGIN[n] + math.floor(SHARE[n] * x)
            row[n] = bound if n not in row or worse(n, bound, row[n]) else row[n]
    return bounds


def broken(bounds: Bounds, group: str, figures: Figures) -> list[str]:
    """Figures that exceed their bound or have none, and bounds without a figure."""
    measured = {kernel for kernel, _ in figures}
    errors = [f"{k}: figures expected, none found" for g, k in bounds if g == group and k not in measured]
    for (kernel, target), numbers in figures.items():
        row = bounds.get((group, kernel))
        if row is None:
            errors.append(f"{kernel}, {target}: a row in {FILE.name} expected, none found")
            continue
        for n, x in numbers.items():
            if worse(n, x, row[n]):
                least = "at least" if n == "resident" else "at most"
                errors.append(f"{kernel}, {target}, {n}: {least} {row[n]} expected, {x} found")
    return errors


def main() -> None:
    bounds = read()
    for group in sys.argv[1:]:
        sys.path[:0] = [str(FILE.parents[1]), str(FILE.parents[2])]
        import measure

        with tempfile.TemporaryDirectory() as folder:
            figures = getattr(measure, f"measure_{group}")(Path(folder), TARGETS[group])
        for (kernel, target), numbers in figures.items():
            print(f"{kernel}, {target}: {', '.join(f'{n} {x}' for n, x in numbers.items())}")
        bounds = {key: row for key, row in bounds.items() if key[0] != group} | bounds_of(group, figures)
    write(bounds)


if __name__ == "__main__":
    main()
