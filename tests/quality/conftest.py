"""Fixtures of references.py, and the modules of other folders of tests."""

from __future__ import annotations

import sys
from pathlib import Path

from references import calibration, measured, reference, text

__all__ = ["calibration", "measured", "reference", "text"]

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("format", "kernels")]
