"""The largest budget whose cache fits in a given memory (`kv_memory`, `--kv-memory`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subkv.base.errors import CacheError
from subkv.base.numbers import shown
from subkv.engine.cache import MIB, CacheChoice, choose_cache
from subkv.engine.memory import needed, trained_context
from subkv.engine.request import CacheRequest
from subkv.format.metadata import predicted_of, read_predicted
from subkv.native.bases import DERIVED_BUDGETS

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
GRANULE = 256  # llama.cpp rounds the cells of a sequence, or of all if they share them, up to a multiple of it


def memory_size(value: str | int) -> int:
    """Bytes of `2GiB`, `512MiB`, `1.5G` or a number. Units are powers of 1024. Raises CacheError about `kv_memory`."""
    match = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,9})?) *([kmgt]?)(?:i?b)?",
        (value if isinstance(value, str) else shown(value)).strip().lower(),
    )
    n_bytes = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if not 0 < n_bytes < 1 << 63:
        raise CacheError("kv_memory", f"expected a size, such as 2GiB or 512MiB, found {shown(value)}")
    return n_bytes


@dataclass(frozen=True)
class _Plan:
    """A budget's choice, its bytes with all cells, and those that do not depend on the context."""

    choice: CacheChoice
    n_bytes: int
    fixed: int
    predicted: dict[str, float] | None


def _plans(path: Path, requested: CacheRequest, choice: CacheChoice, params: Any, n_ctx: int) -> Iterator[_Plan]:
    """All budgets of the choice's bases, from the largest."""
    assert choice.layout is not None
    of_default = read_predicted(choice.layout)
    more = DERIVED_BUDGETS if choice.derived else (plan["budget"] for plan in choice.description["plans"])
    for budget in sorted({choice.budget_default, *more}, reverse=True):
        try:
            chosen = choose_cache(path, dataclasses.replace(requested, kv_memory=None, kv_bits=budget))
        except CacheError as error:
            if not choice.derived or error.key != "kv_bits":
                raise
            continue  # fewer bits than derived bases of this model can have
        sized = dataclasses.replace(chosen, window=choice.window)
        n_bytes, fixed = _sizes(path, sized, params, n_ctx)
        yield _Plan(sized, n_bytes, fixed, predicted_of(sized.description, of_default))


def _sizes(path: Path, choice: CacheChoice, params: Any, n_ctx: int) -> tuple[int, int]:
    """Bytes of a cache of n_ctx tokens, and those of its exact window and bases."""
    sizes = needed(path, choice, params, n_ctx)
    fixed = round(sizes["exact window"]) + int(choice.description["bytes_bases"])
    return round(sizes["cells"]) + fixed, fixed


def _longest(path: Path, plan: _Plan, params: Any, n_ctx: int, n_bytes: int) -> int:
    """A context below n_ctx whose cache takes at most n_bytes, 0 if none does. Sliding layers take as much in a shorter
    context, so a share of the cells is an upper bound, which is tried again.
    """
    granule = GRANULE * (1 if params.kv_unified else max(1, params.n_seq_max))
    n, found, fixed = n_ctx, plan.n_bytes, plan.fixed
    while n > 0 and found > n_bytes:
        n = max((n_bytes - fixed) * n // (found - fixed) // granule * granule, 0)
        if n > 0:
            found, fixed = _sizes(path, plan.choice, params, n)
    return n


def fitted(path: Path, requested: CacheRequest, choice: CacheChoice, params: Any) -> CacheChoice:
    """The choice with the largest budget whose cells, exact window and bases fit in kv_memory, and a line about it.

    path: of the model; choice: the coded cache for this request. params: llama_context_params; n_ctx 0: the trained
    context.

    Raises CacheError about `kv_memory` with the context that would fit, and if no context can be simulated.
    """
    assert requested.kv_memory is not None
    n_bytes = memory_size(requested.kv_memory)
    n_ctx, smallest = params.n_ctx or trained_context(path), None
    for plan in _plans(path, requested, choice, params, n_ctx):
        if plan.n_bytes == plan.fixed:
            raise CacheError("kv_memory", "expected a model whose cache can be simulated, found another one")
        if plan.n_bytes <= n_bytes:
            return dataclasses.replace(plan.choice, fit=_line(plan, n_ctx, n_bytes))
        smallest = plan
    assert smallest is not None
    longest = _longest(path, smallest, params, n_ctx, n_bytes)
    remedy = f"; -c {longest} would fit" if longest > 0 else "; the exact window and the bases alone take more"
    raise CacheError(
        "kv_memory",
        f"expected at least {smallest.n_bytes / MIB:.1f} MiB for {n_ctx} tokens at the smallest budget of the bases, "
        f"{smallest.choice.budget:g} bits per element, found {n_bytes / MIB:.1f} MiB{remedy}",
    )


def _line(plan: _Plan, n_ctx: int, n_bytes: int) -> str:
    """`KV memory: …`, for the user."""
    text = (
        f"KV memory: {plan.choice.budget:g} bits per element, {plan.n_bytes / MIB:.1f} of {n_bytes / MIB:.1f} MiB "
        f"with {n_ctx} tokens, exact window and bases included"
    )
    if plan.predicted is None:
        return text
    others = [f"{kind}'s {plan.predicted[kind]:.2g}" for kind in ("q8_0", "q4_0") if kind in plan.predicted]
    beside = f" ({', '.join(others)})" if others else ""
    return f"{text}; predicted KLD {plan.predicted['subkv']:.2g} nats per token{beside}"
