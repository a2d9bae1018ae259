"""Text of files for a terminal."""

from __future__ import annotations

import functools
import re
import shutil
import textwrap
from typing import Any

_SPACE = "\0"  # no text for a terminal contains it


def printable(text: str, keep: str = "") -> str:
    """Escape line breaks and other characters that a terminal does not print, as in a Python string.

    These are control characters, those that change the direction of text, invisible ones, and lone surrogates.
    keep: characters that stay. libsubkv has the same function (runtime/native/base/printable.h).
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


_BEYOND_UNICODE = re.compile(rb"[\xf5-\xf7](?=[\x80-\xbf])|\xf4(?=[\x90-\xbf])")  # first of 4 bytes


def encodable(text: bytes) -> bytes:
    """A text for llama.cpp's tokenizers: they end the process at characters beyond Unicode, and read other bytes that
    are no UTF-8 as U+FFFD.
    """
    return _BEYOND_UNICODE.sub(b"\xff", text)


def filled(text: str, stream: Any) -> str:
    """Lines, wrapped at words if the stream is a terminal."""
    if not getattr(stream, "isatty", lambda: False)():
        return text
    # a command that the user copies stays in one line
    text = re.sub(r"`[^`\n]*`|(?<!\w)'[^'\n]*'", lambda quoted: quoted[0].replace(" ", _SPACE), text)
    width = max(shutil.get_terminal_size().columns, 20)
    fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill, text.split("\n"))).replace(_SPACE, " ")
