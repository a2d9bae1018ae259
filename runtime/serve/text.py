"""From tokens' bytes to text that can be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopText:
    """Text as it grows: feed() returns what is safe to show and holds back what may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.stopped = False
        self.held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        self.held += self._decoder.decode(piece)
        found = [i for i in (self.held.find(stop) for stop in self.stops) if i >= 0]
        if found:
            self.stopped = True
            shown, self.held = self.held[: min(found)], ""
            return shown
        n_held = max((self._n_begun(stop) for stop in self.stops), default=0)
        shown = self.held[: len(self.held) - n_held]
        self.held = self.held[len(shown) :]
        return shown

    def _n_begun(self, stop: str) -> int:
        """How many characters at the end of the text are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if self.held.endswith(stop[:n])), 0)

    def end(self) -> str:
        """What was held back, when no stop string came; the bytes of half a character become one replacement."""
        shown = self.held + self._decoder.decode(b"", final=True)
        self.held = ""
        return "" if self.stopped else shown
