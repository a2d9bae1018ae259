"""Helpers of the tests of warm starts: models and untrained adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from research.warmstart.embedding import input_mean
from research.warmstart.frame import Frame
from research.warmstart.planting import Planting
from research.warmstart.pooled import Plan
from research.warmstart.start import WarmStart
from research.warmstart.summaries import Library
from research.warmstart.trained import TENSORS, HeadShape, LayerMaps, Trained
from subkv.engine.cache import choose_cache
from subkv.engine.llama import Llama
from subkv.native.bases import model_content

N_CTX = 256
PLAN = Plan(n_slots=8, n_sink=2, n_last=3)


def prompt(n: int, seed: int = 0) -> list[int]:
    return [10 + (7 * i + i * i + 13 * seed * (i + 1)) % 200 for i in range(n)]


def no_maps(shape: HeadShape, n_slots: int) -> LayerMaps:
    """Changes nothing; a prefix of zeros."""
    sizes = {name: shape.sizes(letters, n_slots) for name, (_, letters) in TENSORS.items()}
    maps = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    for name in ("a_k", "a_v", "projector"):
        maps[name] = maps[name] + np.eye(sizes[name][-1], dtype=np.float32)
    return LayerMaps(**maps)


def trained_without(
    identity: str, plan: Plan, shapes: list[HeadShape], frame: Frame, centre: Any, **more: Any
) -> Trained:
    """Slots are the pooled tokens unchanged: with one slot per token they equal the exact cache."""
    layers = tuple(no_maps(shape, plan.n_slots) for shape in shapes)
    return Trained(identity, plan, layers, frame, "tokens", centre, **more)


def untrained(llm: Llama, planting: Planting, plan: Plan = PLAN, **more: Any) -> Trained:
    """As trained_without; embeddings are centred at that of one token."""
    path = Path(llm.model_path)
    shapes = planting.sinks([5]).shapes
    return trained_without(model_content(path), plan, shapes, Frame.of(path), 0.5 * input_mean(path)([5]), **more)


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[Llama, Planting]]:
    """On an f16 cache, unless the file has bases or options say otherwise."""
    own = {"kv_cache": choose_cache(path, derive=False).name, "n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1}
    planting = Planting()
    try:
        with planting.attach():
            llm = Llama(path, **{**own, "verbose": False, **options})
        with llm:
            planting.bind(llm.ctx, llm._batch.batch, llm.cache_choice.coded)
            yield llm, planting
    finally:
        planting.close()


@contextlib.contextmanager
def warm(path: Path, folder: Path, plan: Plan = PLAN, guard: Any = None, **options: Any) -> Iterator[WarmStart]:
    """Warm starts of any prompt that has a neighbour; options: of WarmStart, or else of Llama."""
    own = {key: options.pop(key) for key in ("mode", "threshold", "max_kl", "n_warm") if key in options}
    with opened(path, **options) as (llm, planting):
        trained = untrained(llm, planting, plan, guard=guard or {})
        yield WarmStart(llm, planting, trained, Library(folder, trained), **{"threshold": -1.0} | own)


def remember(start: WarmStart, tokens: list[int]) -> None:
    """Put a prompt in the library."""
    start.llm.reset()
    with start.reading(tokens):
        start.llm.eval(tokens)
    assert start.problem == ""


def answer(start: WarmStart, tokens: list[int], n: int) -> list[int]:
    """A greedy answer like a conversation's: warm tokens if available, then exact ones."""
    llm = start.llm
    sampler = llm._init_sampler(temp=0.0)
    held = llm.longest_token_prefix(llm._input_ids, tokens)
    generated = list(start.begin(tokens, held, sampler))[:n]
    if start.decision.cause != "prefix":
        llm.reset()
        with start.reading(tokens):
            llm.eval(tokens)
        llm.eval(generated)
    else:
        llm.eval(tokens[held:])
    while len(generated) < n:
        generated.append(int(sampler.sample(llm._ctx, -1)))
        if len(generated) < n:
            llm.eval(generated[-1:])
    return generated


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
