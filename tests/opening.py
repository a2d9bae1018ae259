"""Helpers of the tests of subkv.Llama."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.engine.llama import Llama

N_CTX = 256


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[Llama]:
    llm = Llama(path, **{"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options})
    try:
        yield llm
    finally:
        llm.close()


def last_logits(llm: Llama, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits after evaluating `tokens` after the context's tokens."""
    llm.eval(tokens)
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()


def prompt(n: int, seed: int = 0) -> list[int]:
    return [10 + (7 * i + i * i + 13 * seed * (i + 1)) % 200 for i in range(n)]
