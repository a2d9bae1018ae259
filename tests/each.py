"""Cases inside one test: what `pytest.mark.parametrize` writes as many items, where each takes milliseconds.

    @each("bits", [2, 3, 4])
    def test_codes(bits): ...

All cases run, whatever the others do; one that fails is reported by its values (pytest's subtests). Fixtures are made
once for all of them: a test that needs its own, or whose cases take seconds, stays parametrized.
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
    """A case's value in the report: its name if it has one, else its first 60 characters."""
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
