"""Widths of codes and their constants. cmake/widths.py writes this file from subkv/widths.h."""

PLANES: dict[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a band: widths of its bit planes, low bits first (converter/FORMAT.md)."""
BENDS = {2: (2, 4), 3: (5, 6), 4: (9, 12), 5: (19, 25), 6: (37, 50)}
"""Bits of a band: magnitudes above which levels are twice and three times as far apart."""
SHARES = {2: 0.411522634, 3: 0.40290088, 4: 0.358166188, 5: 0.353481798, 6: 0.329380765}
"""Bits of a band: distance of levels relative to its ratio."""
