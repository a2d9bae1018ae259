"""One error type for everything a user can cause, and the exit codes of the commands."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence

EXIT_ERROR = 1  # bad input, as opposed to 2 for bad usage
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class ConverterError(Exception):
    """Bad input. The message is one sentence that starts with the flag, key or tensor it concerns."""


def need_packages(extra: str, names: Sequence[str]) -> None:
    """Raises ConverterError that names the extra when one of its packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConverterError(
            f"expected the packages of the extra `{extra}`, found no {', '.join(missing)}: pip install 'subkv[{extra}]'"
        )


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn a ConverterError into its sentence on stderr and exit code 1, Ctrl-C into exit code 130."""
    try:
        yield
    except ConverterError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
