"""Text of files for a terminal."""

from __future__ import annotations

import functools
import shutil
import textwrap
from typing import Any


def printable(text: str, keep: str = "") -> str:
    """Escape line breaks and other characters that a terminal does not print, as in a Python string.

    These are control characters, those that change the direction of text, invisible ones, and lone surrogates.
    keep: characters that stay. libsubkv has the same function (runtime/native/base/printable.h).
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def filled(text: str, stream: Any) -> str:
    """Lines, wrapped at words if the stream is a terminal."""
    if stream is None or not stream.isatty():
        return text
    width = max(shutil.get_terminal_size().columns, 20)
    fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill, text.split("\n")))
