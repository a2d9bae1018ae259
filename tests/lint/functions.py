"""No function has more than 80 lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lint.files import CPP, PYTHON
from syntax import functions

MOST = 80


def lengths(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for function in functions(path):
            if function.node.type == "function_definition" and function.n_lines > MOST:
                name = function.name.split("::")[-1]
                yield f"{path}:{function.line}: {name} has {function.n_lines} lines, expected at most {MOST}"


RULES = {"function-length": lambda: lengths([*CPP, *PYTHON])}
