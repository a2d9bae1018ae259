"""What the reports of experiments and warm start share: Markdown tables, the command line, files, figures."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from converter.plots import figure as plots
from subkv.base.errors import SubkvError
from subkv.base.files import atomic_file

Row = dict[str, Any]
Rows = list[Row]
# title; what of a row: a key, or a function that writes the cell; how its number is written, "": as text, "±": with the
# standard error beside it
Column = tuple[str, str | Callable[[Row], str], str]
T = TypeVar("T")


def cell(row: Row, what: str | Callable[[Row], str], form: str) -> str:
    """What a column writes for a row; nothing for None and NaN."""
    if callable(what):
        return what(row)
    value = row[what]
    if form == "±":
        return f"{value:.3g} ± {row[f'{what}_stderr']:.1g}"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return format(value, form)


def grid(rows: Rows, columns: Sequence[Column]) -> str:
    """A Markdown table, first column to the left."""
    lines = [
        "| " + " | ".join(title for title, _, _ in columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    lines += ["| " + " | ".join(cell(row, what, form) for _, what, form in columns) + " |" for row in rows]
    return "\n".join(lines)


def heading(title: str, program: str, about: Mapping[str, Any]) -> list[str]:
    """The lines that a report begins with: the command, files without their folders, and what it was run with."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{k} {v}" for k, v in value.items())
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    command = " ".join([program, *(re.sub(r"[^\s=,]*/(?=.)", "", argument) for argument in sys.argv[1:])])
    return [f"# {title}", "", "```", command, "```", "", *(f"- {key}: {text(value)}" for key, value in about.items())]


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Text files, each whole or not at all. Raises SubkvError about `output`."""
    for name, content in files.items():
        with atomic_file(folder / name) as handle:
            handle.write(content.encode("utf-8"))


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Items by a key, keys in the order in which they first appear."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def axes(width: float, height: float, **settings: Any) -> tuple[Any, Any]:
    """A figure with one axis, a light grid behind it; settings: of the axis."""
    figure = plots.new_figure(width, height)
    axis = figure.subplots()
    framed(axis, **settings)
    return figure, axis


def framed(axis: Any, **settings: Any) -> None:
    """An axis with a light grid behind what is drawn."""
    axis.set(**settings)
    axis.grid(True, color="0.9")
    axis.set_axisbelow(True)


def made_folder(folder: Path) -> None:
    """Make the folder of a report. Raises SubkvError about `output`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SubkvError("output", f"cannot write {folder}: {error.strerror or error}") from error
