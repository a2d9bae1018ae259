"""Files of every format version, in tests/format/versions. `python tests/format/versioned.py` writes the missing files
of today's versions. It never rewrites a file, because it belongs to a released version.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

FILES = Path(__file__).resolve().parent / "versions"
IDENTITY = bytes(range(32))
TOKENS = [7 * i % 251 for i in range(300)]
WINDOW = {"n_sink": 2, "n_recent": 8}
MOVED = [*range(120, 300), *range(120)]  # positions of TOKENS, by cell
TEXT = [3 * i % 97 for i in range(40)]  # of a state


def layers() -> Any:
    import writer

    return writer.random_layers(1, 1, 16, 16, ((8, 6), (8, 4)), ((8, 4),), seed=5)


def latent() -> Any:
    import engine

    return engine.latent_layers(((16, 6), (8, 4)), 24, 16, 1, seed=5)


def calibration() -> Any:
    from calib_synthetic import random_calibration

    return random_calibration(1, seed=5, samples=4, n_head=2, n_head_kv=1, d_k=16, d_v=16)


def state_of() -> bytes:
    """TEXT in a stock-shaped prompt's place: bytes that the store and the containers do not look into."""
    return np.random.default_rng(5).bytes(4096)


def make() -> None:
    sys.path[:0] = [str(FILES.parent.parent / "runtime"), str(FILES.parent), str(FILES.parent.parent)]
    import stores
    import writer

    from subkv.base.container import Container, write
    from subkv.format.calibration import write_calibration

    def model(path: Path) -> None:
        writer.write(path, writer.metadata(layers(), block_count=1))

    def latent_model(path: Path) -> None:
        writer.write(path, writer.metadata(latent(), block_count=1))

    def container(path: Path) -> None:
        write(path, Container({"identity": IDENTITY.hex()}, np.array(TOKENS, np.int32), state_of()))

    def store(state: bytes, path: Path) -> None:
        with stores.opened(path) as opened:
            assert opened.put(stores.Prompt(TOKENS, (state, b"")))

    makers = {
        "model-5.gguf.fixture": model,
        "model-5-latent.gguf.fixture": latent_model,
        "calibration-1-digest.safetensors": lambda path: write_calibration(path, calibration()),
        "container-1": container,
        "store-1": functools.partial(store, state_of()),
        "store-2": functools.partial(store, stores.state(TOKENS, 1, 8, order=MOVED)),
    }
    FILES.mkdir(exist_ok=True)
    for name, maker in makers.items():
        if not (FILES / name).exists():
            maker(FILES / name)


if __name__ == "__main__":
    make()
