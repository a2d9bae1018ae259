"""Errors that users can cause. The message is one sentence: subject, expected value, value found."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence

from subkv.base.text import printable


class SubkvError(Exception):
    """Invalid input. key: the argument, metadata key or tensor, "" for none; reason: one sentence.

    remedy: the end of the sentence, which advises another cache or a conversion; `cause` is the sentence without it.

    Functions name their own arguments, never a flag: `concerning` renames the key of a passing error, and
    subkv.base.command maps arguments to flags.
    """

    def __init__(self, key: str, reason: str, remedy: str = "") -> None:
        super().__init__(key, reason, remedy)
        self.key, self.cause, self.remedy = key, reason, remedy
        self.reason = f"{reason}; {remedy}" if remedy else reason

    def __str__(self) -> str:
        return printable(f"{self.key}: {self.reason}" if self.key else self.reason)


class ModelFileError(SubkvError, ValueError):
    """The model file is missing, not a GGUF or damaged."""


class CacheError(SubkvError, RuntimeError):
    """The requested KV cache cannot be created, or does not support the operation."""


class NoCodedCacheError(CacheError):
    """The model has no K/V cache, or one that cannot be coded: another cache type is the remedy."""


class ClosedError(CacheError):
    """A method of an object that was closed."""


class StateError(SubkvError, RuntimeError):
    """A saved state that does not fit this context."""


@contextlib.contextmanager
def concerning(**roles: str) -> Iterator[None]:
    """Rename the keys of errors that pass through: `with concerning(calibration="in_file"): read(path)`."""
    try:
        yield
    except SubkvError as error:
        error.key = roles.get(error.key, error.key)
        raise


def system_reason(error: BaseException) -> str:
    """Why the system rejected an operation, without the path, which the sentence names."""
    if isinstance(error, MemoryError):
        return "out of memory"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_unavailable(error: BaseException) -> bool:
    """Whether the system caused an error (access, memory, open files, the disk): the file itself may be sound."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (OSError, MemoryError)) and not isinstance(cause, FileNotFoundError):
            return True
        cause = cause.__cause__
    return False


def install(extra: str) -> str:
    """The command that installs the packages of an extra, from the clone (subkv is not on a package index)."""
    return f"pip install '.[{extra}]' in the clone of subkv"


def need_packages(extra: str, names: Sequence[str]) -> None:
    """Raises SubkvError that names the extra if one of its packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SubkvError(
            "",
            f"expected the packages of the extra `{extra}`, found no {', '.join(missing)}: {install(extra)}",
        )
