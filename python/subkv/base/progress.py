"""Progress bars."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from tqdm import tqdm

from subkv.base.text import filled, printable

T = TypeVar("T")

INTERVAL = 0.1  # seconds between two updates of overall()'s bar
DELAY = 1.0  # seconds before a bar appears
RECENT = 60.0  # seconds whose rate the time left is computed from


def progress_bar(name: str, total: float, unit: str, show: bool = True, done: float = 0) -> Any:
    """A tqdm bar with the time left, on stderr if that is a terminal; it is erased at the end.

    Units "B" and "tok" have SI prefixes. show False: no bar. done: by an earlier run, at no time. Inside overall(), it
    is a part of the common bar.
    """
    whole = _whole.get()
    if whole is not None and show:
        return _Part(whole, name, total, done)
    return tqdm(
        total=total,
        initial=done,
        desc=printable(name),
        unit=unit,
        unit_scale=unit in ("B", "tok"),
        disable=None if show else True,  # None shows it only on a terminal
        leave=False,
        delay=DELAY,
    )


def tracked(name: str, items: Collection[T], unit: str, show: bool = True) -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with progress_bar(name, len(items), unit, show) as bar:
        for item in items:
            yield item
            bar.update()


#
# a common bar
#


class Whole:
    """One bar over the parts of a long run: the share of the expected time that has passed.

    expected: seconds by the first word of a part's name. Other parts count once they begin.
    """

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._expected = dict(expected)
        self._start, self._shown = time.monotonic(), -INTERVAL
        self.bar = tqdm(
            total=1.0,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{unit}",
            disable=None,
            leave=False,
            delay=DELAY,
        )

    def expect(self, name: str, seconds: float) -> None:
        """Update the expected seconds of a part."""
        self._expected[name] = seconds

    def begin(self, name: str) -> float:
        """Begin a part; returns its expected seconds."""
        self.bar.set_description_str(printable(name), refresh=False)
        return self._expected.pop(name.split()[0], 0.0)

    def show(self, seconds_left: float) -> None:
        """Update the bar. seconds_left: of the current part."""
        left = seconds_left + sum(self._expected.values())
        passed = time.monotonic() - self._start
        self.bar.unit = tqdm.format_interval(left)  # a field of bar_format that the caller may set
        self.bar.n = max(passed / (passed + left), self.bar.n) if passed + left else 0.0
        if not self.bar.disable and passed >= DELAY and passed - self._shown >= INTERVAL:
            self._shown = passed
            self.bar.refresh()


_whole: contextvars.ContextVar[Whole | None] = contextvars.ContextVar("whole", default=None)


class _Part:
    """The bar of a part inside overall(), with the part of tqdm's interface that we use."""

    def __init__(self, whole: Whole, name: str, total: float, done: float) -> None:
        self._whole, self._total = whole, total
        self._expected, self._start = whole.begin(name), time.monotonic()
        self.n = self._done = done
        self._recent = collections.deque([(self._start, done)])  # times and n
        self.disable = whole.bar.disable

    def update(self, n: float = 1) -> None:
        self.n += n
        now, left = time.monotonic(), max(self._total - self.n, 0.0)
        if n and now - self._recent[-1][0] >= INTERVAL:
            self._recent.append((now, self.n))
        while len(self._recent) > 2 and now - self._recent[1][0] > RECENT:
            self._recent.popleft()
        start, n_start = self._recent[0]
        if self.n - self._done > 0.02 * (self._total - self._done) and self.n > n_start:
            self._whole.show((now - start) * left / (self.n - n_start))
        else:
            self._whole.show(max(self._expected - (now - self._start), 0.0) if left else 0.0)

    def refresh(self) -> None:
        self.update(0)

    def __enter__(self) -> _Part:
        self._whole.show(self._expected)
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def overall(expected: Mapping[str, float]) -> Iterator[Whole]:
    """Inside the block, all progress_bar() share one bar."""
    whole = Whole(expected)
    token = _whole.set(whole)
    try:
        yield whole
    finally:
        _whole.reset(token)
        whole.bar.close()


def expect(name: str, seconds: float) -> None:
    """Set the expected seconds of a part of the enclosing common bar, if any."""
    whole = _whole.get()
    if whole is not None:
        whole.expect(name, seconds)


def note(text: str) -> None:
    """Print a line to stderr, above a bar if there is one. It may quote a file."""
    tqdm.write(filled(printable(text), sys.stderr), file=sys.stderr)


def duration(seconds: float) -> str:
    """A rounded duration: "about 40 seconds", "about 7 minutes", "about 2.5 hours"."""
    if seconds < 90:
        return f"about {max(round(seconds / 10) * 10, 10)} seconds"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.1f} hours"
