"""Where a model's sidecar is stored: beside the model, or in the user's cache folder under the model's content.

A model is known by its content (Gguf.content), never by its path or times: renamed, linked, split and merged copies
share an entry.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import CacheError, SubkvError
from subkv.base.folders import cache_folder
from subkv.format.layout import Layout
from subkv.native.gguf import CONTENT_KEY, Gguf

_DIGITS = 12  # of the digest in a file's name; the whole one is in the file


def stem(model: Path) -> str:
    """The name of a model without `.gguf` and without the number of a split model's file."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", model.name)


def sidecar_path(model: Path) -> Path:
    """Where --sidecar writes: M.gguf -> M.subkv-sidecar.gguf; M-00001-of-00002.gguf as M.gguf."""
    return model.with_name(f"{stem(model)}.subkv-sidecar.gguf")


def folder() -> Path:
    """The store: sidecars, and calibrations to continue or to plan anew from. It may not exist yet."""
    return cache_folder() / "sidecars"


def why_unreadable() -> str:
    """Why nothing can be looked up in the store; "" where it can, or where there is none yet."""
    try:
        with os.scandir(folder()):
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"cannot read {folder()}: {error.strerror or error}"
    except SubkvError as error:
        return str(error)


@dataclass(frozen=True)
class Entry:
    """A model's place in the store. content: its digest; name: its own, for people."""

    content: str
    name: str

    def named(self, ending: str) -> Path:
        """The model's file with this ending: the one there is, else one named as the model.

        Only the digest counts: a model that was renamed finds its file under the old name.
        """
        tail = f"-{self.content[:_DIGITS]}{ending}"
        found = sorted(folder().glob(f"*{glob.escape(tail)}"))
        return found[0] if found else folder() / f"{self.name}{tail}"

    def work(self, ending: str) -> Path:
        """A file of work on the model, whatever its name is."""
        return folder() / f"{self.content[:_DIGITS]}{ending}"

    @property
    def sidecar(self) -> Path:
        """That of a calibration."""
        return self.named(".gguf")

    @property
    def lock(self) -> Path:
        """Held by whoever prepares the model."""
        return self.work(".lock")

    def prepare(self) -> None:
        """Make the store. Raises SubkvError about XDG_CACHE_HOME, which moves it."""
        try:
            folder().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SubkvError("XDG_CACHE_HOME", f"cannot create {folder()}: {error.strerror or error}") from error
        why = why_unreadable()
        if why:
            raise SubkvError("XDG_CACHE_HOME", why)


def entry(model: Gguf) -> Entry:
    """Raises ModelFileError about `model`."""
    return Entry(model.content(), re.sub(r"[^\w.+-]", "_", stem(model.path))[:100])


def check(path: Path, content: str) -> None:
    """Refuse a sidecar that was not made for the model of this content, is damaged or of another version.

    Raises CacheError about `bases`.
    """
    remedy = "convert the model again, or ignore it with --no-sidecar"
    try:
        with Layout(path), Gguf(path, split=False) as file:
            found = file.get(CONTENT_KEY)
    except SubkvError as error:
        why = error.reason.split("; convert ")[0]  # the remedy for a file that is not a sidecar
        reason = f"expected a sidecar of this version in {path}, found none: {why}; {remedy}"
        raise CacheError("bases", reason) from error
    if found != content:
        what = "that of another one" if found else "one that does not say which model it is for"
        raise CacheError("bases", f"expected the sidecar of this model in {path}, found {what}; {remedy}")
