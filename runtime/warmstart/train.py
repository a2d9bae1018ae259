"""Prompts to warm.safetensors: what a warm start (runtime/warmstart) needs to know about a model.

Every prompt is decoded once, natively; of its keys and values only the slots, the first and the last tokens are kept,
so that memory grows by m + n_sink + n_last rows a prompt. Learning is converter/warm_train.py.
CLI: python -m converter.warmstart
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from runtime import options
from subkv.base.command import command as program_command
from subkv.base.errors import need_packages
from subkv.base.files import check_not_input, check_writable
from subkv.base.progress import tracked
from subkv.base.threads import default_threads
from subkv.format.metadata import generator

if TYPE_CHECKING:
    from runtime.warmstart.capture import Captured
    from runtime.warmstart.frame import Frame
    from runtime.warmstart.learn import LayerRows, Losses, Places, Settings
    from runtime.warmstart.prompts import Prompt
    from runtime.warmstart.shapes import F32, Plan
    from runtime.warmstart.trained import HeadShape, LayerMaps, Trained
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
    """Tokens of the prompts that are not for testing. Raises WarmStartError for none, and for one that is too short or
    too long."""
    from runtime.warmstart.decode import prompt_tokens
    from runtime.warmstart.errors import WarmStartError

    found = []
    for prompt in prompts:
        if prompt.split == "test":
            continue
        tokens = tuple(prompt_tokens(model, prompt.text))
        if not plan.shortest <= len(tokens) <= model.n_ctx_train:
            raise WarmStartError(
                "-f",
                f"{prompt.id}: expected {plan.shortest} ({plan.n_sink} sinks, {plan.n_slots} slots, {plan.n_last} last "
                f"tokens) to {model.n_ctx_train} tokens, found {len(tokens)}",
            )
        found.append(Example(prompt.id, prompt.group, prompt.passage or prompt.group, tokens))
    if not found:
        raise WarmStartError("-f", "expected prompts to learn from, found only such with the split 'test'")
    return found


def split(passages: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of prompts to learn from and of those held out, by passage. A single passage is both."""
    names = list(dict.fromkeys(passages))
    held = set(names[HELD_OUT - 1 :: HELD_OUT] or names[-1:])
    held_out = [i for i, name in enumerate(passages) if name in held]
    return [i for i, name in enumerate(passages) if name not in held] or held_out, held_out


#
# what is kept of a prompt
#


def condense(rows: Captured, plan: Plan, frame: Frame) -> list[dict[str, F16]]:
    """Arrays of ARRAYS of one prompt, by layer. Raises WarmStartError for rows that do not fit half precision."""
    from runtime.warmstart.capture import attention
    from runtime.warmstart.errors import WarmStartError
    from runtime.warmstart.summary import summarise

    summary = summarise(rows.k, rows.v, plan, frame)
    n = len(rows.k[0])
    exact = [*range(plan.n_sink), *range(n - plan.n_last, n)]
    out = []
    for il, (q, k, v, scale) in enumerate(zip(rows.q, rows.k, rows.v, rows.scale, strict=True)):
        values = (q, attention(q, k, v, scale), k[exact], v[exact], summary.k[il], summary.v[il])
        with np.errstate(over="ignore"):
            kept = {name: x.astype(np.float16) for name, x in zip(ARRAYS, values, strict=True)}
        if not all(np.isfinite(x).all() for x in kept.values()):
            raise WarmStartError("-m", f"layer {il}: expected queries, keys and values below 65504, found larger ones")
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
        from runtime.warmstart.learn import LayerRows

        stacked = {name: np.stack([prompt[il][name] for prompt in self.rows]) for name in ARRAYS}
        return LayerRows(**stacked, scale=self.scale[il])


def collect(
    model: Model,
    found: Sequence[Example],
    plan: Plan,
    frame: Frame,
    embedding: str,
    train: Sequence[int],
    n_threads: int,
    progress: bool = False,
) -> Collected:
    """Decode the prompts one by one. train: those whose embeddings enter the mean."""
    from runtime.warmstart.capture import Capture
    from runtime.warmstart.embedding import embedder

    rows, total = [], None
    embed = embedder(embedding, model.path, model.handle, n_threads)
    counted = set(train)
    try:
        with Capture(model, max(len(example.tokens) for example in found), n_threads) as capture:
            for i, example in enumerate(tracked("decode", found, "prompt", progress)):
                captured = capture.prompt(example.tokens, plan.n_last)
                rows.append(condense(captured, plan, frame))
                if i in counted:
                    vector = embed.embed(example.tokens).astype(np.float64)
                    total = vector if total is None else total + vector
    finally:
        embed.close()
    assert total is not None
    return Collected(rows, captured.scale, captured.shapes, (total / len(counted)).astype(np.float32))


def places(found: Sequence[Example], plan: Plan) -> Places:
    """Where the slots of each prompt lie and how much they weigh."""
    from runtime.warmstart.learn import Places
    from runtime.warmstart.shapes import counts, placed

    where, mass = [], []
    for example in found:
        first, last = plan.span(len(example.tokens))
        where.append(placed(plan, len(example.tokens)))
        mass.append(np.log(counts(last - first, plan.n_slots)))
    return Places(np.stack(where), np.stack(mass))


#
# the run
#


def learn(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    settings: Settings,
    embedding: str,
    n_threads: int,
    provenance: dict[str, str],
    progress: bool = False,
) -> tuple[Trained, Losses]:
    """Train on prompts; the file's content and the mean losses over the layers.

    Raises WarmStartError for a model or prompts that cannot be used.
    """
    import torch

    from runtime.warmstart import learn as warm_train
    from runtime.warmstart.frame import Frame
    from runtime.warmstart.trained import Trained, identity_of

    frame = Frame.of(model.path)
    found = examples(prompts, model, plan)
    train, held_out = split([example.passage for example in found])
    groups = [example.group for example in found]
    collected = collect(model, found, plan, frame, embedding, train, n_threads, progress)
    lie = places(found, plan)
    torch.set_num_threads(n_threads)
    layers: list[LayerMaps] = []
    losses: list[Losses] = []
    for il in tracked("train", range(len(collected.scale)), "layer", progress):
        maps, lost = warm_train.train_layer(collected.layer(il), lie, frame.pairs, groups, train, held_out, settings)
        layers.append(maps)
        losses.append(lost)
    mean = _mean(losses)
    trained = Trained(
        identity=identity_of(model),
        plan=plan,
        layers=tuple(layers),
        frame=frame,
        embedding=embedding,
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


def _mean(losses: Sequence[Losses]) -> Losses:
    from runtime.warmstart.learn import Losses

    return Losses(**{f.name: float(np.mean([getattr(lost, f.name) for lost in losses])) for f in fields(Losses)})


def report(trained: Trained, losses: Losses) -> str:
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


@program_command(name="warmstart")
@options.model_option(required=True)
@click.option(
    "-f", "--file", "file", required=True, type=click.Path(path_type=Path), help="prompts, JSON lines to learn from"
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="warm.safetensors to write")
@click.option("--slots", "n_slots", type=click.IntRange(1, 4096), default=16, help="slots per layer and KV head, m")
@click.option("--n-sink", type=click.IntRange(0, 4096), default=4, help="first tokens kept exact")
@click.option("--n-last", type=click.IntRange(1, 4096), default=8, help="last tokens kept exact")
@click.option("--epochs", type=click.IntRange(0), default=15, help="passes over the prompts")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-3, help="learning rate of AdamW")
@click.option("--ridge", type=click.FloatRange(0, min_open=True), default=1e-3, help="ridge of the projector")
@click.option("--shared", is_flag=True, help="one adapter for all heads of a layer")
@click.option(
    "--embedding", type=click.Choice(["tokens", "hidden"]), default="tokens", help="what prompts are found by"
)
@click.option("--seed", type=int, default=0, help="order of the prompts")
@options.threads_option
def command(
    model: str,
    file: Path,
    output: Path,
    n_slots: int,
    n_sink: int,
    n_last: int,
    embedding: str,
    n_threads: int | None,
    **training: Any,
) -> None:
    """Learn what warm starts of a model need, from prompts of `python -m runtime.warmstart prompts`. Experimental."""
    need_packages("torch", ["torch"])
    from runtime.warmstart.learn import Settings
    from runtime.warmstart.prompts import read
    from runtime.warmstart.shapes import Plan
    from subkv.engine.model import Model

    prompts = read(file)
    plan = Plan(n_slots, n_sink, n_last)
    check_writable(output)
    check_not_input(output, (("-m", Path(model)), ("-f", file)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with Model(model) as loaded:
        trained, losses = learn(
            loaded,
            prompts,
            plan,
            Settings(**training),
            embedding,
            default_threads(n_threads),
            {"prompts": file.name, "prompts_sha256": digest},
            progress=True,
        )
    trained.save(output)
    click.echo(f"wrote {output}: {report(trained, losses)}")


def main() -> None:
    """Entry point of `python -m converter.warmstart`."""
    command()


if __name__ == "__main__":
    main()
