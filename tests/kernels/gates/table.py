"""Recorded figures of the GPU kernels with bounds (figures.csv), and their tables in research/notes/gpu.md.

`python tests/kernels/gates/table.py` prints the tables. With arguments vulkan, cuda or triton it first measures these
figures again and writes the file and the page.
"""

from __future__ import annotations

import csv
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE, PAGE = HERE / "figures.csv", HERE.parents[2] / "research/notes/gpu.md"
BEGIN, END = "### Figures of each kernel\n", "\n## Simulated\n"
NUMBERS = ["registers", "spilled", "shared", "size", "resident"]
"""
registers   per thread; vector registers with Vulkan
spilled     bytes per thread; with Vulkan registers, scalar ones included
shared      bytes per block
size        bytes of code; instructions with Vulkan
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
Key = tuple[str, str, str]
"""(group, kernel, target)"""


@dataclass
class Row:
    """Figures of a kernel and target; numbers that a group lacks are missing."""

    value: dict[str, int] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    goal: dict[str, int] = field(default_factory=dict)
    """Stated goals that are not reached."""


def worse(number: str, value: int, than: int) -> bool:
    return value < than if number == "resident" else value > than


def read() -> dict[Key, Row]:
    rows: dict[Key, Row] = {}
    with FILE.open(newline="") as file:
        for line in csv.DictReader(file):
            row = rows.setdefault((line["group"], line["kernel"], line["target"]), Row())
            row.value[line["number"]] = int(line["value"])
            row.bound[line["number"]] = int(line["bound"])
            if line["goal"]:
                row.goal[line["number"]] = int(line["goal"])
    return rows


def write(rows: dict[Key, Row]) -> None:
    with FILE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["group", "kernel", "target", "number", "value", "bound", "goal"])
        for key, row in rows.items():
            for number, value in row.value.items():
                out.writerow([*key, number, value, row.bound[number], row.goal.get(number, "")])


def goals(group: str, kernel: str, target: str) -> dict[str, int]:
    if group == "triton":
        return {"spilled": 0}
    if group == "cuda" and kernel.startswith("decode"):
        resident = {"resident": 4} if target in ("sm_75", "sm_86") else {}
        return {"registers": 128, "size": 32 << 10, **resident}
    return {}


def row_of(group: str, kernel: str, target: str, value: dict[str, int]) -> Row:
    bound = {n: x + MARGIN[n] + math.floor(SHARE[n] * x) for n, x in value.items()}
    requested = goals(group, kernel, target)
    return Row(value, bound, {n: x for n, x in requested.items() if worse(n, value[n], x)})


def broken(rows: dict[Key, Row], group: str, figures: dict[tuple[str, str], dict[str, int]]) -> list[str]:
    """Figures that exceed their bound or have no bound."""
    errors = []
    for (kernel, target), numbers in figures.items():
        row = rows.get((group, kernel, target))
        if row is None:
            errors.append(f"{kernel}, {target}: a row in {FILE.name} expected, none found")
            continue
        for n, x in numbers.items():
            if worse(n, x, row.bound[n]):
                least = "at least" if n == "resident" else "at most"
                errors.append(f"{kernel}, {target}, {n}: {least} {row.bound[n]} expected, {x} found")
    return errors


#
# the page
#


def cell(group: str, row: Row | None) -> str:
    if row is None:
        return "–"
    x = row.value
    if group == "triton":
        return f"{x['registers']} · {x['spilled']} · {x['shared'] / 1024:.3g}"
    size = x["size"] if group == "vulkan" else f"{x['size'] / 1024:.0f}"
    spilled = f" · {x['spilled']} spilled" if x["spilled"] else ""
    return f"{x['registers']} · {x['resident']} · {size}{spilled}"


def table(rows: dict[Key, Row], group: str, kernels: list[str], across: bool) -> str:
    """Kernels as columns (across) or as rows."""
    targets = [t for t in TARGETS[group] if any(key[0] == group and key[2] == t for key in rows)]
    head, side = (kernels, targets) if across else (targets, kernels)
    lines = [["target" if across else "kernel", *head], ["---"] * (1 + len(head))]
    for name in side:
        pairs = [(other, name) if across else (name, other) for other in head]
        lines.append([name, *(cell(group, rows.get((group, kernel, target))) for kernel, target in pairs)])
    return "".join(f"| {' | '.join(line)} |\n".replace("| --- |", "|---|").replace(" --- |", "---|") for line in lines)


def unmet(rows: dict[Key, Row]) -> str:
    """A line per goal not reached."""
    requested: dict[tuple[str, str, int], list[int]] = {}
    for (group, _, _), row in rows.items():
        for n, goal in row.goal.items():
            requested.setdefault((group, n, goal), []).append(row.value[n])
    names = {"cuda": "CUDA decode", "triton": "Triton"}
    text = "| goal not reached | limit | measured | kernels and GPUs |\n|---|---|---|---|\n"
    for (group, n, goal), values in requested.items():
        unit = {"registers": "registers", "spilled": "spilled bytes", "size": "bytes of code", "resident": "blocks"}[n]
        limit = "at least" if n == "resident" else "at most"
        total = sum(g == group and n in goals(g, k, t) for g, k, t in rows)
        span = f"{min(values)} to {max(values)}" if min(values) < max(values) else f"{values[0]}"
        text += f"| {names[group]}, {unit} | {limit} {goal} | {span} | {len(values)} of {total} |\n"
    return text


def page(rows: dict[Key, Row]) -> str:
    """The section of the tables without its heading."""

    def of(group: str, start: str = "") -> list[str]:
        return list(dict.fromkeys(k for g, k, _ in rows if g == group and k.startswith(start)))

    attends, others = of("triton", "attend"), [k for k in of("triton") if not k.startswith("attend")]
    parts = [
        "\nVulkan, RADV of Mesa 22.3.6: vector registers · waves of a SIMD · instructions.\n"
        "Spilled registers include scalar ones.\n\n",
        table(rows, "vulkan", of("vulkan"), False),
        "\nCUDA, nvcc 13.0: registers · blocks of a multiprocessor · KiB of code.\n\n",
        table(rows, "cuda", of("cuda"), False),
        "\nTriton 3.9.0: registers · spilled bytes of a thread · KiB of shared memory.\n\n",
        table(rows, "triton", attends, True),
        "\n",
        table(rows, "triton", others, True),
        "\n",
        unmet(rows),
    ]
    return "".join(parts)


def main() -> None:
    rows = read() if FILE.exists() else {}
    for group in sys.argv[1:]:
        sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
        import measure

        with tempfile.TemporaryDirectory() as folder:
            figures = getattr(measure, f"measure_{group}")(Path(folder), TARGETS[group])
        rows = {key: row for key, row in rows.items() if key[0] != group}
        for (kernel, target), value in figures.items():
            rows[group, kernel, target] = row_of(group, kernel, target, value)
    if sys.argv[1:]:
        write(rows)
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + page(rows) + END + rest.partition(END)[2], "utf-8")
    print(page(rows), end="")


if __name__ == "__main__":
    main()
