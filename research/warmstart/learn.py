"""What warm starts learn of a layer: adapters and a prefix by gradient, a projector in closed form.

All layers are alike and independent of each other: queries are the model's own, so nothing of one layer's slots reaches
the next. With slots x (mean keys and values) and the first and last tokens of a prompt exact, the adapters minimise
|softmax(q·[K_first, x A_k + b_k log n, K_last]) [V_first, x A_v + b_v, V_last] − O|²
against O, what the layer gave with its own cache, as a share of the mean |O|² of the layer. n is the number of tokens
that a slot stands for: it has the softmax weight of one unless b_k gives it more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from converter.scoring import F32, F64
from research.warmstart.trained import LayerMaps
from subkv.base.errors import SubkvError
from subkv.plan.positions import Pairs

BATCH = 8  # prompts of one step
DECAY = 0.01  # of AdamW, towards the identity: with no evidence slots stay what they are


@dataclass(frozen=True)
class Settings:
    """shared: one adapter for all heads of a layer instead of one for each."""

    epochs: int = 15
    lr: float = 1e-3
    ridge: float = 1e-3
    shared: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class LayerRows:
    """One layer of N prompts. q [N, r, n_head, d_k] and out [N, r, n_head, d_v]: of their last r tokens; k_exact
    [N, n_sink + r, n_head_kv, d_k], v_exact: of the first and the last tokens; k_slots [N, n_head_kv, m, d_k], as at
    position 0, v_slots. scale: of q·k."""

    q: NDArray[np.float16]
    out: NDArray[np.float16]
    k_exact: NDArray[np.float16]
    v_exact: NDArray[np.float16]
    k_slots: NDArray[np.float16]
    v_slots: NDArray[np.float16]
    scale: float


@dataclass(frozen=True, eq=False)
class Places:
    """Of all prompts: where [N, m], the slots' positions; mass [N, m], log of the tokens that they stand for."""

    where: F64
    mass: F64


@dataclass(frozen=True)
class Losses:
    """Squared error of the layer's output as a share of its mean square: over the held-out prompts, `fitted` over the
    training prompts. plain: slots as pooled; adapted; prefix: the learned prefix; neighbour, projected: adapted slots
    of another prompt of the group without and with the projector, NaN where there is none."""

    fitted: float
    plain: float
    adapted: float
    prefix: float
    neighbour: float
    projected: float


class _Layer:
    """Tensors of one layer, and attention over slots in place of the middle of the prompts."""

    def __init__(self, rows: LayerRows, places: Places, pairs: Pairs, train: Sequence[int]) -> None:
        def tensor(x: NDArray[np.floating]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))

        n, r, n_head, d_k = rows.q.shape
        n_head_kv = rows.k_exact.shape[2]
        grouped = (n, r, n_head_kv, n_head // n_head_kv, -1)
        self.q = rows.scale * tensor(rows.q).reshape(*grouped).permute(0, 2, 3, 1, 4)  # [N, h, G, r, d_k]
        self.out = tensor(rows.out).reshape(*grouped).permute(0, 2, 3, 1, 4)
        self.k_exact = tensor(rows.k_exact).permute(0, 2, 1, 3)  # [N, h, n_sink + r, d_k]
        self.v_exact = tensor(rows.v_exact).permute(0, 2, 1, 3)
        self.k_slots, self.v_slots = tensor(rows.k_slots), tensor(rows.v_slots)
        self.mass = tensor(places.mass)[:, None, :, None]  # [N, 1, m, 1]
        angle = places.where[:, None, :, None] * pairs.omega
        self.cos, self.sin = tensor(np.cos(angle)), tensor(np.sin(angle))
        self.partner = torch.from_numpy(pairs.partner)
        self.n_sink = self.k_exact.shape[2] - r
        self.later = torch.triu(torch.full((r, r), float("-inf")), 1)
        self.unit = float(self.out[list(train)].square().mean()) or 1.0

    def loss(self, some: Tensor, keys: Tensor, values: Tensor, b_k: Tensor) -> Tensor:
        """Of the prompts `some` [n], with slots [n, h, m, d]."""
        keys = keys + b_k[:, None] * self.mass[some]
        keys = keys * self.cos[some] + keys[..., self.partner] * self.sin[some]
        k = torch.cat([self.k_exact[some, :, : self.n_sink], keys, self.k_exact[some, :, self.n_sink :]], 2)
        v = torch.cat([self.v_exact[some, :, : self.n_sink], values, self.v_exact[some, :, self.n_sink :]], 2)
        logits = torch.einsum("nhgrd,nhtd->nhgrt", self.q[some], k)
        r = logits.shape[3]
        logits = torch.cat([logits[..., :-r], logits[..., -r:] + self.later], -1)
        out = torch.einsum("nhgrt,nhtd->nhgrd", logits.softmax(-1), v)
        return (out - self.out[some]).square().mean() / self.unit


def train_layer(
    rows: LayerRows,
    places: Places,
    pairs: Pairs,
    groups: Sequence[str],
    train: Sequence[int],
    held_out: Sequence[int],
    settings: Settings,
) -> tuple[LayerMaps, Losses]:
    """Learn one layer. groups: of each prompt, those of one are paraphrases; train, held_out: indices of prompts.

    Raises SubkvError where the rate is so high that training ends in NaN or infinity.
    """
    layer = _Layer(rows, places, pairs, train)
    n_head_kv, m = layer.k_slots.shape[1:3]
    n_own = 1 if settings.shared else n_head_kv

    def deltas(d: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(n_own, d, d, requires_grad=True), torch.zeros(n_own, d, requires_grad=True)

    delta_k, b_k = deltas(layer.k_slots.shape[3])
    delta_v, b_v = deltas(layer.v_slots.shape[3])

    def adapted(some: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = layer.k_slots[some], layer.v_slots[some]
        return keys + keys @ delta_k, values + values @ delta_v + b_v[:, None], b_k

    decayed = [{"params": [delta_k, delta_v], "weight_decay": DECAY}, {"params": [b_k, b_v], "weight_decay": 0.0}]
    _descend(decayed, lambda some: layer.loss(some, *adapted(some)), train, settings)

    with torch.no_grad():
        every = torch.arange(len(layer.q))
        own_k, own_v, _ = adapted(every)
        prefix_k, prefix_v = (x[list(train)].mean(0) for x in (own_k, own_v))
    fixed = b_k.detach()
    prefix_k.requires_grad_()
    prefix_v.requires_grad_()

    def prefixed(some: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = len(some)
        return prefix_k.expand(n, -1, -1, -1), prefix_v.expand(n, -1, -1, -1), fixed

    free = [{"params": [prefix_k, prefix_v], "weight_decay": 0.0}]
    _descend(free, lambda some: layer.loss(some, *prefixed(some)), train, settings)

    matrix = projector(own_k.numpy(), own_v.numpy(), [groups[i] for i in train], train, settings.ridge)
    rotated = torch.from_numpy(matrix.astype(np.float32))
    source, target = _neighbours(groups, held_out)
    with torch.no_grad():
        plain = (layer.k_slots, layer.v_slots, torch.zeros_like(b_k))

        def held(keys: Tensor, values: Tensor, mass: Tensor, at: Sequence[int], of: Sequence[int]) -> float:
            return _mean_loss(lambda some, slots: layer.loss(some, keys[slots], values[slots], mass), at, of)

        losses = Losses(
            fitted=held(own_k, own_v, fixed, train, train),
            plain=held(*plain, held_out, held_out),
            adapted=held(own_k, own_v, fixed, held_out, held_out),
            prefix=_mean_loss(lambda some, _: layer.loss(some, *prefixed(some)), held_out, held_out),
            neighbour=held(own_k, own_v, fixed, target, source),
            projected=held(rotated @ own_k, rotated @ own_v, fixed, target, source),
        )

    def array(x: Tensor, identity: bool = False) -> F32:
        found: F32 = x.detach().expand(n_head_kv, *x.shape[1:]).numpy().copy()
        return found + np.eye(found.shape[-1], dtype=np.float32) if identity else found

    maps = LayerMaps(
        a_k=array(delta_k, identity=True),
        b_k=array(b_k),
        a_v=array(delta_v, identity=True),
        b_v=array(b_v),
        projector=matrix.astype(np.float32),
        prefix_k=array(prefix_k),
        prefix_v=array(prefix_v),
    )
    return maps, losses


def _descend(
    parameters: list[dict[str, object]],
    loss: Callable[[Tensor], Tensor],
    train: Sequence[int],
    settings: Settings,
) -> None:
    """AdamW over the prompts `train` in batches of seeded order."""
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr)
    generator = torch.Generator().manual_seed(settings.seed % 2**63)
    prompts = torch.tensor(train)
    for _ in range(settings.epochs):
        for some in prompts[torch.randperm(len(prompts), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            loss(some).backward()
            optimizer.step()
    if not all(x.isfinite().all() for group in optimizer.param_groups for x in group["params"]):
        raise SubkvError("lr", f"expected a rate at which training converges, found {settings.lr:g}")


def _mean_loss(loss: Callable[[Tensor, Tensor], Tensor], at: Sequence[int], of: Sequence[int]) -> float:
    """Mean over prompts `at` with the slots of the prompts `of`, one for one; NaN where there is none."""
    parts = list(zip(torch.tensor(at).split(BATCH), torch.tensor(of).split(BATCH), strict=True)) if len(at) else []
    total = sum(len(some) * float(loss(some, slots)) for some, slots in parts)
    return total / len(at) if len(at) else float("nan")


def _neighbours(groups: Sequence[str], some: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each of the prompts `some` that has one, the next of its group: sources and targets."""
    source, target = [], []
    for i in some:
        own = [j for j in some if groups[j] == groups[i]]
        if len(own) > 1:
            source.append(own[(own.index(i) + 1) % len(own)])
            target.append(i)
    return source, target


def projector(
    keys: NDArray[np.floating], values: NDArray[np.floating], groups: Sequence[str], some: Sequence[int], ridge: float
) -> F64:
    """[m, m] M that takes the slots of a prompt to those of another of its group: keys, values [N, n_head_kv, m, d].

    groups: of the prompts `some`; all ordered pairs within a group count. M minimises Σ |M S_s − S_t|² + λ |M − I|²,
    S [m, all heads' keys and values], where λ is `ridge` times the mean diagonal of Σ S_s S_sᵀ, so that it means
    the same for any number of pairs and size of slots. The identity, not zero, is what little evidence leads to:
    M = 0 would take the prompt away, M = I leaves the neighbour's slots as they are. Keys and values count alike,
    however large they are. Without pairs, the identity.
    """
    m = keys.shape[2]
    parts = []
    for x in (keys[list(some)], values[list(some)]):
        rows = x.astype(np.float64).transpose(0, 2, 1, 3).reshape(len(some), m, -1)
        parts.append(rows / (np.sqrt(np.mean(rows**2)) or 1.0))
    slots = np.concatenate(parts, axis=2)
    names = np.asarray(groups)
    xx, yx = np.zeros((m, m)), np.zeros((m, m))
    for name in dict.fromkeys(groups):
        own = slots[names == name]
        if len(own) > 1:
            squares, total = np.einsum("nif,njf->ij", own, own, optimize=True), own.sum(0)
            xx += (len(own) - 1) * squares
            yx += total @ total.T - squares
    size = np.trace(xx) / m
    if size == 0.0:
        return np.eye(m)
    step = np.linalg.solve(xx + ridge * size * np.eye(m), (yx - xx).T).T  # the left side is symmetric
    return np.eye(m) + step
