"""Paths of sidecars: beside the model, or in the store in the user's cache folder, keyed by the model's content.

The key is a digest of the model's content (Gguf.content), so renamed, linked, split and merged copies share an entry.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path

from subkv.base.errors import CacheError, SubkvError, is_unavailable, system_reason
from subkv.base.folders import cache_folder
from subkv.format.layout import Layout
from subkv.native.gguf import CONTENT_KEY, Gguf

_DIGITS = 12  # digits of the digest in file names; the file contains the whole digest


def stem(model: Path) -> str:
    """A model's file name without `.gguf` and without the number of a split model's file."""
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", model.name)


def sidecar_path(model: Path) -> Path:
    """The path of --sidecar: M.gguf -> M.subkv-sidecar.gguf; M-00001-of-00002.gguf as M.gguf."""
    return model.with_name(f"{stem(model)}.subkv-sidecar.gguf")


def folder() -> Path:
    """The store: sidecars, calibrations and unfinished work. It may not exist yet."""
    return cache_folder() / "sidecars"


def why_unreadable() -> str:
    """The reason why the store cannot be read; "" if it can, or does not exist yet."""
    try:
        with os.scandir(folder()):
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"cannot read {folder()}: {system_reason(error)}"
    except SubkvError as error:
        return str(error)


@dataclass(frozen=True)
class Entry:
    """A model's files in the store. content: digest of the model; name: readable part of file names."""

    content: str
    name: str

    def named(self, ending: str) -> Path:
        """The model's file with this ending: the existing one, else a path with the model's name.

        Only the digest is compared, so a renamed model finds its file under the old name.
        """
        tail = f"-{self.content[:_DIGITS]}{ending}"
        existing = sorted(folder().glob(f"*{glob.escape(tail)}"))
        return existing[0] if existing else folder() / f"{self.name}{tail}"

    def work(self, ending: str) -> Path:
        """A file of unfinished work, independent of the model's name."""
        return folder() / f"{self.content[:_DIGITS]}{ending}"

    @property
    def sidecar(self) -> Path:
        """The sidecar of a calibration."""
        return self.named(".gguf")

    @property
    def lock(self) -> Path:
        """Lock file, held while the model is prepared."""
        return self.work(".lock")

    def prepare(self) -> None:
        """Create the store. Raises SubkvError about XDG_CACHE_HOME."""
        try:
            folder().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SubkvError("XDG_CACHE_HOME", f"cannot create {folder()}: {system_reason(error)}") from error
        problem = why_unreadable()
        if problem:
            raise SubkvError("XDG_CACHE_HOME", problem)


def entry(model: Gguf) -> Entry:
    """The entry of a model. Raises ModelFileError about `model`."""
    return Entry(model.content(), re.sub(r"[^\w.+-]", "_", stem(model.path))[:100])


def check(path: Path, content: str) -> None:
    """Reject a sidecar of another model or version, or a damaged one. Raises CacheError about `bases`."""
    remedy = "convert the model again, or ignore it with --no-sidecar"
    try:
        with Gguf(path, split=False) as file, Layout(path):
            digest = file.get(CONTENT_KEY)
    except SubkvError as error:
        if is_unavailable(error):
            raise CacheError("bases", f"{error.reason}; make it readable, or ignore it with --no-sidecar") from error
        problem = error.reason.split("; convert ")[0]  # without the remedy for other files
        reason = f"expected a sidecar of this version in {path}, found none: {problem}; {remedy}"
        raise CacheError("bases", reason) from error
    if digest != content:
        other = "that of another one" if digest else "one without the digest of its model"
        raise CacheError("bases", f"expected the sidecar of this model in {path}, found {other}; {remedy}")
