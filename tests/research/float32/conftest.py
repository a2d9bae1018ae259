"""Fixtures of references.py."""

from __future__ import annotations

from references import calibration, measured, reference, text

__all__ = ["calibration", "measured", "reference", "text"]
