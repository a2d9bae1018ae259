"""The server that most tests ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Served, running


@pytest.fixture(scope="module")
def served(coded_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The coded tiny model behind four slots of 512 tokens."""
    with running(coded_model(), folder=tmp_path_factory.mktemp("slots")) as made:
        yield made
