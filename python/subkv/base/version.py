"""The version of the library, of its files' provenance and of its states."""

from __future__ import annotations

__version__ = "0.1.0"
