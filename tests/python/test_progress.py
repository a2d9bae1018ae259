"""Progress bars: only on a terminal, only for long work; loading can be stopped."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter.session import Session
from converter.source import Source
from subkv.base import progress
from subkv.engine.llama import Llama
from subkv.engine.model import Model

Models = Callable[..., Path]


class Terminal(io.StringIO):
    """A stderr that reports itself as a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr as a terminal on which bars appear at once; no fixture, since pytest replaces stderr after the setup."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return stderr


def test_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress.progress_bar("counting", 3000, "tok") as bar:
        bar.update(1500)
        bar.refresh()
    assert "counting:  50%" in terminal.getvalue() and "1.50k/3.00k [" in terminal.getvalue()
    assert "<" in terminal.getvalue()  # elapsed<left
    assert terminal.getvalue().split("\r")[-2].strip() == ""  # it leaves no line behind


def test_no_bar_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress.progress_bar("hidden", 10, "step", show=False) as bar:
        bar.update(10)
    monkeypatch.setattr(progress, "DELAY", 60.0)
    with progress.progress_bar("quick", 10, "step") as bar:
        bar.update(10)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.progress_bar("piped", 10, "step") as bar:
        bar.update(10)
        assert bar.disable
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


OPEN: dict[str, Callable[[Path], Any]] = {
    "engine": lambda path: Model(str(path)),
    "calibrate": lambda path: Session(Source(path), 64, 1, 4),
    "Llama": lambda path: Llama(path, kv_cache="f16", n_ctx=64, verbose=False, progress=True),
}


@pytest.mark.parametrize("way", OPEN)
def test_loading_shows_and_can_be_stopped(way: str, tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    path = tiny_model("llama")
    OPEN[way](path).close()
    assert f"loading {path.name}:   0%" in terminal.getvalue()

    moved: list[int] = []
    bar = progress.progress_bar

    def stopped(*arguments: Any) -> Any:
        made = bar(*arguments)

        def update(n: int) -> None:
            moved.append(n)
            raise KeyboardInterrupt

        made.update = update
        return made

    monkeypatch.setattr("subkv.native.binding.progress_bar", stopped)
    with pytest.raises(KeyboardInterrupt):
        OPEN[way](path)
    assert len(moved) == 1  # llama.cpp stopped at once


def test_the_class_shows_bars_only_on_request(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with Llama(tiny_model("llama"), kv_cache="f16", n_ctx=64, verbose=False):
        pass
    assert terminal.getvalue() == ""


def test_parts_are_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.overall({"first": 30.0, "second": 60.0}) as whole:
        with progress.progress_bar("first of all", 10, "step") as bar:
            now[0] = 5.0
            bar.update(5)
            assert whole.bar.n == pytest.approx(5 / (5 + 5 + 60))
            progress.expect("second", 10.0)
            progress.note("a line")
            now[0] = 10.0
            bar.update(5)
        assert whole.bar.n == pytest.approx(10 / 20)
        for _ in progress.tracked("second", range(2), "layer", show=False):  # part of something that has its own
            pass
        assert whole.bar.n == pytest.approx(10 / 20) and whole.bar.desc == "first of all"
        for _ in progress.tracked("second", range(2), "layer"):
            now[0] += 5.0
        assert whole.bar.n == pytest.approx(1.0)
        with progress.progress_bar("not expected", 10, "step") as bar:
            bar.update(1)
    text = terminal.getvalue()
    assert "first of all:   7%" in text and "<01:05" in text
    assert "a line\n" in text
    assert text.split("\r")[-2].strip() == ""
    with progress.progress_bar("alone", 10, "step") as bar:
        assert hasattr(bar, "set_description")


def test_the_time_left_follows_the_rate_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of an earlier run took no time now, and a machine that gets slower counts as soon as it is."""
    on_terminal(monkeypatch)
    now, shown = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Whole, "show", lambda _, left: shown.append(left))
    with progress.overall({"resumed": 70.0}), progress.progress_bar("resumed", 1000, "tok", done=500) as bar:
        for seconds in [1.0] * 10 + [30.0] * 4:
            now[0] += seconds
            bar.update(10)
    assert shown[0] == 70.0 and shown[1] == pytest.approx(69.0), "too early to tell"
    assert shown[10] == pytest.approx(40.0)
    assert shown[-1] == pytest.approx(36 * 30.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "10 seconds"), (44, "40 seconds"), (240, "4 minutes"), (9000, "2.5 hours")]
)
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == f"about {text}"
