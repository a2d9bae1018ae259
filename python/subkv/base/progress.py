"""Progress bars: one look for everything that takes longer than a moment."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

DELAY = 1.0  # seconds before a bar appears: what is quicker leaves the screen alone


def progress_bar(what: str, total: float, unit: str, show: bool = True) -> Any:
    """A tqdm bar with the time left, on stderr and only where that is a terminal; it leaves no line behind.

    Large units ("B", "tok") are scaled. show False: never a bar.
    """
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=unit in ("B", "tok"),
        disable=None if show else True,  # None: tqdm asks whether stderr is a terminal
        leave=False,
        delay=DELAY,
    )


def tracked(what: str, items: Collection[T], unit: str, show: bool = True) -> Iterator[T]:
    """The items behind a progress bar, which counts those that are done with."""
    with progress_bar(what, len(items), unit, show) as bar:
        for item in items:
            yield item
            bar.update()
