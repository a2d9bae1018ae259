"""Prompts to warm.safetensors: what a warm start needs to know about a model.

Every prompt is decoded once, natively; of its keys and values only the slots, the first and the last tokens are kept,
so that memory grows by m + n_sink + n_last rows a prompt. What is learnt of a layer is in learn.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from converter.scoring import F32
from research.warmstart.contexts import attention, capturing
from research.warmstart.embedding import embedder
from research.warmstart.frame import Frame
from research.warmstart.learn import LayerRows, Losses, Places, Settings, train_layer
from research.warmstart.planting import Rows
from research.warmstart.pooled import Plan, placed, summarise
from research.warmstart.trained import HeadShape, Trained
from subkv.base.errors import SubkvError
from subkv.base.progress import tracked
from subkv.format.metadata import generator
from subkv.native.bases import model_content

if TYPE_CHECKING:
    from research.warmstart.prompts import Prompt
    from subkv.engine.model import Model

F16 = NDArray[np.float16]
HELD_OUT = 8  # every 8th passage
ARRAYS = ("q", "out", "k_exact", "v_exact", "k_slots", "v_slots")  # of LayerRows


@dataclass(frozen=True)
class Example:
    """A prompt to learn from. passage: prompts of one are held out together."""

    id: str
    group: str
    passage: str
    tokens: tuple[int, ...]


def examples(prompts: Sequence[Prompt], model: Model, plan: Plan) -> list[Example]:
    """Tokens of the prompts that are not for testing. Raises SubkvError about `prompts` for none, and for one that is
    too short or too long."""
    found = []
    for prompt in prompts:
        if prompt.split == "test":
            continue
        tokens = tuple(model.tokenize_chat(prompt.text))
        try:
            plan.span(len(tokens), model.n_ctx_train)
        except SubkvError as error:
            raise SubkvError("prompts", f"{prompt.id}: {error.reason}") from None
        found.append(Example(prompt.id, prompt.group, prompt.passage or prompt.group, tokens))
    if not found:
        raise SubkvError("prompts", "expected prompts to learn from, found only such with the split 'test'")
    return found


def split(passages: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of prompts to learn from and of those held out, by passage. A single passage is both."""
    names = list(dict.fromkeys(passages))
    held = set(names[HELD_OUT - 1 :: HELD_OUT] or names[-1:])
    held_out = [i for i, name in enumerate(passages) if name in held]
    return [i for i, name in enumerate(passages) if name not in held] or held_out, held_out


def condense(rows: Rows, plan: Plan, frame: Frame) -> list[dict[str, F16]]:
    """Arrays of ARRAYS of one prompt, by layer. Raises SubkvError for rows that do not fit half precision."""
    summary = summarise(rows.k, rows.v, plan, frame)
    n = len(rows.k[0])
    exact = [*range(plan.n_sink), *range(n - plan.n_last, n)]
    out = []
    for il, (q, k, v, scale) in enumerate(zip(rows.q, rows.k, rows.v, rows.scale, strict=True)):
        values = (q, attention(q, k, v, scale), k[exact], v[exact], summary.k[il], summary.v[il])
        with np.errstate(over="ignore"):
            kept = {name: x.astype(np.float16) for name, x in zip(ARRAYS, values, strict=True)}
        if not all(np.isfinite(x).all() for x in kept.values()):
            raise SubkvError("model", f"layer {il}: expected queries, keys and values below 65504, found larger ones")
        out.append(kept)
    return out


@dataclass(frozen=True, eq=False)
class Collected:
    """All prompts: by prompt and layer, ARRAYS; what is the same for all; embeddings' mean [n]."""

    rows: list[list[dict[str, F16]]]
    scale: list[float]
    shapes: list[HeadShape]
    centre: F32

    def layer(self, il: int) -> LayerRows:
        stacked = {name: np.stack([prompt[il][name] for prompt in self.rows]) for name in ARRAYS}
        return LayerRows(**stacked, scale=self.scale[il])


@dataclass(frozen=True)
class How:
    """What every prompt is made into, and by how many threads."""

    plan: Plan
    embedding: str = "tokens"
    n_threads: int = 1
    progress: bool = False


def collect(model: Model, found: Sequence[Example], how: How, frame: Frame, train: Sequence[int]) -> Collected:
    """Decode the prompts one by one. train: those whose embeddings enter the mean."""
    rows, vectors = [], []
    embed = embedder(how.embedding, model, how.n_threads)
    with capturing(model, max(len(example.tokens) for example in found), how.n_threads) as context:
        for i, example in enumerate(tracked("decode", found, "prompt", how.progress)):
            captured = context.capture(example.tokens, how.plan.n_last)
            rows.append(condense(captured, how.plan, frame))
            if i in train:
                vectors.append(embed(example.tokens))
    centre = np.stack(vectors).sum(axis=0, dtype=np.float64) / len(vectors)
    return Collected(rows, captured.scale, captured.shapes, centre.astype(np.float32))


def places(found: Sequence[Example], plan: Plan) -> Places:
    """Where the slots of each prompt lie and how much they weigh."""
    where, mass = zip(*(placed(plan, len(example.tokens)) for example in found), strict=True)
    return Places(np.stack(where), np.stack(mass))


def learn(
    model: Model, prompts: Sequence[Prompt], how: How, settings: Settings, provenance: dict[str, str]
) -> tuple[Trained, Losses]:
    """Train on prompts; the file's content and the mean losses over the layers.

    Raises SubkvError for a model or prompts that cannot be used.
    """
    frame = Frame.of(model.path)
    found = examples(prompts, model, how.plan)
    train, held_out = split([example.passage for example in found])
    groups = [example.group for example in found]
    collected = collect(model, found, how, frame, train)
    lie = places(found, how.plan)
    torch.set_num_threads(how.n_threads)
    learnt = [
        train_layer(collected.layer(il), lie, frame.pairs, groups, train, held_out, settings)
        for il in tracked("train", range(len(collected.scale)), "layer", how.progress)
    ]
    mean = Losses(**{f.name: float(np.mean([getattr(lost, f.name) for _, lost in learnt])) for f in fields(Losses)})
    trained = Trained(
        identity=model_content(model.path),
        plan=how.plan,
        layers=tuple(maps for maps, _ in learnt),
        frame=frame,
        embedding=how.embedding,
        centre=collected.centre,
        provenance={
            **provenance,
            "generator": generator(),
            "n_prompts": str(len(found)),
            "n_held_out": str(len(held_out)),
            "n_tokens": str(sum(len(example.tokens) for example in found)),
            "settings": json.dumps(vars(settings)),
            "losses": json.dumps({name: round(value, 5) for name, value in vars(mean).items() if value == value}),
        },
    )
    return trained, mean


def summary_line(trained: Trained, losses: Losses) -> str:
    """What was learnt, for the terminal."""
    lines = [
        f"{len(trained.layers)} layers, {trained.plan.n_slots} slots; error of the attention outputs (share of their "
        f"mean square), {trained.provenance['n_held_out']} held-out of {trained.provenance['n_prompts']} prompts:",
        f"  own slots      {losses.plain:.3f} as pooled, {losses.adapted:.3f} adapted (training prompts "
        f"{losses.fitted:.3f})",
    ]
    if losses.neighbour == losses.neighbour:
        lines.append(f"  a paraphrase's {losses.neighbour:.3f} adapted, {losses.projected:.3f} adapted and projected")
    lines.append(f"  learned prefix {losses.prefix:.3f}")
    return "\n".join(lines)
