"""Labels beside points of a plot, placed so that they cover little. Needs the extra `plot`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

SPOTS = [(1, 0), (0.8, 0.8), (0.8, -0.8), (-1, 0), (-0.8, 0.8), (-0.8, -0.8), (0, 1), (0, -1)]  # best first


def place(figure: Any, axis: Any, labels: Iterable[tuple[float, float, str, str]]) -> None:
    """Write every label beside its point where it covers the fewest points, lines and other labels."""
    pad = 4 * figure.dpi / 72
    occupied = [box for line in axis.get_lines() for box in _along(axis, line.get_xydata(), line)]
    for bars in axis.containers:
        for segments in bars[2]:
            occupied += [box for segment in segments.get_segments() for box in _along(axis, segment)]
    frame = axis.get_window_extent()
    for x, y, text, color in labels:
        label = axis.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=8.5, color=color, zorder=5)
        label.set_in_layout(False)
        costs = {}
        for reach, spot in itertools.product((6, 11, 18), SPOTS):
            box = _moved(label, reach, spot)
            area = (box[2] - box[0]) * (box[3] - box[1])
            outside = area - _overlap(box, np.array([frame.extents]))
            costs[reach, spot] = _overlap(box, np.array(occupied)) + 10 * outside + 0.02 * reach * pad
        occupied.append(tuple(_moved(label, *min(costs, key=costs.__getitem__))))


def _moved(label: Any, reach: int, spot: tuple[float, float]) -> Any:
    """The label's box in pixels, x0, y0, x1, y1, `reach` points from its point."""
    dx, dy = spot
    across = {1: "left", 0: "center", -1: "right"}[int(np.sign(dx))]
    lift = {1: "bottom", 0: "center", -1: "top"}[int(np.sign(dy))]
    label.set(position=(dx * reach, dy * reach), ha=across, va=lift)
    return label.get_window_extent().extents


def _along(axis: Any, points: Any, line: Any = None) -> list[tuple[float, float, float, float]]:
    """Small boxes in pixels along the drawn line and its markers."""
    transform = axis.transData if line is None else line.get_transform()
    pixels = transform.transform(np.asarray(points, dtype=np.float64))
    marked = line is not None and line.get_marker() not in ("None", "", None)
    boxes = [(x - 6, y - 6, x + 6, y + 6) for x, y in pixels] if marked else []
    if line is None or line.get_linestyle() != "None":
        for (x0, y0), (x1, y1) in zip(pixels[:-1], pixels[1:], strict=True):
            n = max(2, int(math.hypot(x1 - x0, y1 - y0) / 3))
            for x, y in zip(np.linspace(x0, x1, n), np.linspace(y0, y1, n), strict=True):
                boxes.append((x - 2, y - 2, x + 2, y + 2))
    return boxes


def _overlap(box: Any, others: Any) -> float:
    """Area in pixels that box (x0, y0, x1, y1) shares with the boxes [n, 4]."""
    if not len(others):
        return 0.0
    width = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
    height = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
    return float((np.maximum(width, 0) * np.maximum(height, 0)).sum())
