"""Fixtures of programs.py and tiny_llama.py."""

from __future__ import annotations

from programs import calibration, coded_model, program, text_file
from tiny_llama import make_layout, model, tokens

__all__ = ["calibration", "coded_model", "make_layout", "model", "program", "text_file", "tokens"]
