"""A model's files in the store, the folder of prepared bases, by the model's content: renamed copies share them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import SubkvError, system_reason
from subkv.base.files import check_owner
from subkv.native.bases import model_content, stored_path

_DIGITS = 12  # of the content, in names of unfinished work


@dataclass(frozen=True)
class Entry:
    """content: digest of the model; sidecar: of a calibration."""

    content: str
    sidecar: Path

    def work(self, ending: str) -> Path:
        """A file of unfinished work, independent of the model's name."""
        return self.sidecar.with_name(f"{self.content[:_DIGITS]}{ending}")

    @property
    def lock(self) -> Path:
        """Lock file, held while the model is prepared."""
        return self.work(".lock")

    def prepare(self) -> None:
        """Create the store. Raises SubkvError about XDG_CACHE_HOME, also if another user can write to it."""
        prepare(self.sidecar.parent)


def prepare(folder: Path) -> None:
    """Create the store's folder. Raises SubkvError about XDG_CACHE_HOME, also if another user can write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError as error:
        what = "read" if os.path.isdir(folder) else "create"
        raise SubkvError("XDG_CACHE_HOME", f"cannot {what} {folder}: {system_reason(error)}") from error
    check_owner(folder, "XDG_CACHE_HOME")


def entry(model: Path) -> Entry:
    """The entry of a model. Raises ModelFileError about `model`, SubkvError about XDG_CACHE_HOME."""
    content = model_content(model)
    return Entry(content, stored_path(model, content))
