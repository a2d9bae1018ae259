"""Preparing and measuring a model of every architecture family: each step works, or names the reason and an
alternative.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import virtual
from click.testing import CliRunner
from gguf import GGUFReader
from test_stock import STOCK, digests

from converter.calibrate import main as calibrate
from converter.cli import main as convert
from converter.sensitivity import main as sensitivity
from research.evaluate import main as evaluate
from runtime.inspect import main as inspect
from runtime.perplexity import main as perplexity
from subkv.engine.cache import choose_cache
from subkv.format import metadata
from subkv.plan import mla

FAMILIES = {  # layers with bases
    "lfm2": 1,  # hybrid
    "qwen35": 1,  # hybrid with M-RoPE
    "falcon-h1": 2,  # both in every layer
    "qwen2vl": 2,  # M-RoPE
    "gemma4": 1,  # shared rows beside a sliding window
    "deepseek2": 2,  # latent attention
    "kimi-linear": 1,  # hybrid with latent attention
    "deepseek32": 2,  # latent attention over selected cells
}
WHOLE_BLOCKS = {  # q4_0, which predictions are corrected with, takes no sliding layers with heads of 16
    f"{name}_swa": 32 for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
}
WHOLE_ROWS = {  # of latent attention
    "attention.key_length": 64 + 32,
    "attention.key_length_mla": 64,
    "rope.dimension_count": 32,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["the", "of", "and", "in", "to", "was", "that", "them"]
    path.write_text(" ".join(random.Random(3).choices(words, k=2500)))
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def prepared(
    request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path, Path]:
    """Architecture, model, calibration, sidecar."""
    folder = tmp_path_factory.mktemp("steps")
    model = virtual.write(folder / "model.gguf", request.param, context_length=8192, **WHOLE_BLOCKS)
    bases, sidecar = folder / "calib.safetensors", folder / "bases.gguf"
    run(calibrate, "-m", model, "-f", text, "-o", bases, "-c", 256, "-t", 1)
    run(convert, "--bases", bases, "--sidecar", model, "-o", sidecar, "--kv-bits", 6)
    return request.param, model, bases, sidecar


def run(program: click.Command, *arguments: object, code: int = 0) -> str:
    """The command's output."""
    result = CliRunner().invoke(program, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_inspect(prepared: tuple[str, Path, Path, Path]) -> None:
    arch, model, _, sidecar = prepared
    layout = json.loads(run(inspect, sidecar, "-o", "json"))
    assert (layout["arch"], len(layout["layers"])) == (arch, FAMILIES[arch])
    run(inspect, sidecar, "--bands")


def test_caches_are_compared_in_the_engine(prepared: tuple[str, Path, Path, Path], text: Path) -> None:
    _, model, _, sidecar = prepared
    caches = f"f16,subkv,subkv:{sidecar}"
    out = run(perplexity, "-m", model, "-f", text, "-c", 256, "--chunks", 1, "-t", 1, "-o", "json", "--compare", caches)
    rows = json.loads(out[out.index("[\n") :])
    klds = {row["name"]: row["mean_kld"] for row in rows}
    assert all(math.isfinite(kld) and kld < 1.0 for kld in klds.values() if kld is not None), klds
    assert len(klds) == 4 and any(kld is not None and kld > 0.0 for kld in klds.values())


def test_sensitivities(prepared: tuple[str, Path, Path, Path], text: Path, tmp_path: Path) -> None:
    _, model, bases, _ = prepared
    out = tmp_path / "sensed.safetensors"
    command = ("-m", model, "--bases", bases, "-f", text, "-o", out, "-c", 448, "-t", 1, "--chunks", 1)
    assert "sensitivities of" in run(sensitivity, *command)
    run(convert, "--bases", out, "--sidecar", model, "-o", tmp_path / "sensed.gguf", "--kv-bits", 6)


def test_evaluate_names_the_command_for_this_model(
    prepared: tuple[str, Path, Path, Path], text: Path, tiny_model: Callable[..., Path]
) -> None:
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "accelerate")):
        pytest.skip("extra torch is not installed")
    arch, model, bases, _ = prepared
    out = run(evaluate, "-m", model, "--bases", bases, "-f", text, "-c", 256, "-t", 1, code=1)
    assert out.splitlines()[-1].startswith("-m: ") and "`subkv perplexity --compare f16,q8_0,subkv`" in out, out


def test_a_converted_copy_is_the_model_to_stock(prepared: tuple[str, Path, Path, Path], tmp_path: Path) -> None:
    """Its tensors are the same bytes, and the stock llama.cpp computes the same with them."""
    _, model, bases, _ = prepared
    copy = tmp_path / "copy.gguf"
    run(convert, "--bases", bases, model, "-o", copy, "--kv-bits", 6)
    of_copy, of_model = ({t.name: t.data.tobytes() for t in GGUFReader(path).tensors} for path in (copy, model))
    assert of_copy == of_model
    (tmp_path / "model.gguf").symlink_to(model)
    if not STOCK.is_dir():
        pytest.skip(f"stock libllama: {STOCK} is missing (build with -DSUBKV_STOCK=ON)")
    by_file = digests(STOCK, tmp_path)
    for kind in (1, 8):
        assert by_file[f"copy {kind}"] == by_file[f"model {kind}"]


@pytest.mark.parametrize("arch", FAMILIES)
def test_one_command_prepares_a_model(arch: str, tmp_path: Path, cache_home: Path) -> None:
    """Calibration, sensitivities, correction and plan; the resulting bases are found automatically."""
    keys = WHOLE_BLOCKS | (WHOLE_ROWS if arch in mla.SUPPORTED else {})
    model = virtual.write(tmp_path / "model.gguf", arch, context_length=8192, **keys)
    output = run(convert, model, "-c", 1024, "--chunks", 4, "-t", 1)
    # llama.cpp looks at a length of values that files of this one need not have, and that its rows have not
    assert ("own cache types are not corrected: V cache type q4_0" in output) == (arch == "kimi-linear")
    assert "no sensitivities" not in output and "predicted KLD: " in output
    # of rows of random weights that long the held-out ones are not like the others
    none = "4.5 by default, because no smaller budget is predicted to be as good as q8_0"
    assert (
        none if arch == "kimi-linear" else "by default, the smallest whose predicted KLD is at most q8_0's"
    ) in output
    sidecar = choose_cache(model).layout
    assert sidecar is not None and f"wrote {sidecar}" in output and sidecar.is_relative_to(cache_home)
    assert len(metadata.read(sidecar)["layers"]) == FAMILIES[arch]
