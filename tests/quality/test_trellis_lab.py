"""python -m converter.trellis: rows of the same bytes and less error, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from programs import calibration, coded_model, text_file

from converter import trellis
from subkv.format import codec

__all__ = ["calibration", "coded_model", "text_file"]


@pytest.mark.parametrize("bands", [((64, 3),), ((8, 8), (16, 4), (40, 2)), ((8, 6), (24, 5), (32, 3))])
def test_less_error_in_the_same_bytes(bands: tuple[tuple[int, int], ...]) -> None:
    from subkv.plan.quantizer import best_step

    ratio = [best_step(bits) for _, bits in bands]
    c = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
    plain, coded = codec.round_trip(c, bands, ratio), trellis.round_trip(c, bands, ratio)
    assert ((coded - c) ** 2).sum() < 0.8 * ((plain - c) ** 2).sum()


def test_a_short_row_is_as_before() -> None:
    c = np.random.default_rng(0).standard_normal((20, 24)).astype(np.float32)
    bands = ((8, 8), (16, 2))
    assert np.array_equal(trellis.round_trip(c, bands, [0.01, 1.0]), codec.round_trip(c, bands, [0.01, 1.0]))
    with pytest.raises(ValueError, match="expected one of 16, 8, 6, 5, 4, 3, 2 bits, found 7"):
        trellis.round_trip(c, ((24, 7),), [1.0])
    with pytest.raises(ValueError, match="ratio"):
        trellis.round_trip(c, ((24, 3),), [-1.0])


@pytest.mark.slow
def test_the_program(tiny_model: Callable[..., Path], calibration: Path, text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `torch`")
    words = ["-m", tiny_model(), "--bases", calibration, "-f", text_file, "-c", 256, "--chunks", 1]
    words += ["--kv-bits", 4, "--bpe-context", 8192, "--stock", "", "-o", "json"]
    found = {}
    for module in ("converter.evaluate", "converter.trellis"):
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found[module] = json.loads(done.stdout)[0]
    plain, coded = found["converter.evaluate"], found["converter.trellis"]
    assert coded["bpe"] == pytest.approx(plain["bpe"], abs=0.1)
    assert 0 < coded["mean_kld"] != plain["mean_kld"]
