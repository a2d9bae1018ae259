"""How much `convert` decodes to measure sensitivities: less of a large model, whose tokens take longest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """far: tokens of each of builtin.LONGER, as what is read from far back needs a longer text. spread: layers that are
    tried beyond the first ones. statistics: whether they have tokens enough for large heads before those that are
    measured on enter them."""

    far: int = 2048
    spread: int = 24
    statistics: bool = True


WHOLE = Effort()
LESS = Effort(far=1536, spread=12, statistics=False)
LARGE = 1 << 30  # bytes of weights


def effort(n_bytes: int) -> Effort:
    """For a file of this size. converter/NOTES.md has what less of it costs."""
    return LESS if n_bytes > LARGE else WHOLE
