"""The planner: computes bands per head from the importance of coefficients and a budget.

A band is (coefficients, bits). The method is reverse water-filling in groups of 8 coefficients. A group of importance Λ
(cost of independent errors as large as the coefficients) costs Λ·loss(b) at b bits; loss grows with the distortion of
the best uniform quantizer on a Gaussian. Groups of all layers and heads, K and V, are widened in order of saved cost
per bit until the budget is spent. Within a head, bits never increase, and a band is a run of equal bits.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from subkv.base.errors import SubkvError
from subkv.format.arrays import F64
from subkv.format.bases import Bands
from subkv.format.codec import rank, row_bytes
from subkv.format.metadata import Account
from subkv.format.window import Window
from subkv.plan.quantizer import CODED_WIDTHS, WIDTHS, distortion

GROUP = 8  # coefficients planned together; bands are multiples of it (FORMAT.md §2)

# A quantizer at its best step shrinks: E[x̂|x] = (1 − D) x. This error is the same in every cell and adds up over the
# cells that attention sums, while independent errors average out. Its energy is D² of the coefficient's, and it is
# counted COHERENCE times. SmolLM2-135M, KLD on WikiText-2 test and Sherlock (with decoders that compensate the
# shrinking, basis.py), for COHERENCE 10 and 20: at 3 bits 0.0035 and 0.0042, 0.0023 both; at 4.25 bits 0.00055 and
# 0.00053, 0.00037 and 0.00032; no difference at 3.5 bits.
COHERENCE = 20.0

# Bands of 16 bits are planned from this many bits per element in rows. Their coefficients are halves, which decode more
# slowly than integers. SmolLM2-135M, KLD with and without: 0.0012 both at 3.5 bits in rows, 0.00003 and 0.00004 at 6.4.
WIDE_FROM = 6.0
BUDGET_TOLERANCE = 0.02  # a reader chooses the nearest plan of a file within it (FORMAT.md §3.3)


@dataclass(frozen=True)
class Head:
    """One head's K or V for the planner. importance: [rank]; rank <= d is the maximum number of coefficients.

    centred: a mean is subtracted and stored with the bases. basis_bits: memory of one coefficient's bases, 0: that of
    coefficient_bits(d). more_bits: further memory, for the first rows of D. joined: its codes continue the row of the
    previous head, under the same scale.
    """

    d: int
    importance: F64
    centred: bool = False
    basis_bits: int = 0
    more_bits: int = 0
    joined: bool = False


def matrix_row_bits(d: int, in_bytes: bool) -> int:
    """Bits in memory of a row of E or D: bytes and a step in f16, or all f16."""
    return 8 * d + 16 if in_bytes else 16 * d


def coefficient_bits(d: int, encode_in_bytes: bool = True, decode_in_bytes: bool = False) -> int:
    """Bits in memory of one coefficient's rows of E and D."""
    return matrix_row_bits(d, encode_in_bytes) + matrix_row_bits(d, decode_in_bytes)


@dataclass(frozen=True)
class Overhead:
    """The parts of the budget besides the rows. context: tokens for which bits per element are computed."""

    context: int
    window: Window

    def window_bits(self, heads: Sequence[Head]) -> float:
        """Exact-window bits per K/V element at `context`: rows of sinks, recent tokens and rollback."""
        elements = sum(head.d for head in heads)
        return self.window.bits(elements, sum(not head.joined for head in heads)) / elements / self.context

    def basis_bits(self, head: Head) -> float:
        """Bits per token of one coefficient's bases in libsubkv's memory: rows of bases, an offset in f32."""
        rows = head.basis_bits or coefficient_bits(head.d)
        return (rows + (32.0 if head.centred else 0.0)) / self.context

    def head_bits(self, head: Head) -> float:
        """Bits per token of a head that do not depend on its rank: the mean in f16, and more_bits."""
        return ((16.0 * head.d if head.centred else 0.0) + head.more_bits) / self.context


def account(heads: Sequence[Head], bands: Sequence[Bands], overhead: Overhead) -> Account:
    """The size of a layout. heads and bands are parallel."""
    elements = sum(head.d for head in heads)
    n_bytes = sum(row_bytes(b) - head.joined for head, b in zip(heads, bands, strict=True))
    bases = sum(
        overhead.head_bits(head) + overhead.basis_bits(head) * rank(b) for head, b in zip(heads, bands, strict=True)
    )
    return Account(8.0 * n_bytes / elements, overhead.window_bits(heads), bases / elements, n_bytes, overhead.context)


def check_rank(rank: int | None, d: int, il: int) -> int:
    """The rank for head size d, by default d. Raises SubkvError if it is invalid."""
    if rank is None:
        return d
    if rank > d:
        raise SubkvError("rank", f"expected at most the head size {d} of layer {il}, found {rank}")
    if rank < GROUP or rank % GROUP:
        raise SubkvError("rank", f"expected a positive multiple of {GROUP}, found {rank}")
    return rank


def plan_int8(heads: Sequence[Head]) -> list[Bands]:
    """One 8-bit band with all coefficients of each head."""
    return [((len(head.importance), 8),) for head in heads]


@functools.cache
def loss(bits: int) -> float:
    """Cost of a coefficient at `bits`, relative to independent errors of its own size; COHERENCE if dropped."""
    relative = distortion(bits)
    return relative + (COHERENCE - 1.0) * relative**2


@functools.cache
def _ladder(start: int, basis_bits: float, widest: int) -> tuple[int, ...]:
    """Useful widths above `start`, ascending: the lower convex hull of (bits per coefficient, loss)."""

    def cost(bits: int) -> float:
        return bits + basis_bits if bits else 0.0

    ladder, current = [], start
    while current != widest:
        above = [bits for bits in WIDTHS if current < bits <= widest]
        saved = [(loss(current) - loss(bits)) / (cost(bits) - cost(current)) for bits in above]
        current = above[int(np.argmax(saved))]
        ladder.append(current)
    return tuple(ladder)


def _pooled(importance: F64) -> F64:
    """Sum over groups of GROUP, made non-increasing by averaging violators (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in importance.reshape(-1, GROUP).sum(axis=1):
        mean, count = float(value), 1
        while blocks and blocks[-1][0] < mean:
            last, n = blocks.pop()
            mean, count = (last * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def same(one: float, other: float) -> bool:
    """Whether a file's plan for one budget is also that for the other. As plan_of() of libsubkv, in its precision."""
    return bool(np.abs(np.float32(one) - np.float32(other)) < np.float32(BUDGET_TOLERANCE))


def budget_range(heads: Sequence[Head], overhead: Overhead, least: int = 0) -> tuple[Account, Account]:
    """The range of plan_banded(): from one group of the smallest width per head to all coefficients at the largest."""
    lowest: list[Bands] = [((len(head.importance), least) if least else (GROUP, WIDTHS[0]),) for head in heads]
    most: list[Bands] = [((len(head.importance), WIDTHS[-1]),) for head in heads]
    return account(heads, lowest, overhead), account(heads, most, overhead)


def check_range(kv_bits: float, low: Account, high: Account) -> None:
    """Raises SubkvError for a budget outside of a range of budget_range()."""
    if not low.total <= kv_bits <= high.total:
        raise SubkvError(
            "kv_bits",
            f"expected {np.ceil(low.total * 1000.0) / 1000.0:.3f} to {np.floor(high.total * 1000.0) / 1000.0:.3f} "
            f"bits per element in total at {low.context} tokens (exact window {low.window:.3f}, "
            f"full-rank bases {high.bases:.3f}), found {kv_bits:g}",
        )


def plan_banded(
    heads: Sequence[Head], kv_bits: float, overhead: Overhead, least: int = 0, widest: int | None = None
) -> list[Bands]:
    """Bands of every head within `kv_bits` bits per element in total, at overhead.context.

    least: minimum bits of every coefficient, 0: it may be dropped. widest: maximum bits of a band, None: 16 from
    WIDE_FROM on. Raises SubkvError with the valid range if the budget is outside it.
    """
    low, high = budget_range(heads, overhead, least)
    check_range(kv_bits, low, high)
    elements = sum(head.d for head in heads)
    if widest is None:
        widest = WIDTHS[-1] if kv_bits - high.window - high.bases >= WIDE_FROM else CODED_WIDTHS[-1]
    return _filled(heads, overhead, (kv_bits - low.total) * elements, least, widest)


def _filled(heads: Sequence[Head], overhead: Overhead, spare: float, least: int, widest: int) -> list[Bands]:
    """Bands of the greedy plan: repeatedly widens the group that saves the most cost per bit, while the budget allows.

    spare: bits per token beyond the smallest layout of budget_range().
    """
    spare *= 1.0 + 1e-12
    basis_bits = [overhead.basis_bits(head) for head in heads]
    weight = [_pooled(head.importance) for head in heads]
    # without `least`, only the first group starts at the smallest width
    widths = [[least or WIDTHS[0], *[least] * (len(groups) - 1)] for groups in weight]
    steps: list[tuple[float, int, int, int]] = []  # heap of (−gain, head, group, next width)

    def cost(h: int, old: int, new: int) -> float:
        return GROUP * (new - old + (basis_bits[h] if old == 0 else 0.0))

    def push_step(h: int, g: int) -> None:
        """Push the group's next step, unless the group before it is not wide enough yet."""
        if g >= len(widths[h]):
            return
        old = widths[h][g]
        start = least or (WIDTHS[0] if g == 0 else 0)
        new = next((bits for bits in _ladder(start, basis_bits[h], widest) if bits > old), None)
        if new is None or (g > 0 and widths[h][g - 1] < new):
            return
        gain = weight[h][g] * (loss(old) - loss(new)) / cost(h, old, new)
        heapq.heappush(steps, (-gain, h, g, new))

    for h in range(len(heads)):
        push_step(h, 0)
        push_step(h, 1)
    while steps:
        _, h, g, new = heapq.heappop(steps)
        old = widths[h][g]
        # done already (a step is pushed after the group's own step and after that of the previous group), or too large
        if new <= old or cost(h, old, new) > spare:
            continue
        spare -= cost(h, old, new)
        widths[h][g] = new
        push_step(h, g)
        push_step(h, g + 1)
    return [_runs(groups) for groups in widths]


def _runs(widths: Sequence[int]) -> Bands:
    """Bands of a head from the widths of its groups; trailing zeros are dropped coefficients."""
    return tuple((GROUP * len(list(run)), bits) for bits, run in itertools.groupby(widths) if bits)


def first_within(target: float, first: int, last: int, fall: float, error: Callable[[int], float | None]) -> int | None:
    """The first step from `first` to `last` whose error is at most `target` > 0, last + 1 without one; errors decrease.

    fall: usual factor between the errors of two steps, for choosing the next step to try. Every third try bisects,
    which bounds their number. Returns None as soon as an error is None.
    """
    step, n_tries = (first + last) // 2, 0
    while first <= last:
        current = error(step)
        if current is None:
            return None
        first, last = (first, step - 1) if current <= target else (step + 1, last)
        n_tries += 1
        ratio = current / target
        if n_tries % 3 == 0 or not 0.0 < ratio < math.inf:
            step = (first + last) // 2
        else:
            step = min(max(step + math.ceil(math.log(ratio, fall)), first), last)
    return first
