"""Fixtures of programs.py, and of served.py in tests/programs."""

from __future__ import annotations

import sys
from pathlib import Path

from programs import calibration, coded_model, text_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "programs"))
from served import model, serve, words

__all__ = ["calibration", "coded_model", "model", "serve", "text_file", "words"]
