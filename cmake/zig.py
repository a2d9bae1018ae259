"""zig as a cross compiler for CMake: `python cmake/zig.py TARGET FOLDER` writes FOLDER/cc, c++, ar and ranlib.

CMake needs a single program as compiler. zig selects ARM processors by -mcpu and rejects the -march of ggml's variants.
It cannot link bundles of macOS, so libraries replace them, which dlopen also loads. Needs the package ziglang.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

CPUS = {"-march=armv8.2-a+dotprod": "-mcpu=apple_m1", "-march=armv8.6-a+dotprod+i8mm": "-mcpu=apple_m2"}
"""Flags of the macOS variants of ggml's CPU backend."""


def write(target: str, folder: Path) -> None:
    """Write programs that run this file, for a target of zig such as aarch64-macos."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("ziglang: expected the package, found none; pip install ziglang")
    zig = Path(spec.origin).parent / "zig"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cc", "c++", "ar", "ranlib"):
        program = folder / name  # -I: ignore the build's PYTHONPATH
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -I "{Path(__file__).resolve()}" "{zig}" {name} {target} "$@"\n'
        )
        program.chmod(0o755)


def run(zig: str, name: str, target: str, *arguments: str) -> None:
    """Replace this process by zig."""
    words = list(arguments)
    if name in ("cc", "c++"):
        words = ["-target", target, *(CPUS.get(word, "-dynamiclib" if word == "-bundle" else word) for word in words)]
    os.execv(zig, [zig, name, *words])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(sys.argv[1], Path(sys.argv[2]))
    else:
        run(*sys.argv[1:])
