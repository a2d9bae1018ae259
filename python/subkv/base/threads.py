"""How many threads to use."""

from __future__ import annotations

import os


def default_threads(asked: int | None = None) -> int:
    """`asked` as llama.cpp reads -t: None or not positive means all processors that this process may use."""
    if asked is not None and asked > 0:
        return asked
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
