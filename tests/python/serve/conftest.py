"""The server that most tests ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Served, running

from subkv.engine import checkpoints


@pytest.fixture(scope="module")
def served(coded_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The coded tiny model behind four slots of 512 tokens."""
    with running(coded_model(), folder=tmp_path_factory.mktemp("slots")) as made:
        yield made


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models evaluate faster than anything is restored: a token costs what serving.dearly() says, always."""
    monkeypatch.setattr("runtime.serve.prefixes.Pace.took", lambda *_: None)
    monkeypatch.setattr(checkpoints, "SPACING", 64)
    monkeypatch.setattr("runtime.serve.blocks.ROWS", 64)
