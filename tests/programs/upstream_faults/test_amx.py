"""Quantized weights on processors with AMX, after other code on the thread has released the tiles."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny

from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model

CPUINFO = Path("/proc/cpuinfo")


@pytest.fixture
def release(tmp_path: Path) -> ctypes.CDLL:
    """A function that releases the tiles, as other libraries do after their products."""
    if not CPUINFO.is_file() or "amx_int8" not in CPUINFO.read_text():
        pytest.skip("AMX: this processor has none")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("AMX: no C compiler")
    source = tmp_path / "release.c"
    source.write_text('void release(void) { __asm__ volatile("tilerelease"); }\n')
    library = tmp_path / "release.so"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def test_tiles_are_configured_for_every_product(release: ctypes.CDLL, tmp_path: Path) -> None:
    path = tiny.build(tmp_path / "q.gguf", "llama", dtype="q4_0", n_embd=128, n_ff=256)
    tokens = list(range(3, 67))
    found = []
    choice = parse_cache("f16", path)
    with Model(str(path)) as model:
        context = model.context(choice, ContextOptions(64, 64, 64, 1))
        for _ in range(2):
            context.clear()
            context.decode(tokens, 0, len(tokens) - 1)
            found.append(context.logits(1).copy())
            release.release()
        context.close()
    np.testing.assert_array_equal(*found)
