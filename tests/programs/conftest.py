"""Fixtures of programs.py and served.py."""

from __future__ import annotations

from programs import calibration, coded_model, text_file
from served import model, serve, text, words

__all__ = ["calibration", "coded_model", "model", "serve", "text", "text_file", "words"]
