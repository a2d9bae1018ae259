"""Models split into several GGUF files, named as in llama.cpp: NAME-00001-of-00003.gguf, …"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from subkv.base.errors import ModelFileError

NUMBER, COUNT = "split.no", "split.count"  # keys of every file, u16; numbers count from 0
_ROOM = 4096  # maximum bytes of a path


def split_files(path: Path, first: tuple[int, int], read: Callable[[Path], tuple[int, int]]) -> list[Path]:
    """All files of the model whose first file is `path`, in order; only `path` if the model is not split.

    first: NUMBER and COUNT of `path`, (0, 1) without these keys; read: reads both from another file. Raises
    ModelFileError if `path` is not the first file, a file is missing or of another model, or a name is not llama.cpp's.
    """
    number, count = first
    if count <= 1:
        return [path]
    from subkv.native.binding import C  # loads the native libraries: not for a --help

    buffer = ctypes.create_string_buffer(_ROOM)
    if not C.llama_split_prefix(buffer, _ROOM, os.fsencode(path), number, count):
        raise ModelFileError(
            "model",
            f"expected a name that ends in -{number + 1:05d}-of-{count:05d}.gguf, since the model is split into "
            f"{count} files, found {path}",
        )
    prefix = buffer.value
    files = []
    for i in range(count):
        C.llama_split_path(buffer, _ROOM, prefix, i, count)
        files.append(Path(os.fsdecode(buffer.value)))
    if number:
        raise ModelFileError(
            "model", f"expected the first file of a split model, {files[0]}, found file {number + 1}: {path}"
        )
    for i, file in enumerate(files[1:], 1):
        if not file.is_file():
            raise ModelFileError("model", f"expected all {count} files of a split model, found no {file}")
        actual = read(file)
        if actual != (i, count):
            raise ModelFileError(
                "model",
                f"expected file {i + 1} of {count} of a split model, found file {actual[0] + 1} of {actual[1]}: {file}",
            )
    return files
