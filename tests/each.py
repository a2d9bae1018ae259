"""Several cases in one test, for cases that take milliseconds; `pytest.mark.parametrize` makes an item of each.

    @each("bits", [2, 3, 4])
    def test_codes(bits): ...

All cases run, even after a failure; the report shows the values of a failed case (pytest's subtests). All cases share
the fixtures: use parametrize if a case needs new fixtures or takes seconds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test for every one of `values`; names: as parametrize has them. Several `each` give all combinations."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    added = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]
    assert added, f"each({names!r}): expected values, found none"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        body = getattr(test, "body", test)
        cases = [inner | outer for outer in added for inner in getattr(test, "cases", [{}])]
        fixtures = [own for own in inspect.signature(body).parameters.values() if own.name not in cases[0]]
        reports = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(body)
        def run(subtests: pytest.Subtests, **made: Any) -> None:
            for case in cases:
                with subtests.test(**{key: _shown(value) for key, value in case.items()}):
                    body(**made, **case)

        run.__signature__ = inspect.Signature([*fixtures, reports])  # type: ignore[attr-defined]
        run.body, run.cases = body, cases  # type: ignore[attr-defined]
        return run

    return decorate


def _shown(value: Any) -> str:
    """A case's value in the report: its name if present, else its first 60 characters."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
