"""Fixtures of programs.py, and serving.py."""

from __future__ import annotations

import sys
from pathlib import Path

from programs import calibration, coded_model, program, text_file

__all__ = ["calibration", "coded_model", "program", "text_file"]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "serve"))
