"""Printed results: the table of a layout, and the cost of its cache in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subkv.engine.stats import KVStats
    from subkv.plan.pipeline import Result

MIB = 1 << 20
MOST_ROWS, ENDS = 12, 4  # maximum rows of a whole table; rows shown at each end of a longer one


def span(values: Sequence[int]) -> str:
    """The only value, or "first-last"."""
    return str(values[0]) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def mean_bits(row_bytes: Sequence[int], d: int) -> float:
    """Stored bits per element of the heads' full rows of d elements, scales included. row_bytes: per head."""
    return 8 * sum(row_bytes) / (len(row_bytes) * d)


def shortened(rows: Sequence[str], verbose: bool) -> Iterator[str]:
    """The rows of a table; the first and the last ones if there are more than MOST_ROWS and not `verbose`."""
    if verbose or len(rows) <= MOST_ROWS:
        yield from rows
        return
    yield from rows[:ENDS]
    yield f"  ... {len(rows) - 2 * ENDS} more: --verbose"
    yield from rows[-ENDS:]


def layout(result: Result, verbose: bool = True) -> Iterator[str]:
    """Lines of the summary: ranks, bits and bytes per token of every layer, then the bits per element."""
    from subkv.format.codec import row_bytes  # numpy: not for a --help

    yield f"{'layer':>5} {'rank K':>8} {'bits K':>7} {'rank V':>8} {'bits V':>7} {'bytes/token':>12} {'gamma':>13}"
    rows = []
    for layer in result.layers:
        sides, total = "", 0
        for side, d in (("k", layer.shape.d_k), ("v", layer.shape.d_v)):
            if side == "v" and layer.latent:  # values are a part of the keys
                sides += f" {'-':>8} {'-':>7}"
                continue
            stored = [getattr(head, side) for head in layer.heads]
            sizes = [row_bytes(s.bands) for s in stored]
            sides += f" {span([len(s.encode) for s in stored]):>8} {mean_bits(sizes, d):>7.2f}"
            total += sum(sizes)
        gammas = [head.gamma for head in layer.heads]
        rows.append(f"{layer.shape.il:>5}{sides} {total:>12} {min(gammas):>6.3f}-{max(gammas):.3f}")
    yield from shortened(rows, verbose)
    counted = result.counted
    yield f"gamma from {', '.join(f'{source} ({n} heads)' for source, n in sorted(result.gamma_sources.items()))}"
    yield f"bytes per token: {counted.bytes_per_token} (f16: {2 * sum(layer.elements for layer in result.layers)})"
    yield (
        f"bits per element at {counted.context} tokens: rows {counted.rows:.3f} + exact window {counted.window:.3f} "
        f"+ bases {counted.bases:.3f} = {counted.total:.3f}"
    )


@dataclass(frozen=True)
class Cost:
    """Bytes of the coded layers: row and f16 per token, bases in all, the exact window per sequence.

    ordinary, ordinary_f16: of the other layers, as they are in a context and in f16. layers: words about these.
    """

    row: int
    f16: int
    bases: int
    window: int
    ordinary: int = 0
    ordinary_f16: int = 0
    layers: str = ""

    @classmethod
    def of_result(cls, result: Result) -> Cost:
        counted = result.counted
        elements = sum(layer.elements for layer in result.layers)
        bases, window = (round(bits * counted.context * elements / 8) for bits in (counted.bases, counted.window))
        return cls(counted.bytes_per_token, 2 * elements, bases, window)

    @classmethod
    def of_layout(cls, layout: Mapping[str, Any]) -> Cost:
        """The cost of a file's layout (subkv.h)."""
        from subkv.format.window import Window

        window = Window(layout["n_sink"], layout["n_recent"], recent_bits=layout["recent_bits"]).with_defaults()
        n_heads = sum(layer["n_head_kv"] * (1 + bool(layer["v"])) for layer in layout["layers"])
        bits = window.bits(elements(layout), n_heads)
        return cls(layout["bytes_per_token"], 2 * elements(layout), layout["bytes_bases"], bits // 8)

    def beside(self, stats: KVStats | None) -> Cost:
        """The same with the layers that a context keeps ordinary. Those that slide take as much in a longer one.

        stats: of that context, with static bases.
        """
        from subkv.engine.stats import layers  # numpy: not for a --help

        if stats is None or not stats.bytes_stock:
            return self
        in_f16 = stats.bytes_f16 - stats.n_cells * self.f16
        return replace(self, ordinary=stats.bytes_stock, ordinary_f16=in_f16, layers=layers(stats))

    def bytes(self, n_ctx: int) -> int:
        """Bytes of a context with one sequence."""
        return n_ctx * self.row + self.fixed + self.ordinary

    @property
    def fixed(self) -> int:
        return self.window + self.bases

    def longest(self, n_bytes: int) -> tuple[int, int]:
        """Tokens that fit into n_bytes: coded, and in f16."""
        coded = max(n_bytes - self.fixed - self.ordinary, 0) // self.row
        return coded, max(n_bytes - self.ordinary_f16, 0) // self.f16


def elements(layout: Mapping[str, Any]) -> int:
    """K/V elements per token in the coded layers of a file's layout (subkv.h); latent layers have no V."""
    return sum(layer["n_head_kv"] * (layer["d_k"] + bool(layer["v"]) * layer["d_v"]) for layer in layout["layers"])


def sentences(
    cost: Cost,
    n_ctx: int,
    predicted: Mapping[str, float] | None,
    weights: int,
    available: int | None,
    trained: int = 0,
) -> Iterator[str]:
    """Cost and quality of a cache. predicted: nats per token of this layout ("subkv") and of llama.cpp's types.

    weights: bytes, 0: unknown. available: bytes of memory, None: unknown. trained: tokens of the trained context, 0:
    unknown.
    """
    from subkv.native.library import cache_types  # not for a --help

    total, exact = cost.bytes(n_ctx), n_ctx * cost.f16 + cost.ordinary_f16
    own, own_f16 = total - cost.ordinary, n_ctx * cost.f16
    q8_0 = exact * cache_types()["q8_0"][1] / cache_types()["f16"][1] / total
    than_q8_0 = f"{q8_0:.1f}× than q8_0" if q8_0 >= 1.05 else "not smaller than q8_0"
    yield (
        f"a context of {n_ctx} tokens takes {total / MIB:.1f} MiB instead of {exact / MIB:.1f} MiB in f16: "
        f"{exact / total:.1f}× smaller than f16, {than_q8_0}; {16 * own / own_f16:.2f} bits per element"
        f"{' of coded layers' if cost.layers else ''}, "
        f"{16 * cost.fixed / own_f16:.3f} of them for the exact window and bases, which take "
        f"{cost.fixed / MIB:.1f} MiB at any length" + (f"; {cost.layers}" if cost.layers else "")
    )
    if predicted:
        yield _quality(predicted)
    if available is not None:
        most = trained or max(cost.longest(available - weights))
        coded, f16 = (n if n == most else _round(n) for n in (min(n, most) for n in cost.longest(available - weights)))
        beside = f" beside the weights of {weights / MIB:.0f} MiB" if weights else ", the weights not counted"
        fit = f"all {trained} tokens of the trained context" if coded == trained else f"about {coded} tokens"
        yield f"{available / MIB:.0f} MiB of memory are available: {fit} fit{beside}, {f16} in f16"


def budgets(default: float, plans: Mapping[float, float | None], predicted: float | None = None) -> Iterator[str]:
    """A line about the budgets of a file with plans, in bits per element. plans: nats of KLD, None: unknown.

    default: the budget of the file's own layout, with the KLD `predicted`.
    """
    if not plans:
        return
    items = []
    for budget, kld in sorted({**plans, default: predicted}.items()):
        notes = ["default"] * (budget == default) + ([f"KLD {kld:.2g}"] if kld else [])
        items.append(f"{budget:g}" + (f" ({', '.join(notes)})" if notes else ""))
    yield f"bits per element that programs can choose (--kv-bits 3, -ctk subkv:3): {', '.join(items)}"


def _quality(predicted: Mapping[str, float]) -> str:
    own = predicted["subkv"]
    stock = sorted((error, kind) for kind, error in predicted.items() if kind != "subkv")
    better = [f"{kind}'s {error:.2g}" for error, kind in stock if error < own]
    worse = [f"{kind}'s {error:.2g}" for error, kind in stock if error >= own]
    parts = [f"at most {', '.join(worse)}"] * bool(worse) + [f"more than {', '.join(better)}"] * bool(better)
    return f"predicted KLD: {own:.2g} nats per token" + (f", {', '.join(parts)}" if parts else "")


def _round(n: int) -> int:
    """To two significant digits."""
    digits = max(len(str(n)) - 2, 0)
    return n // 10**digits * 10**digits
