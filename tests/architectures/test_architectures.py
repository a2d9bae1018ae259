"""Every architecture of the pinned llama.cpp keeps the guarantees or is refused, as docs/architectures.md lists."""

from __future__ import annotations

import math
import random
from pathlib import Path

import derived_numpy
import pytest
import report
import virtual
from click.testing import CliRunner
from families import FAMILIES, NEXTN, NOT_BUILT
from guarantees import examine

from converter.calibrate import main as calibrate
from converter.cli import main as convert
from converter.sensitivity_stage import compare
from subkv.engine.cache import choose_cache
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest
from subkv.format import metadata
from subkv.plan import mla
from subkv.plan.pipeline import Options

ARCHITECTURES = report.architectures()
ROWS = report.written()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture_matches_the_page(arch: str, tmp_path: Path) -> None:
    support = examine(arch, tmp_path)
    assert report.row(arch, support) in ROWS, "python tests/architectures/report.py writes the page anew"
    if support.status == "refused":
        assert arch in support.reason and "-ctk f16" in support.reason
    if support.status == "supported":
        assert support.n_layer_coded >= 1
        # else wrong attention would not be noticed
        assert support.reach > 4 * support.floor and support.coarse > 4 * support.floor, support
        assert support.distances["equals f16"] < 3 * support.floor, support
        apart = {guarantee: d for guarantee, d in support.distances.items() if not math.isnan(d)}
        assert max(apart.values()) < 3 * support.floor, support


def test_page_is_up_to_date() -> None:
    assert [arch for arch, _, _ in ROWS] == ARCHITECTURES
    assert report.PAGE.read_text("utf-8") == report.page(ROWS)
    assert (FAMILIES | NOT_BUILT).keys() <= set(ARCHITECTURES)
    with_cache = [group for _, group, _ in ROWS if group not in ("no cache", "not built")]
    assert sum(map(report.is_supported, with_cache)) >= 0.9 * len(with_cache)
    assert all(note for _, group, note in ROWS if not report.is_supported(group)), "every refusal has a reason"


def test_layers_that_only_predict_further_tokens_are_counted(tmp_path: Path) -> None:
    """Their layers count in the file but not in llama.cpp; a calibration describes the file."""
    prepare(virtual.write(tmp_path / "model.gguf", "mimo2", context_length=8192), tmp_path)


@pytest.mark.parametrize("arch", mla.SUPPORTED)
def test_latent_attention_is_prepared(arch: str, tmp_path: Path) -> None:
    """Calibrated and converted, and from the weights alone; DeepSeek's as in GLM-4.7-Flash, with a drafting layer."""
    drafting = NEXTN if arch == "deepseek2" else {}
    model = virtual.write(tmp_path / "model.gguf", arch, context_length=8192, **drafting)
    sidecars = [metadata.read(prepare(model, tmp_path))]
    derived_numpy.sidecar(model, tmp_path / "weights.gguf", Options(kv_bits=6.0))
    sidecars.append(metadata.read(tmp_path / "weights.gguf"))
    for described in sidecars:
        n = 1 if arch in ("kimi-linear", "kimi-k3", "bailingmoe3", "dots3note", "glm5-next") else 2
        d_k = 64 if arch == "glm5-next" else 80  # the latent alone: nothing of its keys turns
        assert [(layer["d_k"], layer["d_v"], layer["v"]) for layer in described["layers"]] == [(d_k, 64, [])] * n
    names = ("bases.gguf", "weights.gguf")
    caches = [choose_cache(model, CacheRequest("subkv", bases=tmp_path / name)) for name in names]
    tokens = random.Random(5).choices(range(40, 130), k=320)
    with Model(model) as opened:
        assert all(0.0 <= kld < 0.5 for kld in compare(opened, caches, tokens, 1))


def prepare(model: Path, tmp_path: Path) -> Path:
    """Calibrates and converts; the sidecar."""
    text, bases = tmp_path / "text.txt", tmp_path / "calib.safetensors"
    text.write_text(" ".join(random.Random(3).choices(["the", "of", "and", "in", "to", "was", "that", "them"], k=2000)))
    result = CliRunner().invoke(
        calibrate, ["-m", str(model), "-f", str(text), "-o", str(bases), "-c", "256", "-t", "1"]
    )
    assert result.exit_code == 0, result.output
    out = tmp_path / "bases.gguf"
    result = CliRunner().invoke(convert, ["--bases", str(bases), "--sidecar", str(model), "-o", str(out)])
    assert result.exit_code == 0, result.output
    return out
