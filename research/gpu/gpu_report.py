"""Common to gpu.py and its parts: results on disk after every step, separate processes, GPU timers."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Step = tuple[str, dict[str, Any]]
"""A line of text and the numbers of a result."""


class Report:
    """Results: written to disk after every step, and printed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[dict[str, Any]] = []

    def add(self, step: str, result: str, **numbers: Any) -> None:
        self.steps.append({"step": step, "result": result, **numbers})
        print(f"{step:<64} {result}", flush=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps({"host": platform.node(), "steps": self.steps}, indent=1) + "\n")
        temporary.replace(self.path)

    def run(self, step: str, work: Callable[[], Step]) -> None:
        """Run a step and add its result; an exception becomes a FAILED result."""
        start = time.monotonic()
        try:
            result, numbers = work()
        except Exception as error:
            result, numbers = failed(error), {}
        self.add(step, result, seconds=round(time.monotonic() - start, 1), **numbers)

    def follow(self, part: str, command: list[str], limit: float, **settings: Any) -> None:
        """Run a part in a process for at most `limit` seconds, and add the results that it prints with emit()."""
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **settings
        )
        timer = threading.Timer(limit, child.kill)
        timer.start()
        rest: deque[str] = deque(maxlen=4)
        assert child.stdout is not None
        for line in child.stdout:
            try:
                record = json.loads(line)
                self.add(record.pop("step"), record.pop("result"), **record)
            except (ValueError, AttributeError, KeyError):
                rest.append(line.strip()[:300])
        code = child.wait()
        late = not timer.is_alive()
        timer.cancel()
        if code != 0:
            why = f"stopped after {limit:.0f} s" if late else f"exit status {code}"
            self.add(part, f"FAILED: {why}: {' | '.join(rest)}")


def emit(step: str, result: str, **numbers: Any) -> None:
    """Print a result for Report.follow."""
    print(json.dumps({"step": step, "result": result, **numbers}), flush=True)


def failed(error: Exception) -> str:
    return f"FAILED: {type(error).__name__}: {str(error)[:300]}"


def missing(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"skipped: no package {name}"


def gpu() -> Any | None:
    """torch.cuda, or None without a device."""
    if missing("torch"):
        return None
    import torch

    return torch.cuda if torch.cuda.is_available() else None


CACHE = 256 << 20  # bytes written before every run, to evict the device's cache
SLEEP = 1_000_000  # cycles that the device waits, so that launches are queued when it starts


def interleaved_ms(calls: dict[str, Callable[[], Any]], n: int = 20) -> dict[str, list[float] | str]:
    """Milliseconds of n runs of every call on the device, interleaved; the error message for a call that fails.

    There are three warm-up runs. The device's cache is cold in every run.
    """
    import torch

    times: dict[str, list[float] | str] = {}
    junk = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            times[name] = []
        except Exception as error:
            times[name] = failed(error)
    for repetition in range(n):
        names = [name for name, ms in times.items() if isinstance(ms, list)]
        shift = repetition % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            junk.zero_()
            if hasattr(torch.cuda, "_sleep"):
                torch.cuda._sleep(SLEEP)
            events[0].record()
            calls[name]()
            events[1].record()
            torch.cuda.synchronize()
            ms = times[name]
            assert isinstance(ms, list)
            ms.append(float(events[0].elapsed_time(events[1])))
    return times
