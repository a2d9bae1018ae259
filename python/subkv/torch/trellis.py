"""Paths through a trellis in torch: the codes of bands of 2 to 6 bits, FORMAT.md §3.

All rows and heads are searched together, one step of the path at a time. Costs are sums of float32 as in
kernels/ref/trellis.cpp. The state of a path is [h, l], the lowest bits of the last but one and the last code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subkv_triton.fields import LINE_FACTORS, Path

STATES = 4
AT_ONCE = 1 << 17  # numbers precomputed at once: fewer is slower, more exceeds the processor's cache


@dataclass(frozen=True)
class Paths:
    """The paths of H heads, padded to the longest. Tensors [n_place, 1, H]; a place is a step of a path."""

    coefficient: Tensor
    step: Tensor
    """Relative to the row's scale; 1 for padding."""
    half: Tensor
    """2^bits"""
    bend: tuple[Tensor, Tensor]
    line: tuple[Tensor, ...]
    """Constants of fields.line_constants."""
    is_place: Tensor
    full: tuple[bool, ...]
    """[n_place] whether no head is padded there."""
    any: Tensor
    """[H] whether a head's rows have a path."""
    rank: int

    @classmethod
    def of(cls, heads: Sequence[tuple[Path, NDArray[np.float32]]], rank: int) -> Paths | None:
        """From the paths and steps [rank] of every head; None if no head has a path."""
        n = max(len(path.coefficient) for path, _ in heads)
        if n == 0:
            return None

        def of_places(arrays: Sequence[NDArray[np.generic]], empty: float) -> Tensor:
            padded = [np.pad(a, (0, n - len(a)), constant_values=empty) for a in arrays]
            return torch.from_numpy(np.stack(padded, -1)[:, None])

        paths = [path for path, _ in heads]
        double, triple = (of_places([p.bends[i] + np.float32(0.5) for p in paths], 1.0) for i in (0, 1))
        return cls(
            of_places([p.coefficient for p in paths], 0).long(),
            of_places([step[p.coefficient] for p, step in heads], 1.0),
            of_places([np.float32(2.0) ** p.bits for p in paths], 4.0),
            (double, triple),
            tuple(of_places([p.lines[i] for p in paths], 0.0) for i in range(len(LINE_FACTORS))),
            of_places([np.ones(len(p.coefficient), np.bool_) for p in paths], False),
            tuple(t < min(len(p.coefficient) for p in paths) for t in range(n)),
            torch.tensor([len(p.coefficient) > 0 for p in paths]),
            rank,
        )

    def to(self, device: torch.device) -> Paths:
        """These paths on a device."""

        def moved(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(moved(part) for part in value)
            return value.to(device) if isinstance(value, Tensor) else value

        return Paths(**{name: moved(value) for name, value in vars(self).items()})  # type: ignore[arg-type]

    def free_cost(self, c: Tensor, scale: Tensor) -> Tensor:
        """Squared error [.., H, tried] of the best path of coefficients c [.., H, rank] at scales [.., H, tried]."""
        shape = scale.shape
        scale = scale.flatten(0, -3).movedim(-1, 0)  # [tried, N, H]
        cost = torch.zeros(2, 2, *scale.shape, device=c.device)
        for t, _, branches in self._steps(c, scale):
            branch_costs = (branches + cost.unsqueeze(2)).float().unbind()
            cost = self._extended(t, branch_costs, cost)
        return cost.flatten(0, 1).amin(0).movedim(0, -1).reshape(shape)

    def codes(self, c: Tensor, scale: Tensor) -> Tensor:
        """Codes of the best path, int32 [.., H, rank], of coefficients c at scales [.., H]; 0 outside of paths."""
        flat = scale.flatten(0, -2)[None]  # [1, N, H]
        shape = flat.shape[1:]
        # paths that start and end in the same state, for all states
        cost = torch.full((2, 2, STATES, *shape), torch.inf, device=c.device)
        for state in range(STATES):
            cost[state >> 1, state & 1, state] = 0.0
        n_place = len(self.coefficient)
        second = torch.empty(n_place, 2, 2, STATES, *shape, dtype=torch.bool, device=c.device)
        index = torch.empty(n_place, STATES, *shape, dtype=torch.uint8, device=c.device)
        for t, nearest, branches in self._steps(c, flat):
            index[t] = nearest[:, 0]
            branch_costs = (branches + cost.unsqueeze(2)).float().unbind()
            torch.lt(branch_costs[1], branch_costs[0], out=second[t])
            cost = self._extended(t, branch_costs, cost)
        closed = torch.stack([cost[state >> 1, state & 1, state] for state in range(STATES)])
        state = closed.argmin(0)
        # for every place and its end state [l, x]: the start state 2 h + l, and the code between them
        high = second.gather(3, state.expand(n_place, 2, 2, 1, *shape)).squeeze(3)
        low, x = (torch.arange(2, device=c.device).view(view) for view in ((2, 1, 1, 1), (2, 1, 1)))
        before = (2 * high + low).flatten(1, 2)
        subset = (2 * (high ^ (x > 0)) + low).flatten(1, 2)
        code = (index.gather(1, subset) ^ before) >> 1
        ends = []
        for t in reversed(range(n_place)):
            ends.append(state)
            previous = before[t].gather(0, state.unsqueeze(0)).squeeze(0)
            state = previous if self.full[t] else torch.where(self.is_place[t], previous, state)
        codes = code.gather(1, torch.stack(ends[::-1])[:, None])[:, 0]
        out = torch.zeros(self.rank, *shape, dtype=torch.int64, device=c.device)
        out.scatter_add_(0, self.coefficient.expand_as(codes), codes * self.is_place)
        return out.movedim(0, -1).reshape(c.shape).int()

    def _extended(self, t: int, branch_costs: tuple[Tensor, ...], cost: Tensor) -> Tensor:
        """Costs after place t: the smaller of two branches, or `cost` for padded heads."""
        smaller = torch.minimum(*branch_costs)
        return smaller if self.full[t] else torch.where(self.is_place[t], smaller, cost)

    def _steps(self, c: Tensor, scale: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For every place t at scales [tried, N, H]: [4, ..] index of the nearest level of each subset, and
        [2 (h), 2 (l), 2 (bit x of the code), ..] float64 squared errors of the branches.
        """
        values = c.flatten(0, -3).movedim(-1, 0)  # [rank, N, H]
        values = values.gather(0, self.coefficient.expand(-1, *values.shape[1:]))
        n_place, step = len(values), max(1, AT_ONCE // (STATES * scale.numel()))
        for first in range(0, n_place, step):
            part = slice(first, min(first + step, n_place))
            index, error = self._nearest(part, values[part, None], scale)
            of_subset = error.double().square().unflatten(1, (2, 2)).transpose(1, 2)  # [.., l, x ^ h, ..]
            branches = torch.stack([of_subset, of_subset.flip(2)], 1)
            yield from zip(range(part.start, part.stop), index.unbind(), branches.unbind(), strict=True)

    def _nearest(self, part: slice, c: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and errors [n, 4, tried, N, H] of values c [n, 1, N, H] at these places.

        Sums are in float64 for the fused multiply-adds of the reference, unless products are exact in float32.
        """
        half, (double, triple) = self.half[part, None], (bend[part, None] for bend in self.bend)
        step = scale * self.step[part, None]
        y = c * (1.0 / step)
        size = y.abs().double()
        level = size
        for a, b in zip(LINE_FACTORS, self.line, strict=True):
            level = torch.minimum(level, size * float(a) + b[part, None])
        quarter = (0.25 * level.float().copysign(y))[:, None]
        q = torch.arange(STATES, dtype=torch.float32, device=c.device).view(STATES, 1, 1, 1)
        half, double, triple = half[:, None], double[:, None], triple[:, None]
        group = (quarter + 0.25 * (half - 0.5 - q)).round().clamp(min=0.0)
        index = 4.0 * torch.minimum(group, 0.5 * half - 1.0) + q
        y = index - (half - 0.5)
        size = y.abs()
        level = size + (size - double).clamp(min=0.0) + (size - triple).clamp(min=0.0)
        error = (c[:, None].double() - step[:, None].double() * level.copysign(y)).float()
        return index, error
