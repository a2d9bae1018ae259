"""Text of files for a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Escape line breaks and other characters that a terminal does not print, as in a Python string.

    These are control characters, those that change the direction of text, invisible ones, and lone surrogates.
    keep: characters that stay. libsubkv has the same function (runtime/native/base/printable.h).
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
