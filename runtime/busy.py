"""How busy other processes keep the processor, beside a measurement. Linux only; standard library only."""

from __future__ import annotations

import os
import time
from pathlib import Path

LIMIT = 0.3  # cores that others may keep busy beside a speed measurement
USED = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal


class Busy:
    """Starts now. Children count as own work once they have been waited for."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._now()

    def _now(self) -> tuple[float, float]:
        """Seconds of the clock, and seconds of cores that other processes have used, up to a constant."""
        own = os.times()
        try:
            fields = self._stat.read_text().split("\n", 1)[0].split()[1:]
            used = sum(int(fields[i]) for i in USED) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError, AttributeError):
            return time.monotonic(), float("nan")
        return time.monotonic(), used - sum(own[:4])

    def others(self) -> float | None:
        """Mean number of cores that other processes have kept busy, or None if it is unknown."""
        now, used = self._now()
        mean = (used - self._start[1]) / max(now - self._start[0], 0.01)
        return None if mean != mean else round(max(mean, 0.0), 2)
