"""Layouts and shapes that the kernel tests sweep, and hypothesis strategies for more."""

from __future__ import annotations

from hypothesis import strategies as st
from ops import Layout

BITS = (16, 8, 6, 5, 4, 3, 2)
SINGLE: list[Layout] = [((n, b),) for b in BITS for n in (8, 24, 64)]
MIXED: list[Layout] = [
    ((8, 8), (8, 6), (16, 4), (32, 3)),
    ((8, 6), (40, 4), (16, 3)),
    ((16, 8), (16, 6), (32, 4)),
    ((32, 6), (24, 5), (8, 2)),
    ((8, 16), (8, 8), (8, 5), (8, 3), (8, 2), (8, 4), (8, 6), (8, 3)),
    ((40, 5), (88, 3)),
    ((128, 4),),
    ((120, 2), (8, 3)),
    ((128, 8), (128, 3)),
    ((8, 3), (8, 16)),
]
LAYOUTS = SINGLE + MIXED


def head_size(layout: Layout) -> int:
    """A head size, at least the rank."""
    rank = sum(n for n, _ in layout)
    return max(rank, min(256, rank + (rank % 24)))


def name(layout: Layout) -> str:
    return "_".join(f"{n}x{b}" for n, b in layout)


@st.composite
def layouts(draw: st.DrawFn, max_rank: int = 128) -> Layout:
    n_octets = max_rank // 8
    out = []
    for _ in range(draw(st.integers(1, 8))):
        if n_octets == 0:
            break
        n = draw(st.integers(1, n_octets))
        n_octets -= n
        out.append((8 * n, draw(st.sampled_from(BITS))))
    return tuple(out)
