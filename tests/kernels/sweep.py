"""Loops within a test: one item an op and version of the kernels, with all layouts and shapes inside."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def sweep(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """As pytest.mark.parametrize, without an item for every value. A failure says which value it is of."""
    keys = (names,) if isinstance(names, str) else names
    cases = [dict(zip(keys, (value,) if isinstance(names, str) else value, strict=True)) for value in values]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        kept = signature.replace(parameters=[p for name, p in signature.parameters.items() if name not in keys])

        @functools.wraps(test)
        def swept(*args: Any, **named: Any) -> None:
            given = kept.bind(*args, **named).arguments
            for case in cases:
                try:
                    test(**given, **case)
                except BaseException as error:
                    if hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"with {case}")
                    raise

        del swept.__dict__["__wrapped__"]  # pytest and hypothesis see the other parameters only
        swept.__dict__["__signature__"] = kept
        return swept

    return decorate
