"""Tiny models with bases that are exact in half precision, for the target `state`: a folder of model.gguf and
layout.gguf of each.

    python tests/fuzz/state_models.py FOLDER    writes FOLDER/llama, FOLDER/gemma2, FOLDER/lfm2
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "runtime")]
import engine  # noqa: E402
import tiny  # noqa: E402
from test_variants import exact_layout  # noqa: E402

ARCHS = ("llama", "gemma2", "lfm2")  # one cache, a sliding half beside it, recurrent state beside it


def write(folder: Path, arch: str) -> Path:
    """Returns `folder`."""
    folder.mkdir(parents=True)
    model = engine.Model(tiny.build(folder / "model.gguf", arch, n_head_kv=1, n_head=1))
    exact_layout(model, arch, folder / "layout.gguf")
    model.free()
    return folder


if __name__ == "__main__":
    for name in ARCHS:
        write(Path(sys.argv[1]) / name, name)
