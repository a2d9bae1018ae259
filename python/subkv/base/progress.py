"""Progress bars: one look for everything that takes longer than a moment."""

from __future__ import annotations

import contextlib
import os
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


@contextlib.contextmanager
def loading(path: str | os.PathLike[str], show: bool = True) -> Iterator[Any]:
    """A bar while llama.cpp loads `path`; yields the value of llama_model_params.progress_callback that moves it.

    Ctrl-C stops the loading: KeyboardInterrupt at the end of the block, whatever else the block raised.
    """
    from subkv.native.binding import C

    with progress_bar(f"loading {os.path.basename(path)}", 100, "%", show) as bar:
        if bar.disable:
            yield C.llama_progress_callback(0)
            return
        interrupted = False

        def report(fraction: float, _: Any) -> bool:
            nonlocal interrupted
            try:
                bar.update(int(100 * fraction) - bar.n)
            except KeyboardInterrupt:  # would be lost in the C code that called
                interrupted = True
            return not interrupted

        try:
            yield C.llama_progress_callback(report)
        finally:
            if interrupted:
                raise KeyboardInterrupt
