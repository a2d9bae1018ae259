"""Models split into several GGUF files, named as in llama.cpp: NAME-00001-of-00003.gguf, …"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from subkv.base.errors import ModelFileError

NUMBER, COUNT = "split.no", "split.count"  # keys of every file, u16; numbers count from 0


def _ending(number: int, count: int) -> str:
    return f"-{number + 1:05d}-of-{count:05d}.gguf"


def split_files(path: Path, first: tuple[int, int], read: Callable[[Path], tuple[int, int]]) -> list[Path]:
    """All files of the model whose first file is `path`, in order; only `path` if the model is not split.

    first: NUMBER and COUNT of `path`, (0, 1) without these keys; read: reads both from another file. Raises
    ModelFileError if `path` is not the first file, a file is missing or of another model, or a name is not llama.cpp's.
    """
    number, count = first
    if count <= 1:
        return [path]
    prefix = str(path).removesuffix(_ending(number, count))
    if prefix == str(path):
        raise ModelFileError(
            "model",
            f"expected a name that ends in {_ending(number, count)}, since the model is split into "
            f"{count} files, found {path}",
        )
    files = [Path(prefix + _ending(i, count)) for i in range(count)]
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
