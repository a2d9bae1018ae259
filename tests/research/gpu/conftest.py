"""The scripts of research/gpu as modules: they are not part of a package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "research" / "gpu"


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], Any]:
    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
