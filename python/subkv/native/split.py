"""Models split into several GGUF files, under llama.cpp's names: NAME-00001-of-00003.gguf, …"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

NUMBER, COUNT = "split.no", "split.count"  # keys of every file, u16; numbers count from 0
_ROOM = 4096  # bytes of the longest path


def split_files(path: Path, read: Callable[[Path], tuple[int, int]]) -> list[Path]:
    """All files of the model whose first file is `path`, in order; only itself for a model of one file.

    read: NUMBER and COUNT of a GGUF, (0, 1) for a file without them; asked once per file; its errors pass through.
    Raises ValueError, with a reason to follow the name of a flag, for a later file, a missing or foreign one, and a
    name that is not llama.cpp's.
    """
    from subkv.native.binding import C

    number, count = read(path)
    if count <= 1:
        return [path]
    buffer = ctypes.create_string_buffer(_ROOM)
    if not C.llama_split_prefix(buffer, _ROOM, os.fsencode(path), number, count):
        raise ValueError(
            f"expected a name that ends in -{number + 1:05d}-of-{count:05d}.gguf, since the model is split into "
            f"{count} files, found {path}"
        )
    prefix = buffer.value
    files = []
    for i in range(count):
        C.llama_split_path(buffer, _ROOM, prefix, i, count)
        files.append(Path(os.fsdecode(buffer.value)))
    if number:
        raise ValueError(f"expected the first file of a split model, {files[0]}, found file {number + 1}: {path}")
    for i, file in enumerate(files[1:], 1):
        if not file.is_file():
            raise ValueError(f"expected all {count} files of a split model, found no {file}")
        found = read(file)
        if found != (i, count):
            raise ValueError(
                f"expected file {i + 1} of {count} of a split model, found file {found[0] + 1} of {found[1]}: {file}"
            )
    return files
