"""models/gemma3.py as a module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_spec: Any = importlib.util.spec_from_file_location(
    "gemma3", Path(__file__).resolve().parent.parent / "models" / "gemma3.py"
)
gemma3: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gemma3)
