"""Labels beside points of a plot, placed so that they cover little. Needs the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def place(figure: Any, axis: Any, labels: Iterable[tuple[float, float, str, str]]) -> None:
    """Write every label beside its point where it covers the fewest points, lines and other labels."""
    import numpy as np

    pad = 4 * figure.dpi / 72
    spots = [(1, 0), (0.8, 0.8), (0.8, -0.8), (-1, 0), (-0.8, 0.8), (-0.8, -0.8), (0, 1), (0, -1)]
    sides = {1: "left", 0: "center", -1: "right"}
    lifts = {1: "bottom", 0: "center", -1: "top"}
    taken = [box for line in axis.get_lines() for box in _along(axis, line.get_xydata(), line)]
    for bars in axis.containers:
        for segments in bars[2]:
            taken += [box for segment in segments.get_segments() for box in _along(axis, segment)]
    frame = axis.get_window_extent()
    for x, y, text, color in labels:
        best: tuple[float, Any] | None = None
        for reach in (6, 11, 18):
            for dx, dy in spots:
                label = axis.annotate(
                    text,
                    (x, y),
                    (dx * reach, dy * reach),
                    textcoords="offset points",
                    ha=sides[int(np.sign(dx))],
                    va=lifts[int(np.sign(dy))],
                    fontsize=8.5,
                    color=color,
                    zorder=5,
                )
                label.set_in_layout(False)
                box = label.get_window_extent().extents
                overlap = _overlap(box, np.array(taken))
                inside = _overlap(box, np.array([frame.extents]))
                area = (box[2] - box[0]) * (box[3] - box[1])
                cost = overlap + 10 * (area - inside) + 0.02 * reach * pad
                if best is None or cost < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (cost, label)
                else:
                    label.remove()
        assert best is not None
        taken.append(tuple(best[1].get_window_extent().extents))


def _along(axis: Any, points: Any, line: Any = None) -> list[tuple[float, float, float, float]]:
    """Small boxes in pixels along the drawn line and its markers."""
    import numpy as np

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
    import numpy as np

    if not len(others):
        return 0.0
    width = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
    height = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
    return float((np.maximum(width, 0) * np.maximum(height, 0)).sum())
