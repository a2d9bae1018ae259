"""The user's folders, by the XDG variables, and those of the installed package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from subkv.base.errors import SubkvError


def _user_folder(variable: str, default: str) -> Path:
    """Raises SubkvError about the variable for a user without a home folder."""
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / "subkv"
    try:
        return Path.home() / default / "subkv"
    except RuntimeError as error:
        found = repr(base) if base else "nothing"
        raise SubkvError(variable, f"expected an absolute path, as there is no home folder, found {found}") from error


def cache_folder() -> Path:
    """What can be made again: $XDG_CACHE_HOME/subkv or ~/.cache/subkv."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """What the user would miss, a history of messages for one: $XDG_STATE_HOME/subkv or ~/.local/state/subkv."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def package_folders(name: str) -> list[Path]:
    """Where the package may have a folder; an editable install has two places, the checkout and what was built."""
    spec = importlib.util.find_spec("subkv")
    return [Path(place) / name for place in (spec.submodule_search_locations or [] if spec else [])]
