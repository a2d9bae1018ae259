"""The build's helper scripts are not installed: these tests import them from cmake/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "cmake"))


@pytest.fixture
def repo() -> Path:
    """Root of the checkout."""
    return REPO
