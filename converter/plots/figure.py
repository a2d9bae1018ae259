"""Figures and their files, complete or absent; the suffix selects the format (default: png). Extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subkv.base.errors import SubkvError, concerning, install
from subkv.base.files import atomic_file, check_writable
from subkv.base.text import printable

DPI = 150


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches, without a window system and without global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SubkvError("plot", f"expected matplotlib, found none; {install('plot')}") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check(plot: Path) -> None:
    """Refuse a plot that cannot be drawn, before a long run: no matplotlib, an unknown suffix, no such folder.

    Raises SubkvError about `plot`, as all functions that draw do.
    """
    if _kind(plot) not in new_figure(1, 1).canvas.get_supported_filetypes():
        raise SubkvError("plot", f"expected a file name that ends in .png, .svg or .pdf, found {plot.name}")
    with concerning(output="plot"):
        check_writable(plot)


def _kind(plot: Path) -> str:
    return plot.suffix[1:].lower() or "png"


def plain(text: str) -> str:
    """Text of a file as matplotlib can show it: a dollar would start a formula, a line break another line."""
    return printable(text).replace("$", r"\$")


def write_figure(figure: Any, plot: Path) -> None:
    """The figure as a file. Raises SubkvError about `plot`."""
    check(plot)
    with concerning(output="plot"), atomic_file(plot) as handle:
        figure.savefig(handle, format=_kind(plot), dpi=DPI)
