"""The engine on bases from the weights alone: close to exact caches where it can, refused with its reason elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import numpy.typing as npt
from each import each
from opening import last_logits, opened, prompt

from subkv.format.window import Window
from subkv.plan.pipeline import Options

Models = Callable[..., Path]
PROMPTS = [prompt(180, seed) for seed in range(6)]  # of random weights' answers to one, errors differ threefold


def options(kv_bits: float) -> Options:
    return Options(kv_bits=kv_bits, window=Window(4, 16), bpe_context=1 << 20)


def answers(model: Path, **cache: Any) -> list[npt.NDArray[np.float32]]:
    """The last logits of every prompt."""
    found = []
    with opened(model, **cache) as llm:
        assert llm.kv_stats().type_k == ("subkv" if "bases" in cache else "f16")
        for tokens in PROMPTS:
            llm.reset()
            found.append(last_logits(llm, tokens))
    return found


@each("arch", ["llama", "qwen2", "gemma2", "gemma3n", "gemma4", "deepseek2", "bloom", "gpt2", "gpt-oss"])
def test_answers_as_an_exact_cache_does(tiny_model: Models, tmp_path: Path, arch: str) -> None:
    """Bits make the difference, and nothing else: an error falls by some 4 with each, here by 9 bits for 4.75."""
    model = tiny_model(arch)
    exact = answers(model, kv_cache="f16")
    errors = []
    for kv_bits in (4.75, 9.0):
        derived_numpy.sidecar(model, tmp_path / "bases.gguf", options(kv_bits))
        found = answers(model, bases=tmp_path / "bases.gguf")
        errors.append(np.mean([np.std(f - e) / np.std(e) for f, e in zip(found, exact, strict=True)]))
    assert errors[1] < 0.025
    assert errors[0] < 0.4
    assert errors[1] < 0.2 * errors[0]
