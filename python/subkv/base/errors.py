"""Errors that a user can cause: one class, one sentence, in one order (what, expected, found)."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence


class SubkvError(Exception):
    """Bad input. key: the argument, metadata key or tensor concerned, "" for none; reason: one sentence about it.

    Functions name their own arguments, never a flag: `concerning` renames a key on the way out, and the programs
    (subkv.base.command) turn arguments into flags.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" if self.key else self.reason


class ModelFileError(SubkvError, ValueError):
    """The model file is missing, not a GGUF or damaged."""


class CacheError(SubkvError, RuntimeError):
    """The KV cache that was asked for cannot be made or cannot do what was asked."""


class StateError(SubkvError, RuntimeError):
    """A saved state that does not fit this context."""


@contextlib.contextmanager
def concerning(**roles: str) -> Iterator[None]:
    """Errors about an argument that has another name here: `with concerning(calibration="in_file"): read(path)`."""
    try:
        yield
    except SubkvError as error:
        error.key = roles.get(error.key, error.key)
        raise


def install(extra: str) -> str:
    """How to get the packages of an extra: subkv is on no index, so from its clone."""
    return f"pip install '.[{extra}]' in the clone of subkv"


def need_packages(extra: str, names: Sequence[str]) -> None:
    """Raises SubkvError that names the extra when one of its packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SubkvError(
            "",
            f"expected the packages of the extra `{extra}`, found no {', '.join(missing)}: {install(extra)}",
        )
