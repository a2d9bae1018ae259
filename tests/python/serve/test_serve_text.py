"""Stop strings in a text that comes in pieces, against the definition."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.serve.text import StopText

LETTERS = st.text("ab", max_size=6)


class Naive:
    """What StopText does, by searching all of what is held anew."""

    def __init__(self, stops: list[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        self.held += piece
        found = [self.held.index(stop) for stop in self.stops if stop in self.held]
        if found:
            self.stopped = True
            shown, self.held = self.held[: min(found)], ""
            return shown
        begun = [n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])]
        cut = len(self.held) - max(begun, default=0)
        shown, self.held = self.held[:cut], self.held[cut:]
        return shown


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(LETTERS, max_size=4), st.lists(LETTERS, max_size=12))
def test_it_is_the_naive_search(stops: list[str], pieces: list[str]) -> None:
    text, naive = StopText(stops), Naive(stops)
    for piece in pieces:
        assert text.feed(piece.encode()) == naive.feed(piece)
        assert text.stopped == naive.stopped
        if text.stopped:
            break
    assert text.end() == naive.held


def test_halves_of_characters_wait() -> None:
    text = StopText(["é!"])
    assert [text.feed(bytes([byte])) for byte in "aé?é".encode()] == ["a", "", "", "é?", "", ""]
    assert text.end() == "é"
    assert StopText(["x"]).feed(b"\xc3") == ""


def test_a_long_stop_string_that_almost_comes() -> None:
    """Quadratic in what is held, this took hours."""
    n = 300_000
    text = StopText(["a" * n + "b"] + ["a" * (n - i) + "c" for i in range(3)])
    end = time.monotonic() + 60
    shown = "".join(text.feed(b"a" * 4) for _ in range(n // 4))
    assert shown + text.feed(b"x") == "a" * n + "x"
    assert time.monotonic() < end
