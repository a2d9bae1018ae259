"""Bases from the weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subkv.base.errors import SubkvError


def sidecar(model: Path, output: Path, options: Any = None) -> Any:
    """Write the sidecar of a model that was never calibrated. Raises SubkvError."""
    raise SubkvError("model", "expected bases, found none, and none can be made of the weights yet")
