"""One error type for everything a user can cause, and the exit codes of the commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

EXIT_ERROR = 1  # bad input, as opposed to 2 for bad usage
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class ConverterError(Exception):
    """Bad input. The message is one sentence that starts with the flag, key or tensor it concerns."""


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
