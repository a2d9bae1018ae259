"""Figures and their files, whole or not at all; the suffix says the format (png without one). Extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subkv.base.errors import SubkvError, concerning
from subkv.base.files import atomic_file, check_writable

DPI = 150


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches that no window system and no global state knows of."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SubkvError("plot", "expected matplotlib, found none; pip install 'subkv[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check(target: Path) -> None:
    """Refuse what cannot be drawn before a long run is spent on it.

    Raises SubkvError about `plot` without matplotlib, for an unknown suffix and a target that cannot be written.
    """
    kinds = new_figure(1, 1).canvas.get_supported_filetypes()
    if _kind(target) not in kinds:
        raise SubkvError("plot", f"expected a file name that ends in .png, .svg or .pdf, found {target.name}")
    with concerning(output="plot"):
        check_writable(target)


def _kind(target: Path) -> str:
    return target.suffix[1:].lower() or "png"


def plain(text: str) -> str:
    """Text as matplotlib shows it unchanged: a dollar would start a formula."""
    return text.replace("$", r"\$")


def write_figure(figure: Any, target: Path) -> None:
    """Raises SubkvError as check does."""
    check(target)
    with concerning(output="plot"), atomic_file(target) as handle:
        figure.savefig(handle, format=_kind(target), dpi=DPI)
