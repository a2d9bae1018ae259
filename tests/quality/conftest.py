"""Fixtures of references.py."""

from __future__ import annotations

import sys
from pathlib import Path

from references import calibration, measured, reference, text

__all__ = ["calibration", "measured", "reference", "text"]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "format"))
