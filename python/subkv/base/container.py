"""Files that hold a sequence: a JSON head and the cells, in a ZIP whose checksums tell damage."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

from subkv.base.errors import StateError

HEAD, CELLS = "head.json", "cells"


def write(path: Path, head: dict[str, Any], cells: bytes, key: str) -> int:
    """Write both, completely or not at all; returns the size in bytes. Raises StateError that starts with `key`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "x") as archive:
            archive.writestr(HEAD, json.dumps(head))
            archive.writestr(CELLS, cells)
        size = temporary.stat().st_size
        os.replace(temporary, path)
    except OSError as error:
        raise StateError(key, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return size


def read(path: Path, key: str, writer: str) -> tuple[dict[str, Any], bytes]:
    """Head and cells of a file that write() made. Raises StateError that starts with `key` and names the writer."""
    try:
        with zipfile.ZipFile(path) as archive:
            head = json.loads(archive.read(HEAD))
            cells = archive.read(CELLS)
        if not isinstance(head, dict):
            raise ValueError("its head is no object")
    except OSError as error:
        raise StateError(key, f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise StateError(
            key, f"expected a file written by {writer}, found something else in {path} ({error})"
        ) from error
    return head, cells


def check(head: dict[str, Any], expected: dict[str, Any], key: str, path: Path) -> None:
    """Refuse a head that differs from what this context needs. Raises StateError."""
    for name, value in expected.items():
        if head.get(name) != value:
            raise StateError(key, f"{name}: expected {value}, found {head.get(name)} in {path}")
