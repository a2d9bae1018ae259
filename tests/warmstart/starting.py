"""What the tests of warm starts share: models opened for them, and untrained adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.warmstart.embedding import embedder
from runtime.warmstart.frame import Frame
from runtime.warmstart.planting import Planting
from runtime.warmstart.slots import Plan
from runtime.warmstart.start import WarmStart
from runtime.warmstart.summaries import Library
from runtime.warmstart.trained import HeadShape, Trained
from subkv.engine.llama import Llama

N_CTX = 256
PLAN = Plan(n_slots=8, n_sink=2, n_last=3)


def prompt(n: int, seed: int = 0) -> list[int]:
    return [10 + (7 * i + i * i + 13 * seed * (i + 1)) % 200 for i in range(n)]


def untrained(llm: Llama, planting: Planting, plan: Plan = PLAN, **changes: Any) -> Trained:
    """Slots are pooled tokens as they are; embeddings are centred at that of one token."""
    embedding = embedder("tokens", Path(llm.model_path))
    shapes = [HeadShape(layer.n_head_kv, layer.d_k, layer.d_v) for layer in planting.planter.layers()]
    frame = Frame.of(Path(llm.model_path))
    made = Trained.untrained(llm.identity()["model"], plan, shapes, frame, "tokens", 0.5 * embedding.embed([5]))
    return Trained(**{**vars(made), **changes})


def library(trained: Trained, folder: Path, **more: Any) -> Library:
    return Library(folder, trained.identity, trained.digest, trained.centre, **more)


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[Llama, Planting]]:
    planting = Planting()
    try:
        with planting.attach():
            llm = Llama(path, **{"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options})
        with llm:
            planting.bind(llm.ctx, llm._batch.batch, llm.cache_choice.coded)
            yield llm, planting
    finally:
        planting.close()


@contextlib.contextmanager
def warm(path: Path, folder: Path, plan: Plan = PLAN, guard: Any = None, **options: Any) -> Iterator[WarmStart]:
    """Warm starts of any prompt that has a neighbour; options: of WarmStart, or else of Llama."""
    own = {key: options.pop(key) for key in ("mode", "threshold", "max_kl", "n_warm", "embed") if key in options}
    with opened(path, **options) as (llm, planting):
        trained = untrained(llm, planting, plan, guard=guard or {})
        with WarmStart(llm, planting, trained, library(trained, folder), **{"threshold": -1.0} | own) as made:
            yield made


def remember(start: WarmStart, tokens: list[int]) -> None:
    """Put a prompt in the library."""
    start.llm.reset()
    with start.remembering(tokens):
        start.llm.eval(tokens)
    assert start.problem == ""


def logits(llm: Llama) -> Any:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()


def take(tokens: Iterator[int], n: int) -> list[int]:
    found = [next(tokens) for _ in range(n)]
    tokens.close()  # type: ignore[attr-defined]
    return found


def cold(llm: Llama, tokens: list[int], n: int) -> list[int]:
    """A greedy answer from an empty context."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    return take(llm.generate(tokens, temp=0.0), n)
