"""Fixtures of references.py."""

from __future__ import annotations

import sys
from pathlib import Path

from references import calibration, reference, text

__all__ = ["calibration", "reference", "text"]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "format"))
