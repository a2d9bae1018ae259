"""Checks of numbers that users give as Python objects: one sentence for another type or value."""

from __future__ import annotations

import math
import operator
from typing import Any

from subkv.base.errors import SubkvError

INT32_MAX = 2**31 - 1  # larger numbers would wrap around in llama.cpp


def whole(
    key: str, value: Any, least: int, most: int = INT32_MAX, expected: str = "", kind: type[SubkvError] = SubkvError
) -> int:
    """The value as an int. Raises an error of this kind about `key` for another type (also bool), or outside the range.

    expected: in place of the range.
    """
    try:
        n = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        n = None
    if n is None or not least <= n <= most:
        raise kind(key, f"expected {expected or f'an integer from {least} to {most}'}, found {shown(value)}")
    return n


def real(key: str, value: Any, least: float, most: float, expected: str, kind: type[SubkvError] = SubkvError) -> float:
    """As whole(), for a finite number in a range."""
    try:  # float() also reads text
        x = math.nan if isinstance(value, (bool, str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, OverflowError):
        x = math.nan
    if not (math.isfinite(x) and least <= x <= most):
        raise kind(key, f"expected {expected}, found {shown(value)}")
    return x


def shown(value: Any) -> str:
    """A value in a sentence: numbers as they are printed, others as Python writes them, at most 60 characters."""
    if isinstance(value, int) and abs(value) >= 10**60:  # Python writes no number of more than 4300 digits
        return f"a number of {value.bit_length()} bits"
    text = str(value) if hasattr(value, "__float__") else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
