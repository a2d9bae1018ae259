"""The second trained model, Gemma 3 270M: how its file is joined, and the float32 model and SubspaceCache on it."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from second_model import gemma3

from converter.scoring import mean_kld
from subkv.base.errors import SubkvError
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model

N, SCORED = 768, 256  # tokens: more than the sliding window of 512


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages of made-up parts."""
    data = [bytes([i]) * (gemma3.PIECE + i) for i in range(gemma3.N_PARTS)]
    for i, part in enumerate(data):
        folder = tmp_path / f"{gemma3.PACKAGE}_part{i + 1}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise ImportError('not imported')")
        (folder / f"{gemma3.NAME}.part0{i}").write_bytes(part)
    monkeypatch.setattr(gemma3, "SHA256", hashlib.sha256(b"".join(data)).hexdigest())

    def find(name: str) -> Any:
        folder = tmp_path / name
        return SimpleNamespace(submodule_search_locations=[str(folder)]) if folder.exists() else None

    monkeypatch.setattr(gemma3.importlib.util, "find_spec", find)
    return tmp_path


def test_parts_are_joined_once(packages: Path) -> None:
    path = gemma3.model_path(packages / "a" / "b")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == gemma3.SHA256
    before = path.stat()
    assert gemma3.model_path(path.parent) == path and path.stat().st_mtime_ns == before.st_mtime_ns
    path.write_bytes(b"damaged")
    assert gemma3.model_path(path.parent).stat().st_size == before.st_size
    assert [other.name for other in path.parent.iterdir()] == [gemma3.NAME]


def test_missing_and_damaged_parts_are_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = packages / f"{gemma3.PACKAGE}_part3" / "data" / f"{gemma3.NAME}.part02"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(SubkvError, match=f"^model: expected parts with the SHA-256 {gemma3.SHA256}, found "):
        gemma3.model_path(packages / "out")
    part.unlink()
    with pytest.raises(SubkvError, match=r"^model: expected a file of the model in package \w+_part3, found none; pip"):
        gemma3.model_path(packages / "out")
    assert not (packages / "out").exists()
    assert f"{gemma3.PACKAGE}_part1" not in sys.modules


@pytest.fixture(scope="module")
def tokens(gemma_model: Path) -> list[int]:
    """BOS, then prose of the running Python."""
    with Model(str(gemma_model)) as m:
        return list(m.tokenize("\n".join(pydoc_data.topics.topics.values())[: 8 * N].encode())[:N].tolist())


@pytest.fixture(scope="module")
def in_float32(gemma_model: Path) -> Any:
    """research.float32's model."""
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name, reason=f"second model: {name} is not installed (pip install '.[torch]')")
    from research.float32.reference import Reference

    return Reference(gemma_model, 2)


@pytest.mark.slow
@pytest.mark.quality
def test_the_float32_model_is_the_engines(gemma_model: Path, tokens: list[int], in_float32: Any) -> None:
    """Within twice the divergence of the engine with and without flash attention (0.005 and 0.007 nats)."""
    assert in_float32.layers == [5, 11, 17] and in_float32.d == 256
    text = "\n".join(pydoc_data.topics.topics.values())[:2000]
    with Model(str(gemma_model)) as m:
        assert [in_float32.bos, *in_float32.tokenize(text.encode())] == m.tokenize(text.encode()).tolist()
        theirs = []
        for flash in ("off", "on"):
            context = m.context(parse_cache("f16", str(gemma_model)), ContextOptions(N, N, N, 2, flash))
            theirs.append(context.logits(context.decode(tokens, 0, N - SCORED)).copy())
            context.close()
    ours = in_float32.logits(tokens, N - SCORED)
    noise = mean_kld(theirs[0], theirs[1])
    assert 0.0 < mean_kld(ours, theirs[0]) < 2.0 * noise < 0.03
    assert float((ours.argmax(-1) == theirs[0].argmax(-1)).mean()) > 0.9


@pytest.mark.slow
@pytest.mark.quality
def test_the_cache_of_transformers_codes_the_full_layers(gemma_model: Path, tokens: list[int], in_float32: Any) -> None:
    """From the weights alone, in parts, with drafts removed."""
    import torch
    import transformers

    from subkv import SubspaceCache

    how = {"gguf_file": gemma_model.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma_model.parent, **how).eval()
    cache = SubspaceCache.from_model(model)
    cache.activate_past_recording()
    ids, n_drafts = torch.tensor([tokens]), 40
    with torch.inference_mode():
        model(ids[:, : N - SCORED], past_key_values=cache, logits_to_keep=1)
        cache.crop(0)
        model(ids[:, :n_drafts], past_key_values=cache, logits_to_keep=1)
        cache.crop(-n_drafts)
        ours = model(ids[:, N - SCORED :], past_key_values=cache).logits[0].numpy()
    assert cache.kv_stats().n_layer_coded == 3
    assert mean_kld(in_float32.logits(tokens, N - SCORED), np.asarray(ours)) < 1e-3
