"""What goes wrong with warm starts."""

from __future__ import annotations

from subkv.base.errors import SubkvError


class WarmStartError(SubkvError, ValueError):
    """A flag, file or prompt that a warm start cannot use; the cold path still works."""
