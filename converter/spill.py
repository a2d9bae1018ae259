"""Large data that is needed again much later: in a file without a name, or without a folder in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

import numpy as np

from subkv.base.errors import SubkvError
from subkv.format.arrays import F32


class Spill:
    """Bytes and an array of float32. Nobody else sees the file; it is removed with this object."""

    def __init__(self, folder: Path | None, raw: bytearray, array: F32) -> None:
        """Raises SubkvError about `output` where `folder` takes no more."""
        self._kept: tuple[bytearray, F32] | None = None
        self._size, self._shape = len(raw), array.shape
        if folder is None:
            self._kept = raw, array
            return
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  for as long as this object
            self._file.write(raw)
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError as error:
            raise SubkvError("output", f"cannot write to {folder}: {error.strerror or error}") from error

    def raw(self) -> bytearray:
        """The bytes, read anew from the file."""
        if self._kept is not None:
            return self._kept[0]
        raw = bytearray(self._size)
        self._read(raw, 0)
        return raw

    def array(self) -> F32:
        """The array, read anew from the file."""
        if self._kept is not None:
            return self._kept[1]
        array = np.empty(self._shape, dtype=np.float32)
        self._read(array.data.cast("B"), self._size)
        return array

    def _read(self, to: bytearray | memoryview, first: int) -> None:
        self._file.seek(first)
        self._file.readinto(to)  # type: ignore[attr-defined]
