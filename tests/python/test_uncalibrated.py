"""The engine on bases from the weights alone: close to exact caches where it can, refused with its reason elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from opening import last_logits, opened, prompt

from subkv.base.errors import CacheError
from subkv.format.window import Window
from subkv.plan import datafree
from subkv.plan.pipeline import Options

Models = Callable[..., Path]
TOKENS = prompt(180)


def options(kv_bits: float) -> Options:
    return Options(kv_bits=kv_bits, window=Window(4, 16), bpe_context=1 << 20)


@pytest.mark.parametrize(
    "arch", ["llama", "qwen2", "gemma2", "gemma3n", "gemma4", "deepseek2", "bloom", "gpt2", "gpt-oss"]
)
def test_answers_as_an_exact_cache_does(tiny_model: Models, tmp_path: Path, arch: str) -> None:
    """Bits make the difference, and nothing else: an error falls by some 4 with each, here by 9 bits for 4.75."""
    model = tiny_model(arch)
    with opened(model, kv_cache="f16") as llm:
        exact = last_logits(llm, TOKENS)
    errors = []
    for kv_bits in (4.75, 9.0):
        datafree.sidecar(model, tmp_path / "bases.gguf", options(kv_bits))
        with opened(model, bases=tmp_path / "bases.gguf") as llm:
            errors.append(float(np.std(last_logits(llm, TOKENS) - exact) / np.std(exact)))
            assert llm.kv_stats().type_k == "subkv"
    assert errors[1] < 0.03
    assert errors[0] < 0.4
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize(("arch", "why"), [("t5", "KQ bias")])
def test_refused_by_the_engine(tiny_model: Models, tmp_path: Path, arch: str, why: str) -> None:
    datafree.sidecar(tiny_model(arch), tmp_path / "bases.gguf")
    with pytest.raises(CacheError, match=f"cannot hold its K/V cache because .*{why}"):
        opened(tiny_model(arch), bases=tmp_path / "bases.gguf").__enter__()
