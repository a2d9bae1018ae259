"""From tokens' bytes to text that can be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence


class StopText:
    """Text as it grows: feed() returns what is safe to show and holds back what may become a stop string.

    Linear in the text and the stop strings (Knuth, Morris and Pratt's search for each).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = ""  # the stop string that came
        self._searches = [Search(stop) for stop in stops if stop]
        self._held: deque[str] = deque()
        self._n_held = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        text = self._decoder.decode(piece)
        n_before = self._n_held
        self._held.append(text)
        self._n_held += len(text)
        ends = [(search, search.feed(text)) for search in self._searches]
        starts = [(n_before + end - len(search.stop), search.stop) for search, end in ends if end is not None]
        if starts:  # the first of them to begin
            start, self.found = min(starts)
            shown = self._take(start)
            self._take(self._n_held)
            return shown
        return self._take(self._n_held - max((search.n_begun for search in self._searches), default=0))

    @property
    def stopped(self) -> bool:
        return bool(self.found)

    def _take(self, n: int) -> str:
        """The first n characters of what is held."""
        self._n_held -= n
        taken = []
        while n > 0:
            text = self._held.popleft()
            if len(text) > n:
                self._held.appendleft(text[n:])
                text = text[:n]
            taken.append(text)
            n -= len(text)
        return "".join(taken)

    def end(self) -> str:
        """What was held back, when no stop string came; the bytes of half a character become one replacement."""
        shown = self._take(self._n_held) + self._decoder.decode(b"", final=True)
        return "" if self.stopped else shown


class Search:
    """One stop string in a text that grows. n_begun: how many characters at the text's end are its beginning."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.n_begun = 0
        # by number of characters: the longest beginning of `stop` that they end with, shorter than they are
        self._shorter = [0, 0]
        n = 0
        for character in stop[1:]:
            n = self._next(n, character)
            self._shorter.append(n)

    def _next(self, n: int, character: str) -> int:
        while n and self.stop[n] != character:
            n = self._shorter[n]
        return n + (self.stop[n] == character)

    def feed(self, text: str) -> int | None:
        """Where in `text` the stop string ends, the first time; None: nowhere."""
        for i, character in enumerate(text):
            self.n_begun = self._next(self.n_begun, character)
            if self.n_begun == len(self.stop):
                return i + 1
        return None
