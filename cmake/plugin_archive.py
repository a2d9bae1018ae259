"""The archive of the plug-in: one file for a llama.cpp that others built, with its licence, a page and examples.

`python cmake/build_wheels.py --plugin --archive` builds a portable one.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from pathlib import Path

from plugin_wheel import ROOT, project

LIBRARY = "libggml-subkv.so"
TEXTS = ROOT / "cmake" / "archive"


def glibc_of(library: bytes) -> str:
    """The oldest glibc that has all symbols which a library needs."""
    return "2." + str(max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)))


def write(library: Path, folder: Path, processor: str) -> Path:
    """Write the archive into `folder`; returns its path. The same files give the same bytes.

    Raises OSError if the library is missing.
    """
    version, data = project()["version"], library.read_bytes()
    known = {"VERSION": version, "PLATFORM": f"Linux on {processor}", "GLIBC": glibc_of(data)}
    files = {LIBRARY: data} | {name: (ROOT / name).read_bytes() for name in project()["license-files"]}
    for path in TEXTS.iterdir():
        files[path.name] = re.sub("@([A-Z]+)@", lambda name: known[name[1]], path.read_text("utf-8")).encode()
    stem = f"subkv-plugin-{version}-linux-{processor}"
    out = folder / f"{stem}.tar.gz"
    with gzip.GzipFile(out, "wb", 9, mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(f"{stem}/{name}")  # of 1970, of root, readable by all
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return out
