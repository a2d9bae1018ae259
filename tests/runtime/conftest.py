"""Fixtures of tiny_llama.py."""

from __future__ import annotations

from tiny_llama import make_layout, model, tokens

__all__ = ["make_layout", "model", "tokens"]
