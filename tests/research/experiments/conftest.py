"""Fixtures of references.py."""

from __future__ import annotations

from references import calibration, reference, text

__all__ = ["calibration", "reference", "text"]
