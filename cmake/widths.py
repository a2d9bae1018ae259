"""Writes the widths of codes (kernels/include/subkv/widths.h) for Python: kernels/triton/subkv_triton/widths.py.

python cmake/widths.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE, MODULE = ROOT / "kernels/include/subkv/widths.h", ROOT / "kernels/triton/subkv_triton/widths.py"


def module(header: str) -> str:
    """The text of the module."""
    rows = [row.split(", ") for row in re.findall(r"\bOF\((\d[^_]*), __VA_ARGS__\)", header)]
    planes = {int(bits): (int(low),) if bits == low else (int(low), int(bits) - int(low)) for bits, low, *_ in rows}
    path = {int(row[0]): row[2:] for row in rows if len(row) > 2}
    bends = {bits: (int(double), int(triple)) for bits, (double, triple, _) in path.items()}
    shares = ", ".join(f"{bits}: {share.removesuffix('f')}" for bits, (_, _, share) in path.items())
    return f'''"""Widths of codes and their constants. cmake/widths.py writes this file from subkv/widths.h."""

PLANES: dict[int, tuple[int, ...]] = {planes}
"""Bits of a band: widths of its bit planes, low bits first (converter/FORMAT.md)."""
BENDS = {bends}
"""Bits of a band: magnitudes above which levels are twice and three times as far apart."""
SHARES = {{{shares}}}
"""Bits of a band: distance of levels relative to its ratio."""
'''


if __name__ == "__main__":
    MODULE.write_text(module(TABLE.read_text("utf-8")), "utf-8")
