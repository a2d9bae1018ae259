"""The wheel of package subkv-plugin: the plug-in and its commands, without a llama.cpp.

Its Python files are those of package subkv, in a folder of their own, so that both packages can be installed together;
its libraries are those of a build for CPUs. `python cmake/build_wheels.py --plugin` builds portable ones.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
# Only functions of libsubkv that need no libllama are called.
LIBRARIES = ("libsubkv.so", "libggml-base.so", "libggml-subkv.so")
MODULES = ("python/subkv", *(f"runtime/{name}" for name in ("__init__.py", "cli.py", "options.py", "launch", "doctor")))
FOLDER, NAME = "subkv_plugin", "subkv-plugin"
SUMMARY = "a KV cache of calibrated, quantized coefficients for the llama.cpp that you have, as a plug-in"
NOT_NEEDED = "llama-cpp-python"


def project() -> dict[str, Any]:
    """The table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def _modules() -> Iterator[tuple[str, Path]]:
    """Path in the wheel and file of every Python file."""
    yield f"{FOLDER}/__init__.py", ROOT / "python" / "subkv_plugin.py"
    for name in MODULES:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield f"{FOLDER}/{file.relative_to(ROOT).as_posix().removeprefix('python/')}", file


def _metadata(of: dict[str, Any]) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {NAME}", f"Version: {of['version']}", f"Summary: {SUMMARY}"]
    lines += [f"License-Expression: {of['license']}", f"Requires-Python: {of['requires-python']}"]
    lines += [f"License-File: {name}" for name in of["license-files"]]
    lines += [f"Requires-Dist: {name}" for name in of["dependencies"] if not name.startswith(NOT_NEEDED)]
    return "\n".join(lines) + "\n"


def _entry(name: str) -> zipfile.ZipInfo:
    """Readable by all, and the same for the same files."""
    entry = zipfile.ZipInfo(name)  # of 1980
    entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
    return entry


def write(libraries: Path, folder: Path, platform: str) -> Path:
    """Write the wheel of a platform's tag into `folder`; returns its path. Raises OSError if a library is missing."""
    of = project()
    tag, stem = f"py3-none-{platform}", f"{FOLDER}-{of['version']}"
    info = f"{stem}.dist-info"
    files = {name: path.read_bytes() for name, path in _modules()}
    files |= {f"{FOLDER}/subkv/lib/{name}": (libraries / name).read_bytes() for name in LIBRARIES}
    files |= {f"{info}/licenses/{name}": (ROOT / name).read_bytes() for name in of["license-files"]}
    texts = {
        "METADATA": _metadata(of),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: subkv\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": f"[console_scripts]\n{NAME} = {FOLDER}:main\n",
    }
    files |= {f"{info}/{name}": text.encode() for name, text in texts.items()}
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    record = [f"{name},sha256={digests[name].decode().rstrip('=')},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(_entry(name), data)
    return wheel
