"""Fixtures of programs.py."""

from __future__ import annotations

from programs import calibration, coded_model, text_file

__all__ = ["calibration", "coded_model", "text_file"]
