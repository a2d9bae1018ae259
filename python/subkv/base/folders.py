"""The user's folders by the XDG variables, and folders of the installed package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from subkv.base.errors import SubkvError

# Package subkv-plugin has our Python packages in a folder of its name, and no llama.cpp (cmake/plugin_wheel.py).
PLUGIN_ONLY = Path(__file__).parents[2].name == "subkv_plugin"
COMMAND = "subkv-plugin" if PLUGIN_ONLY else "subkv"


def home_folder() -> Path | None:
    """The user's home folder; None: a user without one, as of a service."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def expanded(path: str | os.PathLike[str], key: str) -> Path:
    """A path whose ~ is a home folder. Raises SubkvError about `key` if there is none, or if it is no path."""
    try:
        if "\0" not in os.fspath(path):
            return Path(path).expanduser()
    except TypeError:  # another object, or bytes
        pass
    except RuntimeError as error:
        raise SubkvError(key, f"expected a path, as there is no home folder for ~, found {os.fspath(path)}") from error
    raise SubkvError(key, f"expected the path of a folder or file, found {path!r:.60}")


def _user_folder(variable: str, default: str) -> Path:
    """Raises SubkvError about the variable if the user has no home folder."""
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / "subkv"
    home = home_folder()
    if home is None:
        value = repr(base) if base else "nothing"
        raise SubkvError(variable, f"expected an absolute path, as there is no home folder, found {value}")
    return home / default / "subkv"


def cache_folder() -> Path:
    """Folder for reproducible files: $XDG_CACHE_HOME/subkv or ~/.cache/subkv."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """Folder for the user's data, such as the chat history: $XDG_STATE_HOME/subkv or ~/.local/state/subkv."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def package_folders(name: str) -> list[Path]:
    """Possible paths of a part of the package. An editable install has two: in the checkout and in the build."""
    spec = importlib.util.find_spec("subkv")
    return [Path(location) / name for location in (spec.submodule_search_locations or [] if spec else [])]
